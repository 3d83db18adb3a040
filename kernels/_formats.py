"""Rounding, storing and loading of one row in the formats of ``reference/quant.py``, by bit arithmetic.

Finite values only. Powers of two scale exactly, so multiplying by their inverse is the twin's division. A
stored value is read as ``_decode.py`` says.
"""

import numpy as np

from ._decode import VALUES, load_e2m1, load_e4m3
from ._lanes import round_32_fp8
from ._numba import Scalar, inner
from .reference.storage import FLOAT32, FP4_MX, FP4_NV, FP8

_FP8_MAX = np.float32(448.0)
_FP8_MIN_AMAX = np.float32(1e-4)
_FP4_MAX = np.float32(6.0)
_FP4_MX_MIN_AMAX = np.float32(6.0 * 2.0**-126)
_FP4_NV_MIN_AMAX = np.float32(6.0 * 2.0**-9)
_E4M3_NORMAL = np.float32(2.0**-6)
_E4M3_SUBNORMAL_MAGIC = np.float32(1.5 * 2.0**14)
_SIGN = np.int32(-0x80000000)
_ABS = np.int32(0x7FFFFFFF)


@inner()
def _bits(x: Scalar) -> Scalar:
    return np.float32(x).view(np.int32)


@inner()
def _float(bits: Scalar) -> Scalar:
    return np.int32(bits).view(np.float32)


@inner()
def _power_of_two_above(x: Scalar) -> Scalar:
    return _float((_bits(x) + np.int32(0x7FFFFF)) & np.int32(0x7F800000))


@inner()
def _round_e4m3(x: Scalar) -> Scalar:
    """Nearest E4M3 value of ``x`` within +-448, ties to even."""
    sign = _bits(x) & _SIGN
    bits = _bits(x) & _ABS
    size = _float(bits)
    odd = (bits >> np.int32(20)) & np.int32(1)
    normal = _float((bits + np.int32(0x7FFFF) + odd) & np.int32(-0x100000))
    subnormal = (size + _E4M3_SUBNORMAL_MAGIC) - _E4M3_SUBNORMAL_MAGIC
    rounded = min(normal, _FP8_MAX) if size >= _E4M3_NORMAL else subnormal
    return _float(_bits(rounded) | sign)


@inner()
def _e4m3_code(value: Scalar) -> Scalar:
    """Byte of an E4M3 value."""
    bits = _bits(value) & _ABS
    size = _float(bits)
    normal = (bits >> np.int32(20)) - np.int32(120 << 3)
    code = normal if size >= _E4M3_NORMAL else np.int32(size * np.float32(512.0))
    return np.uint8(code | ((_bits(value) >> np.int32(24)) & np.int32(0x80)))


@inner()
def _e4m3_value(code: Scalar) -> Scalar:
    size = np.int32(code) & np.int32(0x7F)
    if size < np.int32(8):
        value = np.float32(size) * np.float32(2.0**-9)
    else:
        value = _float((size << np.int32(20)) + np.int32(120 << 23))
    return -value if code & np.uint8(0x80) else value


@inner()
def _round_e2m1(x: Scalar) -> Scalar:
    size = min(_float(_bits(x) & _ABS), _FP4_MAX)
    step = np.float32(0.5) if size < 2.0 else (np.float32(1.0) if size < 4.0 else np.float32(2.0))
    rounded = np.float32(np.rint(size / step)) * step
    return _float(_bits(rounded) | (_bits(x) & _SIGN))


@inner()
def _e2m1_code(value: Scalar) -> Scalar:
    """Nibble of an E2M1 value."""
    bits = _bits(value) & _ABS
    small = np.int32(_float(bits) * np.float32(2.0))
    code = small if small < 2 else (bits >> np.int32(22)) - np.int32(126 << 1)
    return np.uint8(code | ((_bits(value) >> np.int32(28)) & np.int32(8)))


@inner("float32(float32[::1], int64, int64)")
def _largest(x: np.ndarray, begin: Scalar, end: Scalar) -> Scalar:
    bits = np.int32(0)
    for i in range(begin, end):
        bits = max(bits, _bits(x[i]) & _ABS)
    return _float(bits)


