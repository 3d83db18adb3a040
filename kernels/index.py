"""Index scores, top-k selection and the candidate pool, from stored keys in one pass (spec/model.md 2.7, 2.8).

Shapes: T rows, S spans, h index heads, d index width, E entries, C blocks of a span's table.
"""

import numpy as np
import torch
from torch import Tensor

from ._formats import load_row
from ._gemm import multiply
from ._numba import compiled, inner
from .reference.storage import RowFormat

_ROWS = 32
"""Rows of a span that share every key that is read."""
_ENTRIES = 128
"""Entries that are scored together, so that their keys lie in cache."""


@inner("int64(float32[::1], int64, int64[::1])")
def _rank(scores: np.ndarray, count: int, best: np.ndarray) -> int:
    """Indices of the largest of ``scores[:count]`` above -inf into ``best``, largest first, ties to the smaller
    index; -1 behind.

    Returns how many there are.
    """
    held = 0
    most = best.shape[0]
    for e in range(count):
        score = scores[e]
        if score == -np.inf or (held == most and score <= scores[best[held - 1]]):
            continue
        at = held if held < most else most - 1
        while at > 0 and score > scores[best[at - 1]]:
            best[at] = best[at - 1]
            at -= 1
        best[at] = e
        held = min(held + 1, most)
    for i in range(held, most):
        best[i] = -1
    return held


@inner("void(float32[:,::1], int64, int64, float32[:,::1])")
def _turn_queries(queries: np.ndarray, begin: int, end: int, across: np.ndarray) -> None:
    """``queries[begin:end]`` as columns of ``across`` [d, n]."""
    for c in range(across.shape[0]):
        for i in range(begin, end):
            across[c, i - begin] = queries[i, c]


@inner("void(float32[:,::1], int64, float32[::1], int64, float32[::1])")
def _add_heads(
    products: np.ndarray, first: int, weights: np.ndarray, count: int, out: np.ndarray
) -> None:
    """``out`` [n] = sum over heads of weight * relu(product), in the order of heads; ``products`` [n, .]."""
    heads = weights.shape[0]
    for e in range(count):
        total = weights[0] * max(products[e, first], np.float32(0))
        for h in range(1, heads):
            total += weights[h] * max(products[e, first + h], np.float32(0))
        out[e] = total


@inner("void(float32[::1], int64, int64, float32[::1], int64[::1])")
def _keep_blocks(
    scores: np.ndarray, visible: int, block: int, best: np.ndarray, kept: np.ndarray
) -> None:
    """Numbers of the best blocks, the newest visible one among them, ascending, -1 where there are fewer."""
    blocks = (visible + block - 1) // block
    for b in range(blocks):
        best[b] = -np.inf
        for e in range(b * block, min(visible, (b + 1) * block)):
            best[b] = max(best[b], scores[e])
    if blocks:
        best[blocks - 1] = np.inf
    count = _rank(best, blocks, kept)
    for i in range(count):
        number, at = kept[i], i
        while at > 0 and kept[at - 1] > number:
            kept[at] = kept[at - 1]
            at -= 1
        kept[at] = number


