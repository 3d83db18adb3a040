"""Engram module of a layer: table rows of the token's n-grams, gated into every stream (spec/model.md 5)."""

import torch
from torch import Tensor

from ...kernels.reference import engram
from ...kernels.reference.quant import dequantize_fp8_rows
from ..engram_tables import EngramTable
from .weights import LayerSettings, Weights


class Engram:
    """Tables and projection of one layer. The tables stay in their stored form; only read rows are expanded."""

    def __init__(self, weights: Weights, table: EngramTable, settings: LayerSettings) -> None:
        self._values, self._scales = weights.stored("embed.weight")
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
        config = self._settings.config
        rows = self.table_rows(grams)
        found = dequantize_fp8_rows(
            self._values.view(torch.uint8)[rows].view(torch.float8_e4m3fn), self._scales.view(torch.uint8)[rows]
        )
        projected = self._project(found.flatten(1)).unflatten(1, (config.hc_mult + 1, config.hidden_size))
        keys, value = projected[:, :-1], projected[:, -1]
        gates = engram.gate(streams, keys, self._query_weight, self._key_weight, config.rms_norm_eps)
        written = streams + gates.unsqueeze(-1) * value.unsqueeze(1)
        return torch.where(writable.view(-1, 1, 1), written, streams), gates
