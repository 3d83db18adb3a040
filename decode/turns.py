"""The next step of a rank, from its budget and how far every answer is."""

from collections.abc import Iterable, Sequence

from .config import DecodeConfig
from .lane import Lane, Replay, StepPlan, Turn
from .planner import max_drafts, replay_chunks
from .residents import Resident
from .speculation import StepBudget

_UNBOUNDED = 1 << 30


def wants_pass(residents: Iterable[Resident]) -> bool:
    """Whether a step could run a row of any of these."""
    return any(r.left > 0 or not r.is_whole for r in residents)


def plan_step(
    running: Iterable[Resident],
    budget: StepBudget,
    stalled: str | None,
    config: DecodeConfig,
) -> tuple[StepPlan, dict[Lane, Resident]]:
    """The plan, and whose lanes its turns are. The request ``stalled`` has to wait this step.

    Beside turns at most ``recompute_tokens`` rows of dropped caches and ``tail_tokens`` rows of tails run (``config``);
    tails that keep nobody waiting run whole.
    """
    turns: list[Turn] = []
    residents: dict[Lane, Resident] = {}
    replaying: list[Resident] = []
    late: list[Resident] = []
    for resident in running:
        assert resident.room is not None
        if resident.num_replayed is not None:
            replaying.append(resident)
            continue
        if resident.late_from is not None:
            late.append(resident)
            continue
        drafts = max_drafts(resident.left, budget.max_drafts)
        if drafts is None or resident.request_id == stalled:
            continue
        turns.append(Turn(lane=resident.lane, blocks=resident.room.blocks, max_drafts=drafts))
        residents[resident.lane] = resident
    plan = StepPlan(
        turns=tuple(turns),
        replays=(
            *_replays(replaying, config.recompute_tokens),
            *_tails(late, config.tail_tokens if turns else _UNBOUNDED),
        ),
        min_survival=budget.min_survival,
        draft=budget.draft,
    )
    return plan, residents


def _tails(late: Sequence[Resident], tail_tokens: int) -> list[Replay]:
    """The next rows of tails; whoever has run them all takes turns from the next step on."""
    begins = [resident.late_from or 0 for resident in late]
    ends = [resident.num_context - 1 for resident in late]
    counts = replay_chunks(ends, begins, tail_tokens)
    tails: list[Replay] = []
    for resident, begin, end, count in zip(late, begins, ends, counts, strict=True):
        assert resident.room is not None
        resident.late_from = begin + count if begin + count < end else None
        if count:
            blocks = resident.room.blocks
            tails.append(
                Replay(lane=resident.lane, blocks=blocks, start=begin, count=count, late=True)
            )
    return tails


def _replays(replaying: Sequence[Resident], recompute_tokens: int) -> list[Replay]:
    """The next rows of dropped caches; whoever has them all goes on as before in the next step."""
    lengths = [resident.num_context - 1 for resident in replaying]
    done = [resident.num_replayed or 0 for resident in replaying]
    counts = replay_chunks(lengths, done, recompute_tokens)
    replays: list[Replay] = []
    for resident, length, start, count in zip(replaying, lengths, done, counts, strict=True):
        assert resident.room is not None
        resident.num_replayed = start + count if start + count < length else None
        if count:
            replays.append(
                Replay(lane=resident.lane, blocks=resident.room.blocks, start=start, count=count)
            )
    return replays
