"""Where experts lie, in the terminal."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ...transfer.errors import ConfigError

Placement = Sequence[Sequence[Sequence[int]]]
"""[layers][ranks][slots of a rank]: logical expert, -1 for an empty slot."""
_MOST_RANKS_ACROSS = 8


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
