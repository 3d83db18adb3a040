"""``headrace bench eplb``: rebalancing plans for the same loads in one run, ours beside the two published algorithms.

    none               experts in their order, spare slots with experts 0, 1, 2 ...
    deepseek           DeepSeek's public EPLB, global
    deepinfer          DeepInfer's greedy on per-step peaks
    ours               the planner from scratch
    ours from present  the planner from a placement that it made for the first half, with a price on every move

``peak_over_mean`` is judged on the rows that the plan was made for. For the held-out figures a plan is made for the
first half of the steps (ours for a forecast of it) and judged on the second. ``bytes_moved`` counts from that same
placement made for the first half.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ...transfer.errors import ConfigError
from ..eplb.baselines import contiguous, deepinfer, deepseek
from ..eplb.figures import RELEASED_EXPERT_BYTES
from ..eplb.forecast import forecast
from ..eplb.loads import LOADS, make_load
from ..eplb.measure import balance, moved_slots, peak_over_mean, rank_loads
from ..eplb.plan import PlanLimits, make_plan, warm_up
from ..eplb.series import load_series

_ROWS_PER_RANK = 2048
_MOVE_COST = 0.0006
"""Of the rows of the mean rank in a layer over all steps: with 100 steps, 6 % of a rank's rows in one step."""

