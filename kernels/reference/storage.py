"""How cached rows are stored: the released quantised formats, or plain float32 for checking mathematics.

A ``RowFormat`` turns float32 rows [..., n] into bytes and back; ``rounded`` is what a reader will see.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import quant


def _float_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _bytes_float(row: Tensor) -> Tensor:
    return row.contiguous().view(torch.float32)


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """One storage format. ``bits_per_channel`` counts the scales in."""

    bits_per_channel: float
    store: Callable[[Tensor], Tensor]
    load: Callable[[Tensor], Tensor]
    rounded: Callable[[Tensor], Tensor]

    def row_bytes(self, channels: int) -> int:
        """Bytes of one row of ``channels`` values."""
        return int(channels * self.bits_per_channel) // 8


_FLOAT32 = RowFormat(bits_per_channel=32, store=_float_bytes, load=_bytes_float, rounded=_unchanged)


@dataclass(frozen=True, kw_only=True)
class KvFormat:
    """Formats of the three caches: main latents, index keys, window rows; and of inputs of quantised products."""

    name: str
    main: RowFormat
    index: RowFormat
    window: RowFormat
    activation: Callable[[Tensor], Tensor]
    index_query: Callable[[Tensor], Tensor]


RELEASED = KvFormat(
    name="released",
    main=RowFormat(
        bits_per_channel=4.5,
        store=quant.quantize_fp4_nv_row,
        load=quant.dequantize_fp4_nv_row,
        rounded=quant.fake_quantize_fp4_nv,
    ),
    index=RowFormat(
        bits_per_channel=4.25,
        store=quant.quantize_fp4_mx_row,
        load=quant.dequantize_fp4_mx_row,
        rounded=quant.fake_quantize_fp4_mx,
    ),
    window=RowFormat(
        bits_per_channel=8.25,
        store=quant.quantize_fp8_row,
        load=quant.dequantize_fp8_row,
        rounded=quant.fake_quantize_fp8,
    ),
    activation=quant.fake_quantize_fp8,
    index_query=quant.fake_quantize_fp4_mx,
)
PLAIN = KvFormat(
    name="plain",
    main=_FLOAT32,
    index=_FLOAT32,
    window=_FLOAT32,
    activation=_unchanged,
    index_query=_unchanged,
)
KV_FORMATS = {fmt.name: fmt for fmt in (RELEASED, PLAIN)}
