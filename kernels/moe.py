"""Router and expert products (spec/model.md 4).

Shapes: T rows, E experts, k choices a row, H hidden, I expert width.
"""

import math

import numpy as np
import torch
from torch import Tensor

from ._formats import round_row
from ._gemm import multiply
from ._numba import Scalar, compiled, inner

_TILE = 64
"""Rows of one expert that are computed together, so that their intermediate values stay in cache."""
_SOFTPLUS_LINEAR = np.float32(20)


@inner()
def _score(logit: Scalar) -> Scalar:
    if logit > _SOFTPLUS_LINEAR:
        return np.float32(math.sqrt(logit))
    return np.float32(math.sqrt(np.float32(math.log1p(np.float32(math.exp(logit))))))


@compiled
def _route(
    logits: np.ndarray,
    bias: np.ndarray,
    bias_image: np.ndarray,
    image: np.ndarray,
    scaling: Scalar,
    ids: np.ndarray,
    weights: np.ndarray,
) -> None:
    rows, experts = logits.shape
    chosen = ids.shape[1]
    scores = np.empty(experts, np.float32)
    biased = np.empty(experts, np.float32)
    for t in range(rows):
        for e in range(experts):
            scores[e] = _score(logits[t, e])
            biased[e] = scores[e] + (bias_image[e] if image[t] else bias[e])
        total = np.float32(0)
        for slot in range(chosen):
            best = 0
            for e in range(1, experts):
                if biased[e] > biased[best]:
                    best = e
            ids[t, slot] = best
            weights[t, slot] = scores[best]
            total += scores[best]
            biased[best] = -np.inf
        for slot in range(chosen):
            if chosen > 1:
                weights[t, slot] /= total + np.float32(1e-20)
            weights[t, slot] *= scaling


@inner("void(float32[::1], float32, float32, float32[::1])")
def _swiglu(gate_up: np.ndarray, limit: Scalar, scale: Scalar, out: np.ndarray) -> None:
    width = out.shape[0]
    for i in range(width):
        gate = min(gate_up[i], limit)
        up = min(max(gate_up[width + i], -limit), limit)
        out[i] = gate / (np.float32(1) + np.float32(math.exp(-gate))) * up * scale


@compiled
def _experts(
    x: np.ndarray,
    ids: np.ndarray,
    scale: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    limit: Scalar,
    kind: int,
    out: np.ndarray,
) -> None:
    experts, hidden, double = gate_up.shape
    rows, choices = ids.shape
    starts = np.zeros(experts + 1, np.int64)
    for t in range(rows):
        for slot in range(choices):
            starts[ids[t, slot] + 1] += 1
    for e in range(experts):
        starts[e + 1] += starts[e]
    place = np.empty(experts, np.int64)
    for e in range(experts):
        place[e] = starts[e]
    order = np.empty(rows * choices, np.int64)
    for t in range(rows):
        for slot in range(choices):
            order[place[ids[t, slot]]] = t * choices + slot
            place[ids[t, slot]] += 1
    grouped = np.empty((_TILE, hidden), np.float32)
    pairs = np.empty((_TILE, double), np.float32)
    inner = np.empty((_TILE, double // 2), np.float32)
    result = np.empty((_TILE, hidden), np.float32)
    for e in range(experts):
        for begin in range(starts[e], starts[e + 1], _TILE):
            count = min(_TILE, starts[e + 1] - begin)
            for i in range(count):
                source = x[order[begin + i] // choices]
                for c in range(hidden):
                    grouped[i, c] = source[c]
            multiply(grouped[:count], 0, gate_up[e], pairs, 0, double)
            for i in range(count):
                choice = order[begin + i]
                weight = scale[choice // choices, choice % choices]
                _swiglu(pairs[i], limit, weight, inner[i])
                round_row(inner[i], inner[i], kind)
            multiply(inner[:count], 0, down[e], result, 0, hidden)
            for i in range(count):
                choice = order[begin + i]
                target = out[choice // choices, choice % choices]
                for c in range(hidden):
                    target[c] = result[i, c]


@compiled
def _add_choices(outputs: np.ndarray, shared: np.ndarray, out: np.ndarray) -> None:
    for t in range(out.shape[0]):
        for c in range(out.shape[1]):
            total = outputs[t, 0, c]
            for slot in range(1, outputs.shape[1]):
                total += outputs[t, slot, c]
            out[t, c] = shared[t, c] + total


def route(
    logits: Tensor,
    bias: Tensor,
    bias_image: Tensor,
    image: Tensor,
    num_chosen: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Choose experts by sqrt(softplus(logits)) + bias; the bias steers the choice only.

    ``logits`` [T, E]; ``bias`` [E], or ``bias_image`` where ``image`` bool [T], to (expert ids int64 [T, k],
    weights float32 [T, k]); ties go to the smaller id.
    """
    ids = torch.empty((logits.shape[0], num_chosen), dtype=torch.int64)
    weights = torch.empty((logits.shape[0], num_chosen))
    _route(
        logits.numpy(),
        bias.numpy(),
        bias_image.numpy(),
        image.numpy(),
        np.float32(scaling),
        ids.numpy(),
        weights.numpy(),
    )
    return ids, weights


def expert_outputs(
    x: Tensor,
    ids: Tensor,
    scale: Tensor,
    gate_up_t: Tensor,
    down_t: Tensor,
    limit: float,
    kind: int,
) -> Tensor:
    """Outputs of the experts ``ids`` int64 [T, k] of every row ``x`` [T, H], each times ``scale`` [T, k]: [T, k, H].

    ``gate_up_t`` [E, H, 2 I], ``down_t`` [E, I, H]; the activation is rounded as ``kind`` says before the
    second product.
    """
    out = torch.empty((*ids.shape, x.shape[1]))
    _experts(
        x.numpy(),
        ids.numpy(),
        scale.numpy(),
        gate_up_t.numpy(),
        down_t.numpy(),
        np.float32(limit),
        kind,
        out.numpy(),
    )
    return out


def add_choices(outputs: Tensor, shared: Tensor) -> Tensor:
    """``shared`` [T, H] plus the sum of ``outputs`` [T, k, H] in the order of the choices: [T, H]."""
    out = torch.empty_like(shared)
    _add_choices(outputs.numpy(), shared.numpy(), out.numpy())
    return out
