"""Indexer of an index source layer: which compressed entries a row attends to (spec/model.md 2.7, 2.8)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...kernels.reference import index
from ...kernels.reference.norm import rotate_last
from ..batch import Rows
from ..cache import Cache
from .weights import LayerSettings, Weights

_MAX_PRODUCTS = 1 << 24
"""Bound of the score workspace in elements: rows x heads x entries of one piece."""


@dataclass(kw_only=True)
class Piece:
    """Rows that are scored together, [S, n] with ``real`` False where a span is shorter, over ``num_entries``."""

    spans: Tensor
    rows: Tensor
    real: Tensor
    num_entries: int
    pool: Tensor | None = field(default=None)


def cut_pieces(rows: Rows, ratio: int, num_heads: int, top_k: int) -> list[Piece]:
    """All spans in one piece when each fits one tile (decode), else span by span within the workspace bound."""
    per_tile = index.rows_per_tile(num_heads)
    spans = [s for s in range(len(rows.counts)) if rows.counts[s]]
    first = torch.from_numpy(rows.first_row)
    if not spans:
        return []
    if rows.longest_span <= per_tile:
        members = torch.tensor(spans)
        steps = torch.arange(rows.longest_span)
        count = torch.from_numpy(rows.counts)[members]
        entries = index.padded_entries(int(rows.ends[spans].max()) // ratio, top_k)
        return [
            Piece(
                spans=members,
                rows=first[members].unsqueeze(1) + torch.minimum(steps, count.unsqueeze(1) - 1),
                real=steps < count.unsqueeze(1),
                num_entries=entries,
            )
        ]
    pieces: list[Piece] = []
    for span in spans:
        entries = index.padded_entries(int(rows.ends[span]) // ratio, top_k)
        step = max(per_tile, _MAX_PRODUCTS // (entries * num_heads) // per_tile * per_tile)
        count = int(rows.counts[span])
        for begin in range(0, count, step):
            part = torch.arange(begin, min(begin + step, count)) + first[span]
            pieces.append(
                Piece(
                    spans=torch.tensor([span]),
                    rows=part.unsqueeze(0),
                    real=torch.ones(1, part.shape[0], dtype=torch.bool),
                    num_entries=entries,
                )
            )
    return pieces


class IndexKeys:
    """Index keys of one source for the rows of a pass, read once and shared by every layer that scores them."""

    def __init__(self, source: int, rows: Rows, cache: Cache, settings: LayerSettings) -> None:
        config = settings.config
        self.ratio = config.ratio(source)
        self.pieces = cut_pieces(rows, self.ratio, config.index_n_heads, config.index_topk)
        self.visible = (rows.positions + 1) // self.ratio
        self._source = source
        self._rows = rows
        self._cache = cache
        self._held: dict[int, Tensor] = {}

    def keys(self, piece: Piece) -> Tensor:
        """Float32 keys [S, E, d] of ``piece``; entries that are not written yet read whatever is there."""
        group = int(piece.spans[0])
        if group not in self._held:
            entries = torch.arange(piece.num_entries).expand(len(piece.spans), -1)
            block, entry = self._rows.locate_entries(
                piece.spans.unsqueeze(1), entries, self.ratio, self._cache.layout.block_tokens
            )
            stored = self._cache.index[self._source][block, entry]
            self._held[group] = self._cache.format.index.load(stored)
        return self._held[group]


class Indexer:
    """Queries and head weights of one index source layer."""

    def __init__(self, weights: Weights, layer: int, settings: LayerSettings) -> None:
        self._query = weights.linear("wq_b", quantized=True)
        self._head_weights = weights.linear("weights_proj", quantized=False)
        self._settings = settings
        self._makes_pool = layer == settings.config.candidate_source_layer_id
        source = settings.config.kv_source(layer)
        self._uses_pool = layer != source and source == settings.config.candidate_source_layer_id

    def select(self, x: Tensor, query_latent: Tensor, turn: Tensor, keys: IndexKeys) -> Tensor:
        """Selected entries int64 [T, top_k], -1 where fewer are visible; every row's best first."""
        config = self._settings.config
        heads = config.index_n_heads
        query = self._query(query_latent).unflatten(1, (heads, config.index_head_dim))
        query = self._settings.fmt.index_query(rotate_last(query, turn))
        weight = self._head_weights(x) * (config.index_head_dim**-0.5 * heads**-0.5)
        selected = torch.full((x.shape[0], config.index_topk), -1, dtype=torch.int64)
        for piece in keys.pieces:
            scores = index.index_scores(query[piece.rows], weight[piece.rows], keys.keys(piece))
            visible = keys.visible[piece.rows]
            hidden = torch.arange(piece.num_entries) >= visible.unsqueeze(-1)
            scores.masked_fill_(hidden, -torch.inf)
            if self._makes_pool:
                piece.pool = index.candidate_pool(
                    scores, visible, config.candidate_topk_blocks, config.candidate_block_size
                )
            elif self._uses_pool:
                assert piece.pool is not None, "the candidate source runs before the layers that use its pool"
                scores.masked_fill_(~piece.pool, -torch.inf)
            selected[piece.rows[piece.real]] = index.select_entries(scores, config.index_topk)[piece.real]
        return selected
