"""RMSNorm and rotary embedding (spec/model.md 2.2, 2.3)."""

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def rope_frequencies(rotary_dim: int, theta: float) -> Tensor:
    """Base frequencies theta^(-2i/rotary_dim), float64 [rotary_dim / 2]."""
    return theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def yarn_frequencies(
    rotary_dim: int,
    theta: float,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_length: int,
) -> Tensor:
    """Frequencies with the YaRN ramp between ``beta_fast`` and ``beta_slow`` rotations, float64 [rotary_dim / 2]."""

    def dimension(rotations: float) -> float:
        return (
            rotary_dim
            * math.log(original_length / (2 * math.pi * rotations))
            / (2 * math.log(theta))
        )

    low = max(math.floor(dimension(beta_fast)), 0)
    high = min(math.ceil(dimension(beta_slow)), rotary_dim - 1)
    index = torch.arange(rotary_dim // 2, dtype=torch.float64)
    ramp = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    base = rope_frequencies(rotary_dim, theta)
    return base / factor * ramp + base * (1 - ramp)


def rotation(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Complex rotations exp(i p f): complex64 [T, rotary_dim / 2] for int64 ``positions`` [T].

    Angles are taken in float64, so that a position of a million loses nothing.
    """
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
    return torch.complex(angles.cos(), angles.sin()).to(torch.complex64)


def rotate_last(x: Tensor, turn: Tensor, inverse: bool = False) -> Tensor:
    """``x`` [T, ..., n] with its last 2 * turn.shape[-1] channels, paired as neighbours, turned by ``turn`` [T, .]."""
    rotary_dim = 2 * turn.shape[-1]
    turn = turn.view(turn.shape[0], *([1] * (x.dim() - 2)), turn.shape[1])
    pairs = torch.view_as_complex(x[..., -rotary_dim:].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * (turn.conj() if inverse else turn)).flatten(-2)
    return torch.cat((x[..., :-rotary_dim], turned), dim=-1)
