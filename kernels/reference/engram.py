"""Engram: n-gram hashing and the gated write into the residual streams (spec/model.md 5.3, 5.4).

Shapes: T rows, N largest n-gram, A heads per n-gram size, K streams, H hidden.
"""

import torch
from torch import Tensor


def hash_ngrams(grams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of every n-gram that ends at a token.

    ``grams`` int64 [T, N]: compressed id of the token, then of its predecessors, nearest first, padded already.
    ``multipliers`` int64 [N]; ``primes``, ``offsets`` int64 [(N - 1) * A]: rows int64 [T, (N - 1) * A].
    """
    heads = primes.shape[0] // (multipliers.shape[0] - 1)
    mixed = grams[:, 0] * multipliers[0]
    columns: list[Tensor] = []
    for order in range(1, multipliers.shape[0]):
        mixed = mixed ^ (grams[:, order] * multipliers[order])
        primes_here = primes[(order - 1) * heads : order * heads]
        columns.append(mixed.unsqueeze(1) % primes_here)
    return torch.cat(columns, dim=1) + offsets


def gate(streams: Tensor, keys: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float) -> Tensor:
    """Gate of each stream: ``streams``, ``keys`` [T, K, H], weights [K, H]: [T, K]."""
    hidden = streams.shape[-1]
    dot = (streams * (query_weight * key_weight) * keys).sum(dim=-1)
    dot = dot * torch.rsqrt(streams.square().mean(dim=-1) + eps)
    dot = dot * torch.rsqrt(keys.square().mean(dim=-1) + eps) * hidden**-0.5
    return torch.sigmoid(torch.sign(dot) * dot.abs().clamp(min=1e-6).sqrt())
