"""Attention of one layer: window keys of its own, entries of its KV source, one sink per head (spec/model.md 2.5)."""

import torch
from torch import Tensor

from ...kernels.attention import attention_inputs, attention_output
from ...kernels.norm import rms_norm, rotate_last
from ...kernels.reference.storage import FLOAT32
from ...kernels.storage import gather_entries, scatter_rows, window_keys
from ..batch import Rows
from ..cache import Cache
from .compressor import Compressor
from .indexer import Indexer
from .linear import Linear
from .weights import LayerSettings, Weights


class Selection:
    """What index sources chose in this pass, and the entries read for it, shared by the layers that reuse them."""

    def __init__(self, rows: Rows, cache: Cache, settings: LayerSettings) -> None:
        self._rows = rows
        self._cache = cache
        self._width = settings.config.head_dim
        self.chosen: dict[int, Tensor] = {}
        """Per index source layer: entries int64 [T, top_k], -1 for none."""
        self.pool: Tensor | None = None
        """Entry blocks that the candidate source kept: int64 [T, blocks]."""
        none = (self._rows.num_rows, 0)
        self.nothing = torch.zeros((*none, self._width)), torch.zeros(none, dtype=torch.int64)
        self._entries: tuple[int, Tensor] | None = None

    def entries(self, source: int, index_source: int) -> tuple[Tensor, Tensor]:
        """(latents [T, top_k, d], their numbers int64 [T, top_k]) that ``index_source`` chose from ``source``'s
        cache.
        """
        chosen = self.chosen[index_source]
        if self._entries is None or self._entries[0] != index_source:
            rows, fmt = self._rows, self._cache.format.main
            stored = self._cache.main[source]
            latents = gather_entries(stored, rows.tables, rows.span_of, chosen, fmt, self._width)
            self._entries = (index_source, latents)
        return self._entries[1], chosen


class Attention:
    """Queries, window keys, sink and output projection; compressor and indexer where the layer is a source."""

    def __init__(
        self, weights: Weights, layer: int, frequencies: Tensor, settings: LayerSettings
    ) -> None:
        config = settings.config
        self._layer = layer
        self._frequencies = frequencies
        self._settings = settings
        self._query_down = weights.linear("wq_a", quantized=True)
        self._latent = weights.linear("wkv", quantized=True)
        self._query_norm = weights.tensor("q_norm.weight")
        self._kv_norm = weights.tensor("kv_norm.weight")
        self._query_up = weights.linear("wq_b", quantized=True)
        self._sink = weights.tensor("attn_sink")
        groups = weights.tensor("wo_a.weight").unflatten(0, (config.o_groups, -1))
        self._group_down = Linear(groups, FLOAT32)
        self._output = weights.linear("wo_b", quantized=True)
        self.compressor = (
            Compressor(weights, layer, frequencies, settings)
            if config.is_kv_source(layer)
            else None
        )
        self._indexer = (
            Indexer(weights.below("indexer"), layer, settings)
            if config.is_index_source(layer)
            else None
        )

    def __call__(self, x: Tensor, rows: Rows, selection: Selection, cache: Cache) -> Tensor:
        """``x`` [T, H], normalised, to [T, H]. Writes the window rows of ``rows`` into the cache."""
        config, kind = self._settings.config, self._settings.fmt.activation_kind
        turn = rows.turns.at(self._frequencies)
        keys, low, query = attention_inputs(
            x,
            turn,
            (self._latent.bits, self._kv_norm.numpy()),
            (self._query_down.bits, self._query_norm.numpy()),
            self._query_up.bits,
            config.num_attention_heads,
            config.rms_norm_eps,
            kind,
        )
        window = self._window(keys, rows, cache)
        entries, chosen = selection.nothing
        source, index_source = config.kv_source(self._layer), config.index_source(self._layer)
        if source is not None and index_source is not None:
            if self._indexer is not None:
                selection.chosen[self._layer], selection.pool = self._indexer.select(
                    x, low, turn, rows, cache, selection.pool
                )
            entries, chosen = selection.entries(source, index_source)
        return attention_output(
            query,
            window,
            rows.window_index,
            entries,
            chosen,
            self._sink,
            turn,
            self._group_down.bits,
            self._group_down.outer,
            self._output.bits,
            self._output.outer,
            kind,
        )

    def write_window(self, x: Tensor, rows: Rows, cache: Cache) -> None:
        """Write the window rows of ``x`` [T, H] and attend to nothing: the context of a drafter block."""
        x8 = self._settings.fmt.activation(x)
        self._keep(self._own_keys(x8, rows.turns.at(self._frequencies)), rows, cache)

    def _own_keys(self, x8: Tensor, turn: Tensor) -> Tensor:
        """Window keys [T, d] of rounded ``x8`` [T, H], as they are before they are stored."""
        latent = self._latent.product(x8)
        latent = rms_norm(latent, self._kv_norm, self._settings.config.rms_norm_eps)
        return rotate_last(latent, turn)

    def _window(self, latent: Tensor, rows: Rows, cache: Cache) -> Tensor:
        """Window keys [n, d]: rows of earlier passes from the ring, rows of this pass as the ring will hold them."""
        fmt, ring = cache.format.window, cache.window[self._layer]
        keys = window_keys(ring, rows.prior_slot, rows.prior_row, latent, fmt)
        self._keep(latent, rows, cache)
        return keys

    def _keep(self, latent: Tensor, rows: Rows, cache: Cache) -> None:
        """Store the keys ``latent`` [T, d] that the rings keep."""
        kept = latent if rows.ring_source is None else latent[rows.ring_source]
        ring = cache.window[self._layer]
        scatter_rows(ring, rows.ring_slot, rows.ring_row, kept, cache.format.window)
