"""Products of rows with experts whose weights lie in rows of an arena, and the sum of a row's choices.

Row of an expert: gate_up panels [P, H, W], then down panels [P', I, W'], as ``ExpertShape.pack`` lays them out.
"""

import numpy as np

from . import _steps
from ._formats import round_row
from ._lanes import swiglu_16
from ._numba import Scalar, inner
from .reference.linear import PANEL
from .reference.storage import FLOAT32

_TILE = 64
"""Rows of one expert that are computed together, so that their intermediate values stay in cache."""
_UPPER = np.int32(-0x10000)


@inner("void(float32[:,::1], int64, float32, float32, float32[:,::1])")
def _swiglu(gate_up: np.ndarray, i: int, limit: Scalar, scale: Scalar, out: np.ndarray) -> None:
    width = out.shape[1]
    for c in range(0, width, 16):
        swiglu_16(gate_up, i, c, width, limit, scale, out)


@inner("float32(float32)")
def to_bfloat16(value: Scalar) -> Scalar:
    """Nearest bfloat16 value of a finite ``value``, ties to even."""
    bits = np.float32(value).view(np.int32)
    odd = (bits >> np.int32(16)) & np.int32(1)
    return np.int32((bits + np.int32(0x7FFF) + odd) & _UPPER).view(np.float32)


@inner()
def compute(
    x: np.ndarray,
    source: np.ndarray,
    slots: np.ndarray,
    scale: np.ndarray,
    weights: np.ndarray,
    double: int,
    limit: Scalar,
    kind: int,
    halves: bool,
    out: np.ndarray,
) -> None:
    """``out[n]`` = output of the expert in row ``slots[n]`` of ``weights`` for ``x[source[n]]``, times ``scale[n]``.

    ``double`` is 2 I. The activation is rounded as ``kind`` says, and the output to bfloat16 if ``halves``.
    """
    number, hidden = out.shape
    held = weights.shape[0]
    starts = np.zeros(held + 1, np.int64)
    for n in range(number):
        starts[slots[n] + 1] += 1
    for e in range(held):
        starts[e + 1] += starts[e]
    place = starts[:held].copy()
    order = np.empty(number, np.int64)
    for n in range(number):
        order[place[slots[n]]] = n
        place[slots[n]] += 1
    wide, high = min(double, PANEL), min(hidden, PANEL)
    num_wide, num_high = (double + wide - 1) // wide, (hidden + high - 1) // high
    cut = num_wide * hidden * wide
    end = cut + num_high * (double // 2) * high
    grouped = np.empty((_TILE, hidden), np.float32)
    pairs = np.empty((_TILE, double), np.float32)
    inner = np.empty((_TILE, double // 2), np.float32)
    result = np.empty((_TILE, hidden), np.float32)
    for e in range(held):
        if starts[e] == starts[e + 1]:
            continue
        gate_up = weights[e, :cut].reshape((1, num_wide, hidden, wide))
        down = weights[e, cut:end].reshape((1, num_high, double // 2, high))
        for begin in range(starts[e], starts[e + 1], _TILE):
            count = min(_TILE, starts[e + 1] - begin)
            for i in range(count):
                row = x[source[order[begin + i]]]
                for c in range(hidden):
                    grouped[i, c] = row[c]
            _steps.product(grouped[:count], gate_up, double, FLOAT32, pairs)
            for i in range(count):
                _swiglu(pairs, i, limit, scale[order[begin + i]], inner)
                round_row(inner, i, inner, kind)
            _steps.product(inner[:count], down, hidden, FLOAT32, result)
            for i in range(count):
                target = out[order[begin + i]]
                if halves:
                    for c in range(hidden):
                        target[c] = to_bfloat16(result[i, c])
                else:
                    for c in range(hidden):
                        target[c] = result[i, c]


@inner()
def compute_shared(
    x: np.ndarray, weights: np.ndarray, double: int, limit: Scalar, kind: int, out: np.ndarray
) -> None:
    """Outputs of the one expert of ``weights`` [1, ...] for every row of rounded ``x``: ``out`` [T, H]."""
    rows = x.shape[0]
    alone, one = np.zeros(rows, np.int64), np.ones(rows, np.float32)
    compute(x, np.arange(rows), alone, one, weights, double, limit, kind, False, out)


@inner()
def add(outputs: np.ndarray, place: np.ndarray, shared: np.ndarray, out: np.ndarray) -> None:
    """``out[t]`` = ``shared[t]`` + the sum of ``outputs[place[t, c]]`` in the order of c."""
    for t in range(out.shape[0]):
        total, first, common = out[t], outputs[place[t, 0]], shared[t]
        for c in range(out.shape[1]):
            total[c] = first[c]
        for choice in range(1, place.shape[1]):
            after = outputs[place[t, choice]]
            for c in range(out.shape[1]):
                total[c] += after[c]
        for c in range(out.shape[1]):
            total[c] = common[c] + total[c]
