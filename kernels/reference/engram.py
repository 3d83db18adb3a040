"""Engram: n-gram hashing and the gated write into the residual streams (spec/model.md 5.3, 5.4).

Shapes: T rows, N largest n-gram, A heads per n-gram size, C = (N - 1) * A columns, K streams, H hidden.
"""

import torch
from torch import Tensor

from .quant import dequantize_fp8_rows


def hash_ngrams(grams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of every n-gram that ends at a token.

    ``grams`` int64 [T, N]: compressed id of the token, then of its predecessors, nearest first, padded already.
    ``multipliers`` int64 [N]; ``primes``, ``offsets`` int64 [C]: rows int64 [T, C].
    """
    heads = primes.shape[0] // (multipliers.shape[0] - 1)
    mixed = grams[:, 0] * multipliers[0]
    columns: list[Tensor] = []
    for order in range(1, multipliers.shape[0]):
        mixed = mixed ^ (grams[:, order] * multipliers[order])
        primes_here = primes[(order - 1) * heads : order * heads]
        columns.append(mixed.unsqueeze(1) % primes_here)
    return torch.cat(columns, dim=1) + offsets


def gate(
    streams: Tensor, keys: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float
) -> Tensor:
    """Gate of each stream: ``streams``, ``keys`` [T, K, H], weights [K, H]: [T, K]."""
    hidden = streams.shape[-1]
    dot = (streams * (query_weight * key_weight) * keys).sum(dim=-1)
    dot = dot * torch.rsqrt(streams.square().mean(dim=-1) + eps)
    dot = dot * torch.rsqrt(keys.square().mean(dim=-1) + eps) * hidden**-0.5
    return torch.sigmoid(torch.sign(dot) * dot.abs().clamp(min=1e-6).sqrt())


def read_rows(values: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    """Table rows ``rows`` int64 [T, C] of E4M3 ``values`` uint8 [R, n] with UE8M0 ``scales`` uint8 [R, n / 32]:
    [T, C * n].
    """
    return dequantize_fp8_rows(values[rows].view(torch.float8_e4m3fn), scales[rows]).flatten(1)


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
    parts = projected.unflatten(1, (-1, streams.shape[2]))
    gates = gate(streams, parts[:, :-1], query_weight, key_weight, eps)
    written = streams + gates.unsqueeze(-1) * parts[:, -1:]
    return torch.where(writable.view(-1, 1, 1), written, streams), gates
