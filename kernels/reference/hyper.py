"""Manifold-constrained hyper-connections, single pass (spec/model.md 3).

Shapes: T rows, K streams, H hidden.
"""

import torch
from torch import Tensor

from .norm import rms_norm


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Softmax over columns, then ``iterations`` alternating normalisations. ``logits`` and result: [K, K, T].

    The first index is the row. Rows lie along axis 0 so that the row count T is innermost and every step is one
    vectorised pass.
    """
    streams = logits.shape[0]

    def total(parts: tuple[Tensor, ...]) -> Tensor:
        result = parts[0]
        for part in parts[1:]:
            result = result + part
        return result

    mixed = torch.exp(logits - logits.amax(dim=1, keepdim=True))
    mixed = mixed / total(mixed.unbind(1)).unsqueeze(1) + eps
    mixed = mixed / (total(mixed.unbind(0)) + eps)
    for _ in range(iterations - 1):
        mixed = mixed / (total(mixed.unbind(1)).unsqueeze(1) + eps)
        mixed = mixed / (total(mixed.unbind(0)) + eps)
    assert mixed.shape[1] == streams
    return mixed


def mix_weights(
    streams: Tensor,
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale ``mixes`` [T, K * (K + 2)] by the norm of ``streams`` [T, K, H] and split them:
    pre [T, K], post [T, K] and comb [T, K, K] (row, column)."""
    k = streams.shape[1]
    root = torch.rsqrt(streams.flatten(1).square().mean(dim=-1, keepdim=True) + norm_eps)
    columns = (mixes * root).t().contiguous()
    pre = torch.sigmoid(columns[:k] * scale[0] + base[:k, None]) + eps
    post = 2 * torch.sigmoid(columns[k : 2 * k] * scale[1] + base[k : 2 * k, None])
    logits = columns[2 * k :] * scale[2] + base[2 * k :, None]
    comb = sinkhorn(logits.view(k, k, -1), iterations, eps)
    return pre.t(), post.t(), comb.permute(2, 0, 1)


def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    """Sum over k of ``weights`` [T, K] times ``streams`` [T, K, H]: [T, H]."""
    result = streams[:, 0] * weights[:, 0, None]
    for k in range(1, streams.shape[1]):
        result = result + streams[:, k] * weights[:, k, None]
    return result


def collapse_norm(streams: Tensor, weights: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the sum over k of ``weights`` [T, K] times ``streams`` [T, K, H]: [T, H]."""
    return rms_norm(collapse(streams, weights), norm_weight, eps)


def combine(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """``post[n] * output + sum over m of comb[m, n] * streams[m]``: [T, K, H]."""
    result = post.unsqueeze(-1) * output.unsqueeze(1)
    for m in range(streams.shape[1]):
        result = result + comb[:, m, :, None] * streams[:, m, None]
    return result
