"""``headrace eplb make-load``: a synthetic series for ``plan``, ``replay`` and ``bench eplb``."""

import argparse
from pathlib import Path

import numpy as np

from ....transfer.errors import ConfigError
from ..loads import LOADS, make_load
from ..output import check_writable
from ..series import Series, save_series


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.Command."""
    parser.add_argument("--kind", required=True, choices=sorted(LOADS), help="how experts are used")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.npz")
    parser.add_argument("--steps", type=int, default=100, help="default: 100")
    parser.add_argument("--layers", type=int, default=40, help="default: 40")
    parser.add_argument("--experts", type=int, default=384, help="of a layer; default: 384")
    parser.add_argument(
        "--assignments",
        type=int,
        default=98_304,
        help="rows times experts a row, in one step and layer; default: 98304 (16384 rows, top 6)",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> dict[str, object]:
    """See cli.Command."""
    for name, least in (
        ("steps", 1),
        ("layers", 1),
        ("experts", 1),
        ("assignments", 1),
        ("seed", 0),
    ):
        if getattr(args, name) < least:
            raise ConfigError(
                f"--{name} {getattr(args, name)} is not allowed: an integer of at least {least}"
            )
    check_writable(args.output, "--output")
    rows = make_load(
        args.kind,
        steps=args.steps,
        layers=args.layers,
        experts=args.experts,
        assignments=args.assignments,
        seed=args.seed,
    )
    save_series(
        args.output, Series(rows=rows, steps=np.arange(args.steps), traffic_class=args.kind)
    )
    return {
        "output": str(args.output),
        "kind": args.kind,
        "steps": args.steps,
        "layers": args.layers,
        "experts": args.experts,
        "assignments": args.assignments,
        "seed": args.seed,
    }
