"""Number formats in one pass a row; the functions, bytes and bits of ``reference/quant.py``."""

import numpy as np
import torch
from torch import Tensor

from ._formats import load_row, round_row, store_row
from ._numba import compiled
from .reference.storage import FP4_MX, FP4_NV, FP8


@compiled
def round_rows(x: np.ndarray, out: np.ndarray, kind: int) -> None:
    """Every row of ``x`` [T, n] as stored."""
    for t in range(x.shape[0]):
        round_row(x, t, out, kind)


@compiled
def store_rows(x: np.ndarray, rows: np.ndarray, kind: int) -> None:
    """Every row of ``x`` [T, n] into bytes."""
    for t in range(x.shape[0]):
        store_row(x[t], rows[t], kind)


@compiled
def load_rows(rows: np.ndarray, out: np.ndarray, kind: int) -> None:
    """Every row of bytes ``rows`` [1, T, .] into ``out`` [T, n]."""
    for t in range(out.shape[0]):
        load_row(rows, 0, t, out, t, kind)


def _flat(x: Tensor) -> np.ndarray:
    return np.ascontiguousarray(x.numpy()).reshape(-1, x.shape[-1])


def _fake_quantize(x: Tensor, kind: int) -> Tensor:
    out = torch.empty(x.shape)
    round_rows(_flat(x), _flat(out), kind)
    return out


def _quantize(x: Tensor, kind: int, row_bytes: int) -> Tensor:
    rows = torch.empty((*x.shape[:-1], row_bytes), dtype=torch.uint8)
    store_rows(_flat(x), _flat(rows), kind)
    return rows


def _dequantize(row: Tensor, kind: int, channels: int) -> Tensor:
    out = torch.empty((*row.shape[:-1], channels))
    load_rows(_flat(row)[None], _flat(out), kind)
    return out


def fake_quantize_fp8(x: Tensor) -> Tensor:
    """``x`` [..., n] as E4M3 with one UE8M0 scale per 32 channels. n is a multiple of 32."""
    return _fake_quantize(x, FP8)


def fake_quantize_fp4_mx(x: Tensor) -> Tensor:
    """``x`` [..., n] as E2M1 with one UE8M0 scale per 32 channels (index queries and keys)."""
    return _fake_quantize(x, FP4_MX)


def fake_quantize_fp4_nv(x: Tensor) -> Tensor:
    """``x`` [..., n] as E2M1 with one E4M3 scale per 16 channels (main KV)."""
    return _fake_quantize(x, FP4_NV)


def quantize_fp8_row(x: Tensor) -> Tensor:
    """``x`` [..., n] to bytes [..., n + n / 32]: E4M3 values, then their UE8M0 scales."""
    return _quantize(x, FP8, x.shape[-1] * 33 // 32)


def dequantize_fp8_row(row: Tensor) -> Tensor:
    """Bytes [..., n + n / 32] of ``quantize_fp8_row`` to float32 [..., n]."""
    return _dequantize(row, FP8, row.shape[-1] * 32 // 33)


def quantize_fp4_nv_row(x: Tensor) -> Tensor:
    """``x`` [..., n] to bytes [..., n / 2 + n / 16]: packed E2M1, then E4M3 scales."""
    return _quantize(x, FP4_NV, x.shape[-1] * 9 // 16)


def dequantize_fp4_nv_row(row: Tensor) -> Tensor:
    """Bytes [..., n / 2 + n / 16] of ``quantize_fp4_nv_row`` to float32 [..., n]."""
    return _dequantize(row, FP4_NV, row.shape[-1] * 16 // 9)


def quantize_fp4_mx_row(x: Tensor) -> Tensor:
    """``x`` [..., n] to bytes [..., n / 2 + n / 32]: packed E2M1, then UE8M0 scales."""
    return _quantize(x, FP4_MX, x.shape[-1] * 17 // 32)


def dequantize_fp4_mx_row(row: Tensor) -> Tensor:
    """Bytes [..., n / 2 + n / 32] of ``quantize_fp4_mx_row`` to float32 [..., n]."""
    return _dequantize(row, FP4_MX, row.shape[-1] * 32 // 17)
