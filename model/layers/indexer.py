"""Indexer of an index source layer: which compressed entries a row attends to (spec/model.md 2.7, 2.8)."""

from torch import Tensor

from ...kernels.index import select_entries, select_from_pool
from ...kernels.norm import rotate_last
from ..batch import Rows
from ..cache import Cache
from .weights import LayerSettings, Weights


class Indexer:
    """Queries and head weights of one index source layer."""

    def __init__(self, weights: Weights, layer: int, settings: LayerSettings) -> None:
        config = settings.config
        self._query = weights.linear("wq_b", quantized=True)
        self._head_weights = weights.linear("weights_proj", quantized=False)
        self._weight_scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self._settings = settings
        source = config.kv_source(layer)
        assert source is not None, "an index source layer has compressed entries"
        self._source = source
        makes_pool = layer == config.candidate_source_layer_id
        self._pool_blocks = config.candidate_topk_blocks if makes_pool else 0
        self._uses_pool = layer != source and source == config.candidate_source_layer_id

    def select(
        self, x: Tensor, query: Tensor, turn: Tensor, rows: Rows, cache: Cache, pool: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(selected entries int64 [T, top_k], every row's best first, -1 where fewer are visible; the pool).

        ``query`` is the layer's rounded query latent [T, .]; ``pool`` comes from the candidate source of this pass.
        """
        config = self._settings.config
        queries = self._query.product(query).unflatten(
            1, (config.index_n_heads, config.index_head_dim)
        )
        queries = self._settings.fmt.index_query(rotate_last(queries, turn))
        weights = self._head_weights(x).mul_(self._weight_scale)
        stored, fmt = cache.index[self._source], cache.format.index
        visible = rows.visible(config.ratio(self._source))
        top_k, block = config.index_topk, config.candidate_block_size
        if self._uses_pool:
            assert pool is not None, "the candidate source runs before the layers that use its pool"
            where = (rows.tables, rows.span_of, visible)
            return select_from_pool(queries, weights, stored, *where, fmt, top_k, pool, block), pool
        where = (rows.tables, rows.first_row, visible)
        return select_entries(
            queries, weights, stored, *where, fmt, top_k, self._pool_blocks, block
        )
