"""Compressor of a KV source layer: global latents and index keys, written once per token group (spec/model.md 2.6)."""

import torch
from torch import Tensor

from ...kernels.reference.compress import pool_pair
from ...kernels.reference.norm import rms_norm, rotate_last, rotation
from ..batch import Rows
from ..cache import PENDING_ROWS, Cache
from .linear import pad_to_tile
from .weights import LayerSettings, Weights


class Compressor:
    """Ratio 1: one entry per token. Ratio 2: a softmax over each token pair, the open pair kept in the slot."""

    def __init__(self, weights: Weights, layer: int, frequencies: Tensor, settings: LayerSettings) -> None:
        compressor, indexer = weights.below("compressor"), weights.below("indexer")
        self._ratio = settings.config.ratio(layer)
        self._layer = layer
        self._frequencies = frequencies
        self._settings = settings
        names = ("wkv", "wgate") if self._ratio == 2 else ("wkv",)
        self._project = compressor.linear(*names, quantized=False)
        self._norm = compressor.tensor("norm.weight")
        self._index_key = indexer.linear("wk", quantized=False)
        self._index_norm = indexer.tensor("k_norm.weight")

    def write(self, x: Tensor, rows: Rows, cache: Cache) -> Tensor:
        """Write the entries that ``rows`` complete; ``x`` [T, H]. Returns their latents before rotation [n, d]."""
        eps = self._settings.config.rms_norm_eps
        real = torch.arange(rows.num_rows)
        closing = real[rows.positions[: rows.num_rows] % self._ratio == self._ratio - 1]
        projected = self._project(x)
        latent = self._pairs(projected, closing, rows, cache) if self._ratio == 2 else projected[closing]
        latent = rms_norm(latent, self._norm, eps)
        count = latent.shape[0]
        padded = pad_to_tile(latent) if self._settings.tiled else latent
        key = rms_norm(self._index_key(padded), self._index_norm, eps)[:count]
        position = rows.positions[closing]
        turn = rotation(position - (self._ratio - 1), self._frequencies)
        block, entry = rows.locate_entries(
            rows.span_of[closing], position // self._ratio, self._ratio, cache.layout.block_tokens
        )
        cache.main[self._layer][block, entry] = cache.format.main.store(rotate_last(latent, turn))
        cache.index[self._layer][block, entry] = cache.format.index.store(rotate_last(key, turn))
        return latent

    def _pairs(self, projected: Tensor, closing: Tensor, rows: Rows, cache: Cache) -> Tensor:
        """Pool every pair that ends at a ``closing`` row; remember values and gates for pairs still open."""
        pending = cache.pending[self._layer]
        current = projected.unflatten(1, (2, -1))
        starts = torch.from_numpy(rows.starts)
        before = pending[rows.slots, (starts - 1) % PENDING_ROWS]
        span = rows.span_of[closing]
        first_of_span = torch.from_numpy(rows.first_row)[span]
        partner = torch.where(closing == first_of_span, span, before.shape[0] + closing - 1)
        partners = torch.cat((before, current))[partner]
        pairs = torch.stack((partners, current[closing]), dim=1)
        kept = rows.ring_source[rows.from_end[rows.ring_source] <= PENDING_ROWS]
        pending[rows.slots[rows.span_of[kept]], rows.positions[kept] % PENDING_ROWS] = current[kept]
        return pool_pair(pairs[:, :, 0], pairs[:, :, 1])
