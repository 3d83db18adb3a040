"""How cached rows are stored, with the kernels of ``quant.py``; and rows of an arena read and written by index."""

import numpy as np
import torch
from torch import Tensor

from . import quant
from ._formats import load_row, round_row, store_row
from ._numba import compiled, contiguous
from .reference import storage as reference
from .reference.storage import PLAIN, KvFormat, RowFormat

RELEASED = KvFormat(
    name=reference.RELEASED.name,
    main=RowFormat(
        kind=reference.RELEASED.main.kind,
        bits_per_channel=reference.RELEASED.main.bits_per_channel,
        store=quant.quantize_fp4_nv_row,
        load=quant.dequantize_fp4_nv_row,
        rounded=quant.fake_quantize_fp4_nv,
    ),
    index=RowFormat(
        kind=reference.RELEASED.index.kind,
        bits_per_channel=reference.RELEASED.index.bits_per_channel,
        store=quant.quantize_fp4_mx_row,
        load=quant.dequantize_fp4_mx_row,
        rounded=quant.fake_quantize_fp4_mx,
    ),
    window=RowFormat(
        kind=reference.RELEASED.window.kind,
        bits_per_channel=reference.RELEASED.window.bits_per_channel,
        store=quant.quantize_fp8_row,
        load=quant.dequantize_fp8_row,
        rounded=quant.fake_quantize_fp8,
    ),
    activation=quant.fake_quantize_fp8,
    activation_kind=reference.RELEASED.activation_kind,
    index_query=quant.fake_quantize_fp4_mx,
)
KV_FORMATS = {fmt.name: fmt for fmt in (RELEASED, PLAIN)}


@compiled
def _window_keys(
    stored: np.ndarray,
    outer: np.ndarray,
    inner: np.ndarray,
    latent: np.ndarray,
    out: np.ndarray,
    kind: int,
) -> None:
    prior = outer.shape[0]
    for i in range(prior):
        load_row(stored, outer[i], inner[i], out, i, kind)
    own = out[prior:]
    for t in range(latent.shape[0]):
        round_row(latent, t, own, kind)


@compiled
def _gather_entries(
    stored: np.ndarray,
    tables: np.ndarray,
    span_of: np.ndarray,
    chosen: np.ndarray,
    out: np.ndarray,
    kind: int,
) -> None:
    per_block, choices = stored.shape[1], chosen.shape[1]
    for t in range(chosen.shape[0]):
        for i in range(choices):
            entry = chosen[t, i]
            if entry >= 0:
                block = tables[span_of[t], entry // per_block]
                load_row(stored, block, entry % per_block, out, t * choices + i, kind)


@compiled
def _scatter(
    stored: np.ndarray, outer: np.ndarray, inner: np.ndarray, x: np.ndarray, kind: int
) -> None:
    for i in range(outer.shape[0]):
        store_row(x[i], contiguous(stored[outer[i], inner[i]]), kind)


def window_keys(
    stored: Tensor, outer: Tensor, inner: Tensor, latent: Tensor, fmt: RowFormat
) -> Tensor:
    """Rows ``stored[outer, inner]``, then ``latent`` [T, d] as it will be read once stored: [n + T, d]."""
    out = torch.empty((outer.shape[0] + latent.shape[0], latent.shape[1]))
    _window_keys(
        stored.numpy(), outer.numpy(), inner.numpy(), latent.numpy(), out.numpy(), fmt.kind
    )
    return out


def scatter_rows(stored: Tensor, outer: Tensor, inner: Tensor, x: Tensor, fmt: RowFormat) -> None:
    """Store ``x`` [n, d] into the rows ``stored[outer, inner]``."""
    _scatter(stored.numpy(), outer.numpy(), inner.numpy(), x.numpy(), fmt.kind)


def gather_entries(
    stored: Tensor, tables: Tensor, span_of: Tensor, chosen: Tensor, fmt: RowFormat, width: int
) -> Tensor:
    """Entries ``chosen`` int64 [T, k] of the spans ``span_of`` int64 [T] as float32 [T, k, width]; any values for -1.

    ``stored`` [N, entries a block, row bytes]; the blocks of span s are ``tables`` int64 [S, C].
    """
    out = torch.empty((*chosen.shape, width))
    _gather_entries(
        stored.numpy(),
        tables.numpy(),
        span_of.numpy(),
        chosen.numpy(),
        out.view(-1, width).numpy(),
        fmt.kind,
    )
    return out
