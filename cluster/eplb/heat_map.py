"""A heat map of layers x ranks for the terminal: how busy every rank is, against the mean rank of its layer.

Eight shades, each a character and a colour, so that it reads without colours too; the legend names their ranges.
"""

import math
from collections.abc import Sequence

from rich.text import Text

_EDGES = (0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0)
_MARKS = "▁▂▃▄▅▆▇█"
_COLOURS = ("#3b4cc0", "#6f92f3", "#aac7fd", "#9a9a9a", "#f7b89c", "#e7745b", "#d0362d", "#a00020")
_WIDE_RANKS = 32


def heat_map(
    rank_rows: Sequence[Sequence[float]], balance_by_layer: Sequence[float | None] = ()
) -> Text:
    """``rank_rows`` [layers][ranks] as one line a layer, ranks from left to right, with its balance, and the legend."""
    if not rank_rows or not rank_rows[0]:
        return Text("no rows yet")
    ranks = len(rank_rows[0])
    width = 2 if ranks <= _WIDE_RANKS else 1
    digits = max(len("layer"), len(str(len(rank_rows) - 1)))
    text = Text(no_wrap=True, overflow="crop")
    text.append(f"{'layer':>{digits}}  ranks 0 to {ranks - 1}, rows against the mean rank\n", "dim")
    for layer, row in enumerate(rank_rows):
        text.append(f"{layer:>{digits}}  ")
        mean = math.fsum(row) / ranks
        for rows in row:
            shade = shade_of(rows / mean if mean > 0 else 1.0)
            text.append(_MARKS[shade] * width, _COLOURS[shade])
        balance = balance_by_layer[layer] if balance_by_layer else None
        text.append("\n" if balance is None else f"  {balance:.2f}\n")
    text.append(" " * digits + "  ")
    text.append_text(_legend())
    return text


def shade_of(ratio: float) -> int:
    """0 to 7 for a rank's rows over the mean of its layer."""
    return sum(ratio >= edge for edge in _EDGES)


def _legend() -> Text:
    text = Text()
    meanings = (*(f"<{edge:g}" for edge in _EDGES), "more")
    for mark, colour, meaning in zip(_MARKS, _COLOURS, meanings, strict=True):
        text.append(mark, colour)
        text.append(f" {meaning}  ", "dim")
    text.rstrip()
    return text
