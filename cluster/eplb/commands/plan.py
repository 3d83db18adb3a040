"""``headrace eplb plan``: what the planner would do with a saved series, without a cluster.

The plan is made for the series as it is. With ``--held-out`` it is made as a running deployment would make it, from a
forecast of the first part, and judged on the rest, which it has not seen.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ....model.placement import ExpertPlacement
from ....transfer.errors import ConfigError
from ..figures import RELEASED_EXPERT_BYTES, figures
from ..forecast import forecast
from ..heat_map import heat_map
from ..output import check_writable
from ..plan import PlanLimits, make_plan
from ..series import Series, load_placement, load_series, save_placement

_HALF = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.Command."""
    add_shape_arguments(parser)
    parser.add_argument(
        "--move-cost",
        type=float,
        default=0.0,
        metavar="ROWS",
        help="rows of the busiest rank that filling one slot has to save; default: 0",
    )
    parser.add_argument(
        "--held-out",
        type=float,
        nargs="?",
        const=_HALF,
        metavar="SHARE",
        help="plan from a forecast of the first steps, judge on this share of them; default: 0.5",
    )
    parser.add_argument("--output", type=Path, metavar="FILE.npz", help="where the plan is saved")


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``plan`` and ``replay`` are told about the series and the instance."""
    parser.add_argument(
        "--load", type=Path, required=True, metavar="FILE.npz", help="rows [steps, layers, experts]"
    )
    parser.add_argument("--ranks", type=int, required=True, help="ranks of the instance")
    parser.add_argument(
        "--slots", type=int, required=True, help="expert slots of a rank in every layer"
    )
    parser.add_argument(
        "--present",
        type=Path,
        metavar="FILE.npz",
        help="the placement to start from; default: experts in order, as an instance starts",
    )
    parser.add_argument(
        "--ranks-per-domain", type=int, metavar="N", help="ranks that share a scale-up domain"
    )
    parser.add_argument(
        "--deadline", type=float, default=1.0, metavar="S", help="of planning; default: 1 s"
    )
    parser.add_argument(
        "--expert-bytes",
        type=int,
        default=RELEASED_EXPERT_BYTES,
        metavar="BYTES",
        help="weights of one expert; default: the released model's",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def describe(args: argparse.Namespace, series: Series) -> dict[str, Any]:
    """What every document of these commands begins with."""
    return {
        "load": str(args.load),
        "steps": len(series.rows),
        "layers": series.layers,
        "experts": series.experts,
        "ranks": args.ranks,
        "slots_per_rank": args.slots,
    }


def read_shape(args: argparse.Namespace) -> tuple[Series, NDArray[np.int32]]:
    """The series, and the present placement int32 [layers, ranks, S]. Raises ConfigError."""
    for name, least in (("ranks", 1), ("slots", 1), ("expert_bytes", 1), ("ranks_per_domain", 1)):
        value: int | None = getattr(args, name)
        if value is not None and value < least:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} {value} is not allowed: an integer of at least {least}")
    if not (math.isfinite(args.deadline) and args.deadline > 0):
        raise ConfigError(f"--deadline {args.deadline:g} is not allowed: seconds above 0")
    if args.ranks_per_domain is not None and args.ranks % args.ranks_per_domain:
        raise ConfigError(
            f"--ranks-per-domain {args.ranks_per_domain} does not divide --ranks {args.ranks}: domains are of one size"
        )
    series = load_series(args.load)
    if args.ranks * args.slots < series.experts:
        least_slots = -(-series.experts // args.ranks)
        raise ConfigError(
            f"--ranks {args.ranks} x --slots {args.slots} cannot hold the {series.experts} experts of {args.load}:"
            f" give at least --slots {least_slots}"
        )
    if args.present is None:
        placement = ExpertPlacement.initial(
            layers=series.layers,
            num_experts=series.experts,
            ranks=args.ranks,
            slots_per_rank=args.slots,
        )
        return series, placement.slots
    placement = load_placement(args.present, series.experts)
    wanted = (series.layers, args.ranks, args.slots)
    if placement.slots.shape != wanted:
        raise ConfigError(
            f"--present {args.present} is a placement of {list(placement.slots.shape)} [layers, ranks, slots];"
            f" --load, --ranks and --slots say {list(wanted)}"
        )
    return series, placement.slots


def run(args: argparse.Namespace) -> dict[str, object] | None:
    """See cli.Command."""
    if not (math.isfinite(args.move_cost) and args.move_cost >= 0):
        raise ConfigError(f"--move-cost {args.move_cost:g} is not allowed: rows of at least 0")
    if args.output is not None:
        check_writable(args.output, "--output")
    series, present = read_shape(args)
    fitted, judged = series.rows, series.rows
    if args.held_out is not None:
        cut = _cut(args.held_out, len(series.rows))
        fitted, judged = series.rows[:cut], series.rows[cut:]
    limits = PlanLimits(
        ranks=args.ranks,
        slots_per_rank=args.slots,
        ranks_per_domain=args.ranks_per_domain,
        deadline_s=args.deadline,
        move_cost=args.move_cost,
    )
    planned = make_plan(fitted if args.held_out is None else forecast(fitted), limits, present)
    if args.output is not None:
        save_placement(args.output, planned.slots)
    document: dict[str, Any] = {
        **describe(args, series),
        "ranks_per_domain": args.ranks_per_domain,
        "present": str(args.present or "in order"),
        "planned_for": "the series"
        if args.held_out is None
        else f"a forecast of {len(fitted)} steps",
        "judged_steps": len(judged),
        "before": figures(judged, present),
        "after": figures(judged, planned.slots),
        "planned_peak_over_mean": round(planned.peak_over_mean, 4),
        "bound_peak_over_mean": round(planned.bound, 4),
        "moved_experts": planned.moved,
        "moved_bytes": planned.moved * args.expert_bytes,
        "plan_s": round(planned.seconds, 3),
        "output": None if args.output is None else str(args.output),
    }
    if args.json:
        return document
    _print(document)
    return None


def _cut(share: float, steps: int) -> int:
    """The first step that is held out."""
    if not 0 < share < 1:
        raise ConfigError(f"--held-out {share:g} is not allowed: a share between 0 and 1")
    cut = steps - max(1, round(share * steps))
    if cut < 1:
        raise ConfigError(f"--held-out {share:g} leaves nothing of {steps} steps to plan from")
    return cut


def _print(document: dict[str, Any]) -> None:
    console = Console()
    shape = (
        f"{document['steps']} steps x {document['layers']} layers x {document['experts']} experts, "
        f"{document['ranks']} ranks x {document['slots_per_rank']} slots"
    )
    console.print(f"{document['load']}: {shape}", highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("layer", justify="right")
    table.add_column("balance before", justify="right")
    table.add_column("after", justify="right")
    before, after = document["before"], document["after"]
    for layer, (old, new) in enumerate(
        zip(before["balance_by_layer"], after["balance_by_layer"], strict=True)
    ):
        table.add_row(str(layer), number(old), number(new))
    table.add_section()
    table.add_row("all", number(before["balance"]), number(after["balance"]), style="bold")
    console.print(table)
    console.print(heat_map(after["rank_rows"], after["balance_by_layer"]))
    judged = (
        ""
        if document["planned_for"] == "the series"
        else (f", judged on the {document['judged_steps']} that follow")
    )
    console.print(
        f"planned for {document['planned_for']}{judged}, in {document['plan_s']} s\n"
        f"peak over mean {number(before['peak_over_mean'])} -> {number(after['peak_over_mean'])}; "
        f"what was planned for: {document['planned_peak_over_mean']}, "
        f"no placement is below {document['bound_peak_over_mean']}\n"
        f"moves {document['moved_experts']} experts, {document['moved_bytes'] / 1e6:,.1f} MB",
        highlight=False,
        soft_wrap=True,
    )


def number(value: float | None) -> str:
    """A ratio for a table."""
    return "-" if value is None else f"{value:.3f}"