Rows = NDArray[np.int64]
Slots = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One plan for one load. ``held_out_balance`` is mean over busiest rank of the held-out rows summed over steps, the
    mean of layers; ``held_out_step_balance`` the same of every single step."""

    load: str
    plan: str
    peak_over_mean: float
    bound: float
    held_out_peak_over_mean: float
    held_out_balance: float
    held_out_step_balance: float
    seconds: float
    bytes_moved: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.Command."""
    parser.add_argument(
        "--load", type=Path, metavar="FILE.npz", help="rows [steps, layers, experts]"
    )
    parser.add_argument(
        "--loads",
        nargs="+",
        choices=sorted(LOADS),
        metavar="NAME",
        help=f"synthetic loads, used without --load; default: all of {', '.join(LOADS)}",
    )
    for name, default, what in (
        ("steps", 100, "of a synthetic load"),
        ("layers", 40, "of a synthetic load"),
        ("experts", 384, "of a layer of a synthetic load"),
        ("ranks", 64, "of the instance"),
        ("slots", 7, "expert slots of a rank in every layer"),
        ("expert-bytes", RELEASED_EXPERT_BYTES, "weights of one expert"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{what}; default: {default}"
        )
    parser.add_argument(
        "--assignments",
        type=int,
        help=f"rows routed in a step and layer of a synthetic load; default: {_ROWS_PER_RANK} a rank",
    )
    parser.add_argument(
        "--deadline", type=float, default=1.0, metavar="S", help="of one plan of ours; default: 1 s"
    )
    parser.add_argument(
        "--move-cost",
        type=float,
        metavar="ROWS",
        help="rows that filling a slot has to save, for ours from present;"
        f" default: {_MOVE_COST} of the rows of a rank in a layer",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: argparse.Namespace) -> list[dict[str, object]] | None:
    """See cli.Command."""
    for name in ("steps", "layers", "experts", "ranks", "slots", "expert_bytes", "assignments"):
        value, least = getattr(args, name), 2 if name == "steps" else 1
        if value is not None and value < least:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {value} is not allowed: an integer of at least {least}")
    limits = PlanLimits(ranks=args.ranks, slots_per_rank=args.slots, deadline_s=args.deadline)
    if args.move_cost is not None and args.move_cost < 0:
        raise ConfigError(f"--move-cost {args.move_cost} is not allowed: 0 or more rows")
    warm_up()
    results: list[Result] = []
    for name, rows in _loads(args):
        results += measure(name, rows, limits, args.expert_bytes, args.move_cost)
        sys.stderr.write(f"{name}: {len(results)} plans so far\n")
    if args.json:
        return [asdict(result) for result in results]
    _print(results)
    return None


def _loads(args: argparse.Namespace) -> Iterator[tuple[str, Rows]]:
    if args.load is not None:
        rows = load_series(args.load).rows.astype(np.int64)
        if len(rows) < 2:
            raise ConfigError(
                f"{args.load} has {len(rows)} steps; at least 2 are needed to judge a plan"
            )
        if not rows[: len(rows) // 2].any():
            raise ConfigError(f"{args.load} has no rows in its first half; give a series with load")
        yield args.load.name, rows
        return
    for name in args.loads or LOADS:
        yield (
            name,
            make_load(
                name,
                steps=args.steps,
                layers=args.layers,
                experts=args.experts,
                assignments=args.assignments or args.ranks * _ROWS_PER_RANK,
            ),
        )


def measure(
    name: str, rows: Rows, limits: PlanLimits, expert_bytes: int, move_cost: float | None = None
) -> list[Result]:
    """All plans for ``rows`` [steps, layers, experts], judged on all of them and held out.

    Raises:
        ConfigError: the slots cannot hold the experts.
    """
    steps, layers, experts = rows.shape
    ranks, size = limits.ranks, limits.slots_per_rank
    half = steps // 2
    first, rest = rows[:half], rows[half:]
    present = make_plan(first, limits).slots
    bound = make_plan(rows, PlanLimits(ranks=ranks, slots_per_rank=size, deadline_s=0)).bound
    earlier = make_plan(forecast(first[: max(1, half // 2)]), limits).slots

    def priced(values: NDArray[Any], now: Slots) -> Slots:
        cost = _MOVE_COST * float(values.sum()) / layers / ranks if move_cost is None else move_cost
        kept = PlanLimits(
            ranks=ranks, slots_per_rank=size, deadline_s=limits.deadline_s, move_cost=cost
        )
        return make_plan(values, kept, now).slots

    plans: dict[str, tuple[Callable[[], Slots], Callable[[], Slots]]] = {
        "none": (
            lambda: contiguous(layers, experts, ranks, size),
            lambda: contiguous(layers, experts, ranks, size),
        ),
        "deepseek": (lambda: deepseek(rows, ranks, size), lambda: deepseek(first, ranks, size)),
        "deepinfer": (lambda: deepinfer(rows, ranks, size), lambda: deepinfer(first, ranks, size)),
        "ours": (
            lambda: make_plan(rows, limits).slots,
            lambda: make_plan(forecast(first), limits).slots,
        ),
        "ours from present": (
            lambda: priced(rows, present),
            lambda: priced(forecast(first), earlier),
        ),
    }
    results: list[Result] = []
    for plan, (fitted, unseen) in plans.items():
        began = time.perf_counter()
        slots = fitted()
        seconds = time.perf_counter() - began
        blind = unseen()
        results.append(
            Result(
                load=name,
                plan=plan,
                peak_over_mean=round(peak_over_mean(rows, slots), 5),
                bound=round(bound, 5),
                held_out_peak_over_mean=round(peak_over_mean(rest, blind), 5),
                held_out_balance=round(float(balance(rest, blind).mean()), 5),
                held_out_step_balance=round(_step_balance(rest, blind), 5),
                seconds=round(seconds, 4),
                bytes_moved=0 if plan == "none" else moved_slots(slots, present) * expert_bytes,
            )
        )
    return results


def _step_balance(rows: Rows, slots: Slots) -> float:
    """Mean over busiest rank of every step and layer, averaged; steps without rows count as balanced."""
    loads = rank_loads(rows, slots)
    peak = loads.max(2)
    return float(np.divide(loads.mean(2), peak, out=np.ones_like(peak), where=peak > 0).mean())


def _print(results: list[Result]) -> None:
    table = Table(
        title="rebalancing plans: sum of per-step peaks over sum of means, 1.0 is perfect"
    )
    for column in ("load", "plan"):
        table.add_column(column)
    for column in ("peak/mean", "bound", "held out", "balance", "of a step", "seconds", "GB moved"):
        table.add_column(column, justify="right")
    last = ""
    for result in results:
        if last not in ("", result.load):
            table.add_section()
        table.add_row(
            "" if result.load == last else result.load,
            result.plan,
            f"{result.peak_over_mean:.4f}",
            f"{result.bound:.4f}",
            f"{result.held_out_peak_over_mean:.4f}",
            f"{result.held_out_balance:.3f}",
            f"{result.held_out_step_balance:.3f}",
            f"{result.seconds:.2f}",
            f"{result.bytes_moved / 1e9:.1f}",
        )
        last = result.load
    Console(width=120).print(table)
