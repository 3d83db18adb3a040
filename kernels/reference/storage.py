"""How cached rows are stored: the released quantised formats, or plain float32 for checking mathematics.

A ``RowFormat`` turns float32 rows [..., n] into bytes and back; ``rounded`` is what a reader will see.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import quant

FLOAT32, FP8, FP4_NV, FP4_MX = range(4)
"""Kinds of rows. The last three share a scale between 32, 16 and 32 channels: UE8M0, E4M3, UE8M0."""


def _float_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _bytes_float(row: Tensor) -> Tensor:
    return row.contiguous().view(torch.float32)


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """One storage format. ``kind`` is its number in kernels; ``bits_per_channel`` counts the scales in."""

    kind: int
    bits_per_channel: float
    store: Callable[[Tensor], Tensor]
    load: Callable[[Tensor], Tensor]
    rounded: Callable[[Tensor], Tensor]

    def row_bytes(self, channels: int) -> int:
        """Bytes of one row of ``channels`` values."""
        return int(channels * self.bits_per_channel) // 8


_FLOAT32 = RowFormat(
    kind=FLOAT32, bits_per_channel=32, store=_float_bytes, load=_bytes_float, rounded=_unchanged
)


@dataclass(frozen=True, kw_only=True)
class KvFormat:
    """Formats of the three caches: main latents, index keys, window rows; and of inputs of quantised products.

    ``activation_kind`` is the kind of ``activation``, for kernels that round on the way.
    """

    name: str
    main: RowFormat
    index: RowFormat
    window: RowFormat
    activation: Callable[[Tensor], Tensor]
    activation_kind: int
    index_query: Callable[[Tensor], Tensor]


RELEASED = KvFormat(
    name="released",
    main=RowFormat(
        kind=FP4_NV,
        bits_per_channel=4.5,
        store=quant.quantize_fp4_nv_row,
        load=quant.dequantize_fp4_nv_row,
        rounded=quant.fake_quantize_fp4_nv,
    ),
    index=RowFormat(
        kind=FP4_MX,
        bits_per_channel=4.25,
        store=quant.quantize_fp4_mx_row,
        load=quant.dequantize_fp4_mx_row,
        rounded=quant.fake_quantize_fp4_mx,
    ),
    window=RowFormat(
        kind=FP8,
        bits_per_channel=8.25,
        store=quant.quantize_fp8_row,
        load=quant.dequantize_fp8_row,
        rounded=quant.fake_quantize_fp8,
    ),
    activation=quant.fake_quantize_fp8,
    activation_kind=FP8,
    index_query=quant.fake_quantize_fp4_mx,
)
PLAIN = KvFormat(
    name="plain",
    main=_FLOAT32,
    index=_FLOAT32,
    window=_FLOAT32,
    activation=_unchanged,
    activation_kind=FLOAT32,
    index_query=_unchanged,
)
KV_FORMATS = {fmt.name: fmt for fmt in (RELEASED, PLAIN)}


def window_keys(
    stored: Tensor, outer: Tensor, inner: Tensor, latent: Tensor, fmt: RowFormat
) -> Tensor:
    """Rows ``stored[outer, inner]``, then ``latent`` [T, d] as it will be read once stored: [n + T, d]."""
    return torch.cat((fmt.load(stored[outer, inner]), fmt.rounded(latent)))


def scatter_rows(stored: Tensor, outer: Tensor, inner: Tensor, x: Tensor, fmt: RowFormat) -> None:
    """Store ``x`` [n, d] into the rows ``stored[outer, inner]``."""
    stored[outer, inner] = fmt.store(x)


def rounder(kind: int) -> Callable[[Tensor], Tensor]:
    """What storing and loading rows of ``kind`` does to them."""
    return (
        _unchanged,
        quant.fake_quantize_fp8,
        quant.fake_quantize_fp4_nv,
        quant.fake_quantize_fp4_mx,
    )[kind]


def gather_entries(
    stored: Tensor, tables: Tensor, span_of: Tensor, chosen: Tensor, fmt: RowFormat, width: int
) -> Tensor:
    """Entries ``chosen`` int64 [T, k] of the spans ``span_of`` int64 [T] as float32 [T, k, width]; any values for -1.

    ``stored`` [N, entries a block, row bytes]; the blocks of span s are ``tables`` int64 [S, C].
    """
    entry = chosen.clamp(min=0)
    block = tables[span_of.unsqueeze(1), entry // stored.shape[1]]
    values = fmt.load(stored[block, entry % stored.shape[1]])
    assert values.shape[-1] == width
    return values
