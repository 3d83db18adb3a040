"""Attention of one layer: window keys of its own, entries of its KV source, one sink per head (spec/model.md 2.5)."""

import torch
from torch import Tensor

from ...kernels.reference.attention import sink_attention
from ...kernels.reference.linear import matmul_rows
from ...kernels.reference.norm import rms_norm, rotate_last, rotation
from ..batch import Rows
from ..cache import Cache
from .compressor import Compressor
from .indexer import Indexer, IndexKeys
from .weights import LayerSettings, Weights


class Selection:
    """What index sources chose in this pass, and the entries read for it, shared by the layers that reuse them."""

    def __init__(self, rows: Rows, cache: Cache, settings: LayerSettings) -> None:
        self._rows = rows
        self._cache = cache
        self._settings = settings
        self._keys: dict[int, IndexKeys] = {}
        self.chosen: dict[int, Tensor] = {}
        """Per index source layer: entries int64 [T, top_k], -1 for none."""
        self._entries: tuple[int, Tensor] | None = None

    def index_keys(self, source: int) -> IndexKeys:
        """Index keys of KV source layer ``source``."""
        if source not in self._keys:
            self._keys[source] = IndexKeys(source, self._rows, self._cache, self._settings)
        return self._keys[source]

    def entries(self, source: int, index_source: int) -> tuple[Tensor, Tensor]:
        """(latents [T, top_k, d], valid bool [T, top_k]) that ``index_source`` chose from ``source``'s cache."""
        chosen = self.chosen[index_source]
        if self._entries is None or self._entries[0] != index_source:
            block, entry = self._rows.locate_entries(
                self._rows.span_of.unsqueeze(1),
                chosen.clamp(min=0),
                self._settings.config.ratio(source),
                self._cache.layout.block_tokens,
            )
            stored = self._cache.main[source][block, entry]
            self._entries = (index_source, self._cache.format.main.load(stored))
        return self._entries[1], chosen >= 0


class Attention:
    """Queries, window keys, sink and output projection; compressor and indexer where the layer is a source."""

    def __init__(self, weights: Weights, layer: int, frequencies: Tensor, settings: LayerSettings) -> None:
        config = settings.config
        self._layer = layer
        self._frequencies = frequencies
        self._settings = settings
        self._down = weights.linear("wq_a", "wkv", quantized=True)
        self._query_norm = weights.tensor("q_norm.weight")
        self._kv_norm = weights.tensor("kv_norm.weight")
        self._query_up = weights.linear("wq_b", quantized=True)
        self._sink = weights.tensor("attn_sink")
        self._group_down_t = [
            part.t().contiguous() for part in weights.tensor("wo_a.weight").chunk(config.o_groups)
        ]
        self._output = weights.linear("wo_b", quantized=True)
        self.compressor = (
            Compressor(weights, layer, frequencies, settings) if config.is_kv_source(layer) else None
        )
        self._indexer = (
            Indexer(weights.below("indexer"), layer, settings) if config.is_index_source(layer) else None
        )

    def __call__(self, x: Tensor, rows: Rows, selection: Selection, cache: Cache) -> Tensor:
        """``x`` [T, H], normalised, to [T, H]. Writes the window rows of ``rows`` into the cache."""
        config = self._settings.config
        turn = rotation(rows.positions, self._frequencies)
        query_latent, latent = self._down(x).split((config.q_lora_rank, config.head_dim), dim=1)
        query_latent = rms_norm(query_latent, self._query_norm, config.rms_norm_eps)
        query = self._query_up(query_latent).unflatten(1, (config.num_attention_heads, config.head_dim))
        query = rotate_last(query, turn)
        latent = rotate_last(rms_norm(latent, self._kv_norm, config.rms_norm_eps), turn)
        keys, valid = self._window(latent, rows, cache), rows.window_valid
        source, index_source = config.kv_source(self._layer), config.index_source(self._layer)
        if source is not None and index_source is not None:
            if self._indexer is not None:
                selection.chosen[self._layer] = self._indexer.select(
                    x, query_latent, turn, selection.index_keys(source)
                )
            entries, chosen = selection.entries(source, index_source)
            keys, valid = torch.cat((keys, entries), dim=1), torch.cat((valid, chosen), dim=1)
        heads = sink_attention(query, keys, valid, self._sink)
        return self._project(rotate_last(heads, turn, inverse=True))

    def _window(self, latent: Tensor, rows: Rows, cache: Cache) -> Tensor:
        """Window keys [T, W, d]: rows of earlier passes from the ring, rows of this pass as the ring will hold them."""
        fmt = cache.format.window
        ring = cache.window[self._layer]
        prior = fmt.load(ring[rows.prior_slot, rows.prior_row])
        ring[rows.ring_slot, rows.ring_row] = fmt.store(latent[rows.ring_source])
        return torch.cat((prior, fmt.rounded(latent)))[rows.window_index]

    def _project(self, heads: Tensor) -> Tensor:
        """Grouped low-rank output projection of ``heads`` [T, h, d]."""
        groups = heads.flatten(1).chunk(len(self._group_down_t), dim=1)
        low = [
            matmul_rows(group.contiguous(), weight_t, self._settings.tiled)
            for group, weight_t in zip(groups, self._group_down_t, strict=True)
        ]
        return self._output(torch.cat(low, dim=1))
