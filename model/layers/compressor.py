"""Compressor of a KV source layer: global latents and index keys, written once per token group (spec/model.md 2.6)."""

from torch import Tensor

from ...kernels.compress import pool_pairs
from ...kernels.norm import rms_norm, rotate_last
from ...kernels.storage import scatter_rows
from ..batch import Rows
from ..cache import Cache
from .weights import LayerSettings, Weights


class Compressor:
    """Ratio 1: one entry per token. Ratio 2: a softmax over each token pair, the open pair kept in the slot."""

    def __init__(
        self, weights: Weights, layer: int, frequencies: Tensor, settings: LayerSettings
    ) -> None:
        compressor, indexer = weights.below("compressor"), weights.below("indexer")
        self._ratio = settings.config.ratio(layer)
        self._layer = layer
        self._frequencies = frequencies
        self._settings = settings
        names = ("wkv", "wgate") if self._ratio == 2 else ("wkv",)
        self._project = compressor.linear_of(*(f"{name}.weight" for name in names), quantized=False)
        self._norm = compressor.tensor("norm.weight")
        self._index_key = indexer.linear("wk", quantized=False)
        self._index_norm = indexer.tensor("k_norm.weight")

    def write(self, x: Tensor, rows: Rows, cache: Cache) -> Tensor:
        """Write the entries that ``rows`` complete; ``x`` [T, H]. Returns their latents before rotation [n, d]."""
        eps = self._settings.config.rms_norm_eps
        closing = rows.closing(self._ratio, cache.layout.block_tokens)
        latent = self._project(x)
        if self._ratio == 2:
            latent = pool_pairs(
                latent,
                cache.pending[self._layer],
                rows.slots,
                rows.starts,
                rows.first_row,
                closing.rows.shape[0],
            )
        latent = rms_norm(latent, self._norm, eps)
        if closing.rows.shape[0] == 0:
            return latent
        key = rms_norm(self._index_key(latent), self._index_norm, eps)
        turn = closing.turns.at(self._frequencies)
        for stored, fmt, values in (
            (cache.main[self._layer], cache.format.main, latent),
            (cache.index[self._layer], cache.format.index, key),
        ):
            scatter_rows(stored, closing.blocks, closing.entries, rotate_last(values, turn), fmt)
        return latent
