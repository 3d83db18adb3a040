"""Engram module of a layer: table rows of the token's n-grams, gated into every stream (spec/model.md 5)."""

import torch
from torch import Tensor

from ...kernels import engram
from ..engram_tables import EngramTable
from .weights import LayerSettings, Weights


class Engram:
    """Tables and projection of one layer. The tables stay in their stored form; only read rows are expanded."""

    def __init__(self, weights: Weights, table: EngramTable, settings: LayerSettings) -> None:
        values, scales = weights.stored("embed.weight")
        self._values, self._scales = values.view(torch.uint8), scales.view(torch.uint8)
        self._project = weights.linear("wkv", quantized=True)
        self._query_weight = weights.tensor("q_weight")
        self._key_weight = weights.tensor("k_weight")
        self._multipliers = torch.tensor(table.multipliers)
        self._primes = torch.tensor(table.primes)
        self._offsets = torch.tensor(table.offsets)
        self._settings = settings

    def table_rows(self, grams: Tensor) -> Tensor:
        """Rows read for compressed n-grams ``grams`` int64 [T, N]: int64 [T, columns]."""
        return engram.hash_ngrams(grams, self._multipliers, self._primes, self._offsets)

    def __call__(self, streams: Tensor, grams: Tensor, writable: Tensor) -> tuple[Tensor, Tensor]:
        """(new streams [T, K, H], gates [T, K]); rows with ``writable`` False keep their streams."""
        read = engram.read_rows(self._values, self._scales, self.table_rows(grams))
        return engram.write(
            streams,
            self._project(read),
            self._query_weight,
            self._key_weight,
            writable,
            self._settings.config.rms_norm_eps,
        )