@inner("float32(float32[::1], int64, int64, int64)")
def _group_scale(x: np.ndarray, begin: Scalar, end: Scalar, kind: Scalar) -> Scalar:
    largest = _largest(x, begin, end)
    if kind == FP8:
        return _power_of_two_above(max(largest, _FP8_MIN_AMAX) / _FP8_MAX)
    if kind == FP4_MX:
        return _power_of_two_above(max(largest, _FP4_MX_MIN_AMAX) / _FP4_MAX)
    return _round_e4m3(min(max(largest, _FP4_NV_MIN_AMAX) / _FP4_MAX, _FP8_MAX))


@inner()
def group_of(kind: Scalar) -> Scalar:
    """Channels that share a scale."""
    return 16 if kind == FP4_NV else 32


@inner("void(float32[:,::1], int64, float32[:,::1], int64)")
def round_row(x: np.ndarray, t: Scalar, out: np.ndarray, kind: Scalar) -> None:
    """``x[t]`` as a reader of the stored row will see it, into ``out[t]``."""
    n = x.shape[1]
    if kind == FLOAT32:
        for i in range(n):
            out[t, i] = x[t, i]
        return
    if kind == FP8:
        for begin in range(0, n, 32):
            round_32_fp8(x, t, begin, out)
        return
    group = group_of(kind)
    for begin in range(0, n, group):
        scale = _group_scale(x[t], begin, begin + group, kind)
        for i in range(begin, begin + group):
            out[t, i] = _round_e2m1(x[t, i] / scale) * scale


@inner("void(float32[::1], uint8[::1], int64)")
def store_row(x: np.ndarray, row: np.ndarray, kind: Scalar) -> None:
    """``x`` [n] into bytes: values, then scales."""
    n = x.shape[0]
    if kind == FLOAT32:
        for i in range(n):
            bits = _bits(x[i])
            for byte in range(4):
                row[4 * i + byte] = np.uint8((bits >> np.int32(8 * byte)) & np.int32(0xFF))
        return
    group = group_of(kind)
    scales = n if kind == FP8 else n // 2
    for begin in range(0, n, group):
        scale = _group_scale(x, begin, begin + group, kind)
        if kind == FP4_NV:
            row[scales + begin // group] = _e4m3_code(scale)
        else:
            row[scales + begin // group] = np.uint8(_bits(scale) >> np.int32(23))
        if kind == FP8:
            for i in range(begin, begin + group):
                row[i] = _e4m3_code(_round_e4m3(x[i] / scale))
        else:
            for i in range(begin, begin + group, 2):
                low = _e2m1_code(_round_e2m1(x[i] / scale))
                high = _e2m1_code(_round_e2m1(x[i + 1] / scale))
                row[i // 2] = np.uint8(low | (high << np.uint8(4)))


@inner("void(uint8[:,:,:], int64, int64, float32[:,::1], int64, int64)")
def load_row(
    stored: np.ndarray, outer: Scalar, inner: Scalar, out: np.ndarray, to: Scalar, kind: Scalar
) -> None:
    """Bytes ``stored[outer, inner]`` of ``store_row`` to ``out[to]``. A view would cost more than reading it."""
    n = out.shape[1]
    if kind == FLOAT32:
        for i in range(n):
            bits = np.int32(0)
            for byte in range(4):
                bits |= np.int32(stored[outer, inner, 4 * i + byte]) << np.int32(8 * byte)
            out[to, i] = _float(bits)
        return
    group = group_of(kind)
    scales = n if kind == FP8 else n // 2
    for begin in range(0, n, group):
        code = stored[outer, inner, scales + begin // group]
        scale = _e4m3_value(code) if kind == FP4_NV else _float(np.int32(code) << np.int32(23))
        for i in range(begin, begin + group, VALUES):
            if kind == FP8:
                load_e4m3(stored, outer, inner, i, scale, out, to, i)
            else:
                load_e2m1(stored, outer, inner, i // 2, scale, out, to, i)


@inner()
def scaled_e4m3(value: Scalar, exponent: Scalar) -> Scalar:
    """An E4M3 byte times the power of two of a UE8M0 byte."""
    return _e4m3_value(value) * _float(np.int32(exponent) << np.int32(23))
