"""Index scores, top-k selection and the candidate pool (spec/model.md 2.7, 2.8).

Shapes: T rows, S spans, h index heads, d index width, E entries, C blocks of a span's table.
"""

import itertools

import torch
from torch import Tensor

from .storage import RowFormat


def index_scores(queries: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """sum over heads of ``head_weights`` [n, h] * relu(``queries`` [n, h, d] . ``keys`` [E, d]): [n, E]."""
    per_head = torch.einsum("nhd,ed->nhe", queries, keys).relu()
    return (per_head * head_weights.unsqueeze(-1)).sum(dim=1)


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest scores along the last axis, best first, ties to the smaller index: int64."""
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    position = torch.arange(scores.shape[-1] - 1, -1, -1, dtype=torch.int64)
    best = torch.topk((ordered << 32) | position, count, dim=-1, sorted=True).values
    return scores.shape[-1] - 1 - (best & 0xFFFFFFFF)


def _best(scores: Tensor, count: int) -> Tensor:
    """The ``count`` best of ``scores`` [E], -1 where fewer are above -inf."""
    chosen = top_indices(scores, min(count, len(scores)))
    chosen = chosen[scores[chosen] > -torch.inf]
    return torch.nn.functional.pad(chosen, (0, count - len(chosen)), value=-1)


def _keys(stored: Tensor, table: Tensor, entries: Tensor, fmt: RowFormat) -> Tensor:
    per_block = stored.shape[1]
    return fmt.load(stored[table[entries // per_block], entries % per_block])


def candidate_pool(scores: Tensor, num_blocks: int, block: int) -> Tensor:
    """Numbers of the ``num_blocks`` best blocks of ``block`` entries of ``scores`` [E], the newest among them;
    ascending.
    """
    short = -len(scores) % block
    best = torch.nn.functional.pad(scores, (0, short), value=-torch.inf).view(-1, block).amax(dim=1)
    best[-1:] = torch.inf
    kept = _best(best, num_blocks)
    return torch.nn.functional.pad(
        kept[kept >= 0].sort().values, (0, int((kept < 0).sum())), value=-1
    )


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
    selected = torch.full((queries.shape[0], top_k), -1, dtype=torch.int64)
    pools = torch.full((queries.shape[0], pool_blocks), -1, dtype=torch.int64)
    for span, (begin, end) in enumerate(itertools.pairwise(first_row.tolist())):
        for row in range(begin, end):
            entries = torch.arange(int(visible[row]))
            keys = _keys(stored, tables[span], entries, fmt)
            scores = index_scores(queries[row, None], head_weights[row, None], keys)[0]
            if pool_blocks and len(entries):
                pools[row] = candidate_pool(scores, pool_blocks, block)
            selected[row] = _best(scores, top_k)
    return selected, pools


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
    selected = torch.full((queries.shape[0], top_k), -1, dtype=torch.int64)
    for row in range(queries.shape[0]):
        entries = torch.arange(int(visible[row]))
        entries = entries[torch.isin(entries // block, kept[row])]
        keys = _keys(stored, tables[span_of[row]], entries, fmt)
        best = _best(index_scores(queries[row, None], head_weights[row, None], keys)[0], top_k)
        selected[row] = torch.where(best >= 0, torch.cat((entries, torch.tensor([-1])))[best], -1)
    return selected
