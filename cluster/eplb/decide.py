"""Does a plan pay: rows that the busiest ranks are spared over the horizon, against the bytes to be moved."""

from dataclasses import dataclass

__all__ = ["MoveDecision", "decide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveDecision:
    """The answer, with the numbers it stands on."""

    pays: bool
    gain: float
    """Share of the present peak that the plan saves, 0.05 for 5 %."""
    gained_rows: float
    """Rows that the busiest ranks are spared over the horizon, all layers together."""
    moved_bytes: int
    reason: str
    """One sentence for the log."""


def decide(
    *,
    peak_now: float,
    peak_planned: float,
    moved: int,
    expert_bytes: int,
    horizon_steps: int,
    min_gain: float = 0.02,
    rows_per_byte: float = 0.0,
) -> MoveDecision:
    """Whether to move: the gain is at least ``min_gain`` and the rows gained outweigh the bytes.

    Args:
        peak_now: rows of the busiest rank of a step, summed over layers, under the present placement.
        peak_planned: the same under the plan, on the same (forecast) rows.
        moved: slots to be filled.
        expert_bytes: weights of one expert in one layer.
        horizon_steps: for how many steps the plan is expected to hold.
        min_gain: smallest share of ``peak_now`` worth a move.
        rows_per_byte: rows of work that moving one byte costs the ranks.
    """
    saved = peak_now - peak_planned
    gain = saved / peak_now if peak_now > 0 else 0.0
    gained_rows = saved * horizon_steps
    moved_bytes = moved * expert_bytes
    cost = moved_bytes * rows_per_byte
    if moved == 0:
        pays, reason = False, "the plan is what is in force"
    elif gain < min_gain:
        pays, reason = False, f"gain {gain:.2%} is below {min_gain:.2%}"
    elif gained_rows <= cost:
        pays, reason = (
            False,
            f"{gained_rows:.0f} rows gained do not outweigh {cost:.0f} rows of moving",
        )
    else:
        pays, reason = True, f"gain {gain:.2%} for {moved} slots, {moved_bytes} bytes"
    return MoveDecision(
        pays=pays,
        gain=gain,
        gained_rows=gained_rows,
        moved_bytes=moved_bytes,
        reason=reason,
    )
