"""Engram: n-gram hashing, table rows, and the gated write into the residual streams (spec/model.md 5.3, 5.4).

Shapes: T rows, N largest n-gram, A heads per n-gram size, C = (N - 1) * A columns, K streams, H hidden.
"""

import math

import numpy as np
import torch
from torch import Tensor

from ._formats import scaled_e4m3
from ._numba import Scalar, compiled
from ._reduce import inverse_root

_GROUP = 32
_SMALLEST = np.float32(1e-6)


@compiled
def _hash(
    grams: np.ndarray,
    multipliers: np.ndarray,
    primes: np.ndarray,
    offsets: np.ndarray,
    rows: np.ndarray,
) -> None:
    heads = primes.shape[0] // (multipliers.shape[0] - 1)
    for t in range(grams.shape[0]):
        mixed = grams[t, 0] * multipliers[0]
        for order in range(1, multipliers.shape[0]):
            mixed ^= grams[t, order] * multipliers[order]
            for column in range((order - 1) * heads, order * heads):
                rows[t, column] = mixed % primes[column] + offsets[column]


@compiled
def _read(values: np.ndarray, scales: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    width = values.shape[1]
    for t in range(rows.shape[0]):
        for column in range(rows.shape[1]):
            row = rows[t, column]
            for i in range(width):
                out[t, column * width + i] = scaled_e4m3(values[row, i], scales[row, i // _GROUP])


@compiled
def _write(
    streams: np.ndarray,
    projected: np.ndarray,
    query_weight: np.ndarray,
    key_weight: np.ndarray,
    writable: np.ndarray,
    eps: Scalar,
    out: np.ndarray,
    gates: np.ndarray,
) -> None:
    count, hidden = streams.shape[1], streams.shape[2]
    scale = np.float32(1) / np.float32(math.sqrt(hidden))
    for t in range(streams.shape[0]):
        value = projected[t, count * hidden :]
        for k in range(count):
            key = projected[t, k * hidden : (k + 1) * hidden]
            dot = np.float32(0)
            for i in range(hidden):
                dot += streams[t, k, i] * (query_weight[k, i] * key_weight[k, i]) * key[i]
            dot *= inverse_root(streams[t, k], eps) * inverse_root(key, eps) * scale
            root = np.float32(math.sqrt(max(abs(dot), _SMALLEST)))
            signed = root if dot > 0 else (-root if dot < 0 else np.float32(0))
            gate = np.float32(1) / (np.float32(1) + np.float32(math.exp(-signed)))
            gates[t, k] = gate
            factor = gate if writable[t] else np.float32(0)
            for i in range(hidden):
                out[t, k, i] = streams[t, k, i] + factor * value[i]


def hash_ngrams(grams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of every n-gram that ends at a token.

    ``grams`` int64 [T, N]: compressed id of the token, then of its predecessors, nearest first, padded already.
    ``multipliers`` int64 [N]; ``primes``, ``offsets`` int64 [C]: rows int64 [T, C].
    """
    rows = torch.empty((grams.shape[0], primes.shape[0]), dtype=torch.int64)
    _hash(grams.numpy(), multipliers.numpy(), primes.numpy(), offsets.numpy(), rows.numpy())
    return rows


def read_rows(values: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    """Table rows ``rows`` int64 [T, C] of E4M3 ``values`` uint8 [R, n] with UE8M0 ``scales`` uint8 [R, n / 32]:
    [T, C * n].
    """
    out = torch.empty((rows.shape[0], rows.shape[1] * values.shape[1]))
    _read(values.numpy(), scales.numpy(), rows.numpy(), out.numpy())
    return out


def write(
    streams: Tensor,
    projected: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    writable: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Add the gated value to every stream of the rows that are ``writable`` bool [T].

    ``streams`` [T, K, H], ``projected`` [T, (K + 1) * H]: a key for each stream, then the value; weights [K, H].
    Returns the new streams and the gates [T, K].
    """
    out, gates = torch.empty_like(streams), torch.empty(streams.shape[:2])
    _write(
        streams.numpy(),
        projected.numpy(),
        query_weight.numpy(),
        key_weight.numpy(),
        writable.numpy(),
        np.float32(eps),
        out.numpy(),
        gates.numpy(),
    )
    return out, gates
