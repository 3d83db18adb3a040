"""``headrace eplb show``: a saved report, a saved placement, or the placement that a deployment starts with."""

import argparse
from pathlib import Path
from typing import cast

from rich.console import Console

from ....model.config import load_config
from ....model.placement import ExpertPlacement, slots_per_rank
from ...config import PoolConfig, checkpoint_dir, load_cluster_config
from ..report import load_report
from ..series import load_placement
from ..show import placement_table, render_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.Command."""
    parser.add_argument(
        "what",
        metavar="FILE|CONFIG",
        help="a report (.json) of `headrace batch --eplb-report`, a placement (.npz), or a deployment",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change one key of the deployment",
    )
    parser.add_argument("--layer", type=int, metavar="N", help="where the experts of one layer lie")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> dict[str, object] | None:
    """See cli.Command."""
    what, layer = cast(str, args.what), cast("int | None", args.layer)
    path = Path(what)
    if path.suffix == ".json":
        report = load_report(path)
        if args.json:
            return dict(report)
        Console().print(render_report(report, layer=layer))
        return None
    if path.suffix == ".npz":
        placements = {str(path): load_placement(path)}
    else:
        placements = _of_deployment(what, cast("list[str]", args.overrides))
    if args.json:
        return {name: _document(placement) for name, placement in placements.items()}
    console = Console()
    for name, placement in placements.items():
        console.print(
            f"{name}: {placement.num_experts} experts on {placement.ranks} ranks x {placement.slots_per_rank} slots, "
            f"{placement.layers} layers",
            highlight=False,
            soft_wrap=True,
        )
        console.print(placement_table(placement.slots.tolist(), layer))
    return None


def _of_deployment(config: str, overrides: list[str]) -> dict[str, ExpertPlacement]:
    """How experts lie when an instance of either pool starts."""
    deployment = load_cluster_config(config, overrides)
    network = load_config(checkpoint_dir(deployment))
    pools: dict[str, PoolConfig] = {"prefill": deployment.prefill, "decode": deployment.decode}
    return {
        name: ExpertPlacement.initial(
            layers=network.num_hidden_layers,
            num_experts=network.n_routed_experts,
            ranks=pool.ranks,
            slots_per_rank=slots_per_rank(
                network.n_routed_experts, pool.ranks, pool.experts.redundant
            ),
        )
        for name, pool in pools.items()
    }


def _document(placement: ExpertPlacement) -> dict[str, object]:
    return {
        "num_experts": placement.num_experts,
        "placement": placement.slots.tolist(),
        "copies": placement.copies.tolist(),
    }
