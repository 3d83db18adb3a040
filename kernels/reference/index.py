"""Index scores, top-k selection and the candidate pool (spec/model.md 2.7, 2.8).

Shapes: S spans, T rows, h index heads, d index width, E entries.
"""

import torch
from torch import Tensor

ENTRY_TILE = 128
_TILE_ROWS = 16


def rows_per_tile(num_heads: int) -> int:
    """Query rows that share one product of fixed shape."""
    return max(1, _TILE_ROWS // num_heads)


def padded_entries(num_entries: int, top_k: int) -> int:
    """Entries rounded up to whole tiles, at least ``top_k``."""
    return -(-max(num_entries, top_k, 1) // ENTRY_TILE) * ENTRY_TILE


def index_scores(queries: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """sum over heads of ``head_weights`` * relu(query . key).

    ``queries`` [S, n, h, d], ``head_weights`` [S, n, h], ``keys`` [S, E, d] with E whole tiles: [S, n, E].
    Every product has the shape (tile of rows * h, d) x (d, tile of entries), so a score does not depend on how many
    rows or entries are in the call.
    """
    spans, rows, heads, width = queries.shape
    per_tile = rows_per_tile(heads)
    tiles = -(-rows // per_tile)
    padded = torch.nn.functional.pad(queries, (0, 0, 0, 0, 0, tiles * per_tile - rows))
    left = padded.reshape(spans, tiles, per_tile * heads, width)
    right = keys.view(spans, -1, ENTRY_TILE, width).transpose(2, 3)
    entry_tiles = right.shape[1]
    if tiles == 1:
        products = torch.bmm(
            left.expand(-1, entry_tiles, -1, -1).reshape(-1, per_tile * heads, width),
            right.reshape(-1, width, ENTRY_TILE),
        ).view(spans, entry_tiles, 1, per_tile * heads, ENTRY_TILE)
    else:
        products = torch.stack(
            [
                torch.bmm(left[s], right[s, e].contiguous().expand(tiles, -1, -1))
                for s in range(spans)
                for e in range(entry_tiles)
            ]
        ).view(spans, entry_tiles, tiles, per_tile * heads, ENTRY_TILE)
    per_head = products.view(spans, entry_tiles, tiles * per_tile, heads, ENTRY_TILE)[:, :, :rows].relu_()
    weights = head_weights.unsqueeze(1).unsqueeze(-1)
    total = per_head[:, :, :, 0] * weights[:, :, :, 0]
    for head in range(1, heads):
        total = total + per_head[:, :, :, head] * weights[:, :, :, head]
    return total.transpose(1, 2).reshape(spans, rows, entry_tiles * ENTRY_TILE)


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest scores along the last axis, best first, ties to the smaller index: int64."""
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    position = torch.arange(scores.shape[-1] - 1, -1, -1, dtype=torch.int64)
    best = torch.topk((ordered << 32) | position, count, dim=-1, sorted=True).values
    return scores.shape[-1] - 1 - (best & 0xFFFFFFFF)


def select_entries(scores: Tensor, count: int) -> Tensor:
    """The ``count`` best entries of ``scores`` [..., E], -1 where fewer than ``count`` are above -inf."""
    chosen = top_indices(scores, count)
    return chosen.masked_fill_(scores.gather(-1, chosen) == -torch.inf, -1)


def candidate_pool(scores: Tensor, num_visible: Tensor, num_blocks: int, block: int) -> Tensor:
    """Entries in the ``num_blocks`` best blocks of ``block`` entries; the newest visible block is always in.

    ``scores`` [..., E] with -inf where an entry is not visible, ``num_visible`` [...]: bool [..., E].
    """
    best = scores.unflatten(-1, (-1, block)).amax(dim=-1)
    newest = ((num_visible - 1) // block).clamp_(min=0).unsqueeze(-1)
    best = best.scatter(-1, newest, torch.where(num_visible > 0, torch.inf, -torch.inf).unsqueeze(-1))
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(-1, top_indices(best, min(num_blocks, best.shape[-1])), True)
    kept &= best > -torch.inf
    return kept.unsqueeze(-1).expand(*kept.shape, block).flatten(-2)
