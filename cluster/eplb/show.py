"""A report of expert placement in the terminal: where experts lie, how even the load is, what was moved and why."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...transfer.errors import ConfigError
from .heat_map import heat_map

Placement = Sequence[Sequence[Sequence[int]]]
"""[layers][ranks][slots of a rank]: logical expert, -1 for an empty slot."""
_MOST_RANKS_ACROSS = 8
_MOST_HISTORY = 12


def render_report(
    report: Mapping[str, Any], *, layer: int | None = None, placement: bool = True
) -> RenderableType:
    """Every instance of every pool of ``Cluster.eplb_report()``. Raises ConfigError for a layer that is not there."""
    parts: list[RenderableType] = []
    for pool, figures in report.items():
        for instance in figures["instances"]:
            if parts:
                parts.append("")
            parts += _instance(pool, figures, instance)
            if placement:
                parts.append(placement_table(instance["placement"], layer))
    return Group(*parts) if parts else Text("no pool shares experts among ranks")


def balance_line(report: Mapping[str, Any]) -> str:
    """The balance of every pool's instances in a few words, for a line of progress; empty before the first rows."""
    words: list[str] = []
    for pool, figures in report.items():
        values = [
            f"{instance['balance']:.2f}"
            for instance in figures["instances"]
            if instance["balance"] is not None
        ]
        if values:
            words.append(f"{pool} {' '.join(values)}")
    return "balance " + ", ".join(words) if words else ""


def placement_table(placement: Placement, layer: int | None = None) -> RenderableType:
    """Layers down and ranks across where they are few, else the ranks of ``layer`` with their experts."""
    layers, ranks = len(placement), len(placement[0])
    if layer is not None:
        if not 0 <= layer < layers:
            raise ConfigError(f"--layer {layer} is not allowed: 0 to {layers - 1}")
        table = Table("rank", f"experts of layer {layer}")
        for rank, slots in enumerate(placement[layer]):
            table.add_row(str(rank), _experts(slots))
        return table
    if ranks > _MOST_RANKS_ACROSS:
        return Text("--layer N shows where the experts of a layer lie", "dim")
    table = Table("layer", *(f"rank {rank}" for rank in range(ranks)))
    for number, row in enumerate(placement):
        table.add_row(str(number), *(_experts(slots) for slots in row))
    return table


def _experts(slots: Sequence[int]) -> str:
    return " ".join("-" if expert < 0 else str(expert) for expert in slots)


def _instance(
    pool: str, figures: Mapping[str, Any], instance: Mapping[str, Any]
) -> list[RenderableType]:
    ranks = instance["placement"][0]
    text = (
        f"{pool} instance {instance['instance']}: {instance['num_experts']} experts on {len(ranks)} ranks x "
        f"{len(ranks[0])} slots, epoch {instance['epoch']}, rebalancing {'on' if figures['enabled'] else 'off'}\n"
        f"balance {_ratio(instance['balance'])} over the last {instance['window_steps']} steps"
    )
    if instance["predicted_balance"] is not None:
        text += (
            f"; the plan in force predicted {_ratio(instance['predicted_balance'])}"
            f" and achieves {_ratio(instance['achieved_balance'])}"
        )
    if figures["enabled"]:
        text += (
            f"\nmoved {instance['moved_experts']} experts, {instance['moved_bytes'] / 1e6:,.1f} MB; "
            f"{instance['flips']} layers flipped, {instance['abandoned']} plans abandoned; "
            f"passes waited {instance['stall_s'] * 1e3:.1f} ms"
        )
    if figures["restarted"]:
        text += "\nthe EPLB actor was restarted: the history begins anew"
    parts: list[RenderableType] = [
        Text(text),
        heat_map(instance["rank_rows"], instance["balance_by_layer"]),
    ]
    if instance["history"]:
        parts.append(_history(instance["history"]))
    return parts


def _history(history: Sequence[Mapping[str, Any]]) -> Table:
    headings = (
        "s",
        "step",
        "epoch",
        "outcome",
        "before",
        "predicted",
        "achieved",
        "experts",
        "MB",
        "plan ms",
        "move s",
    )
    table = Table(*headings)
    for entry in history[-_MOST_HISTORY:]:
        table.add_row(
            f"{entry['time_s']:.1f}",
            str(entry["step"]),
            str(entry["epoch"]),
            str(entry["outcome"]),
            _ratio(entry["balance_before"]),
            _ratio(entry["predicted_balance"]),
            _ratio(entry["achieved_balance"]),
            str(entry["moved_experts"]),
            f"{entry['moved_bytes'] / 1e6:,.1f}",
            f"{entry['plan_s'] * 1e3:.0f}",
            f"{entry['move_s']:.2f}",
        )
    return table


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
