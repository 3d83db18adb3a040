"""``headrace eplb replay``: what rebalancing would have made of a saved series, on any number of ranks.

Decisions are taken from what had been seen until then.
"""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ....transfer.errors import ConfigError
from ..config import EplbConfig
from ..output import check_writable
from ..replay import Pace, document, replay
from ..series import save_placement
from .plan import add_shape_arguments, describe, number, read_shape

_DEFAULT = EplbConfig()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.Command."""
    add_shape_arguments(parser)
    parser.add_argument(
        "--interval", type=int, default=100, metavar="STEPS", help="between decisions; default: 100"
    )
    parser.add_argument(
        "--step-ms", type=float, default=40.0, metavar="MS", help="of one step; default: 40"
    )
    parser.add_argument("--keep-steps", type=int, help="steps that a decision looks back on")
    parser.add_argument("--min-gain", type=float, help="smallest gain that is worth a move")
    parser.add_argument("--horizon-steps", type=int, help="steps for which a plan should hold")
    parser.add_argument("--bandwidth-mib-per-s", type=float, help="cap of the weights that move")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.npz", help="where the last placement is saved"
    )


def run(args: argparse.Namespace) -> dict[str, object] | None:
    """See cli.Command."""
    if args.interval < 1:
        raise ConfigError(f"--interval {args.interval} is not allowed: an integer of at least 1")
    if not (math.isfinite(args.step_ms) and args.step_ms > 0):
        raise ConfigError(f"--step-ms {args.step_ms:g} is not allowed: milliseconds above 0")
    if args.output is not None:
        check_writable(args.output, "--output")
    series, present = read_shape(args)
    config = _config(args)
    pace = Pace(interval=args.interval, step_s=args.step_ms / 1e3)
    replayed = replay(series.rows, present, config, pace, args.expert_bytes)
    if args.output is not None:
        save_placement(args.output, replayed.slots)
    result: dict[str, Any] = {
        **describe(args, series),
        "interval_steps": args.interval,
        "step_ms": args.step_ms,
        **document(replayed),
    }
    if args.json:
        return result
    _print(result)
    return None


def _config(args: argparse.Namespace) -> EplbConfig:
    """The defaults, and what the arguments say instead."""
    given = {
        name: value
        for name in ("keep_steps", "min_gain", "horizon_steps", "bandwidth_mib_per_s")
        if (value := getattr(args, name)) is not None
    }
    given |= {"ranks_per_domain": args.ranks_per_domain, "plan_s": args.deadline}
    return dataclasses.replace(_DEFAULT, **given)


def _print(result: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"{result['load']}: {result['steps']} steps x {result['layers']} layers x {result['experts']} experts, "
        f"{result['ranks']} ranks x {result['slots_per_rank']} slots, {result['step_ms']:g} ms a step",
        highlight=False,
        soft_wrap=True,
    )
    table = Table()
    for heading in ("steps", "unmoved", "balance", "planned", "experts", "MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("decision", no_wrap=True)
    for entry in result["intervals"]:
        table.add_row(
            f"{entry['first_step']}-{entry['end_step'] - 1}",
            number(entry["balance_unmoved"]),
            number(entry["balance"]),
            number(entry["predicted_balance"]),
            str(entry["moved_experts"] or "-"),
            f"{entry['moved_bytes'] / 1e6:,.0f}" if entry["moved_bytes"] else "-",
            str(entry["outcome"]),
        )
    console.print(table)
    console.print(
        f"balance {number(result['balance_unmoved'])} unmoved, {number(result['balance'])} "
        f"with {result['moves']} moves of {result['moved_experts']} experts, {result['moved_bytes'] / 1e6:,.0f} MB; "
        f"{result['plan_s']} s of planning",
        highlight=False,
        soft_wrap=True,
    )