@compiled
def _select(
    queries: np.ndarray,
    weights: np.ndarray,
    stored: np.ndarray,
    tables: np.ndarray,
    first_row: np.ndarray,
    visible: np.ndarray,
    longest: int,
    kind: int,
    block: int,
    selected: np.ndarray,
    kept: np.ndarray,
) -> None:
    heads, width, per_block = weights.shape[1], queries.shape[1], stored.shape[1]
    scores = np.empty((_ROWS, longest), np.float32)
    best = np.empty(longest, np.float32)
    products = np.empty((_ENTRIES, _ROWS * heads), np.float32)
    across = np.empty((width, _ROWS * heads), np.float32)
    keys = np.empty((_ENTRIES, width), np.float32)
    for s in range(first_row.shape[0] - 1):
        for begin in range(first_row[s], first_row[s + 1], _ROWS):
            end = min(begin + _ROWS, first_row[s + 1])
            seen = visible[end - 1]
            _turn_queries(queries, begin * heads, end * heads, across)
            for low in range(0, seen, _ENTRIES):
                count = min(_ENTRIES, seen - low)
                for e in range(count):
                    entry = low + e
                    block_id = tables[s, entry // per_block]
                    load_row(stored, block_id, entry % per_block, keys, e, kind)
                multiply(keys[:count], 0, across, products, 0, (end - begin) * heads)
                for t in range(begin, end):
                    row = scores[t - begin]
                    _add_heads(products, (t - begin) * heads, weights[t], count, row[low:])
            for t in range(begin, end):
                if kept.shape[1]:
                    _keep_blocks(scores[t - begin], visible[t], block, best, kept[t])
                _rank(scores[t - begin], visible[t], selected[t])


@compiled
def _select_from_pool(
    queries: np.ndarray,
    weights: np.ndarray,
    stored: np.ndarray,
    tables: np.ndarray,
    span_of: np.ndarray,
    visible: np.ndarray,
    kept: np.ndarray,
    block: int,
    kind: int,
    selected: np.ndarray,
) -> None:
    heads, width, per_block = queries.shape[1], queries.shape[2], stored.shape[1]
    most = kept.shape[1] * block
    scores = np.empty(most, np.float32)
    entries = np.empty(most, np.int64)
    products = np.empty((most, heads), np.float32)
    across = np.empty((width, heads), np.float32)
    keys = np.empty((most, width), np.float32)
    for t in range(queries.shape[0]):
        count = 0
        for i in range(kept.shape[1]):
            if kept[t, i] < 0:
                break
            for entry in range(kept[t, i] * block, min(visible[t], (kept[t, i] + 1) * block)):
                entries[count] = entry
                block_id = tables[span_of[t], entry // per_block]
                load_row(stored, block_id, entry % per_block, keys, count, kind)
                count += 1
        _turn_queries(queries[t], 0, heads, across)
        multiply(keys[:count], 0, across, products, 0, heads)
        _add_heads(products, 0, weights[t], count, scores)
        held = _rank(scores, count, selected[t])
        for i in range(held):
            selected[t, i] = entries[selected[t, i]]


def select_entries(
    queries: Tensor,
    head_weights: Tensor,
    stored: Tensor,
    tables: Tensor,
    first_row: Tensor,
    visible: Tensor,
    fmt: RowFormat,
    top_k: int,
    pool_blocks: int,
    block: int,
) -> tuple[Tensor, Tensor]:
    """The ``top_k`` best of the ``visible`` int64 [T] entries of every row: int64 [T, top_k], best first, -1
    where fewer.

    An entry's score is the sum over heads of ``head_weights`` [T, h] * relu(``queries`` [T, h, d] . key). Keys
    are ``stored`` bytes [blocks, entries a block, row bytes] of ``fmt``, those of span s in the blocks
    ``tables`` int64 [S, C]; its rows are ``first_row`` int64 [S + 1]. Second come the numbers of a row's
    ``pool_blocks`` best blocks of ``block`` entries, the newest visible one always among them: int64 [T,
    pool_blocks], ascending, -1 where fewer.
    """
    rows = queries.shape[0]
    selected = torch.empty((rows, top_k), dtype=torch.int64)
    kept = torch.empty((rows, pool_blocks), dtype=torch.int64)
    _select(
        queries.flatten(0, 1).numpy(),
        head_weights.numpy(),
        stored.numpy(),
        tables.numpy(),
        first_row.numpy(),
        visible.numpy(),
        int(visible.max()) if rows else 0,
        fmt.kind,
        block,
        selected.numpy(),
        kept.numpy(),
    )
    return selected, kept


def select_from_pool(
    queries: Tensor,
    head_weights: Tensor,
    stored: Tensor,
    tables: Tensor,
    span_of: Tensor,
    visible: Tensor,
    fmt: RowFormat,
    top_k: int,
    kept: Tensor,
    block: int,
) -> Tensor:
    """As ``select_entries``, among the entries of a row's ``kept`` blocks; ``span_of`` int64 [T]."""
    selected = torch.empty((queries.shape[0], top_k), dtype=torch.int64)
    _select_from_pool(
        queries.numpy(),
        head_weights.numpy(),
        stored.numpy(),
        tables.numpy(),
        span_of.numpy(),
        visible.numpy(),
        kept.numpy(),
        block,
        fmt.kind,
        selected.numpy(),
    )
    return selected
