"""Router and expert products (spec/model.md 4).

Shapes: T rows, E experts, k choices a row, H hidden, I expert width.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import _steps
from ._formats import round_row
from ._lanes import swiglu_16
from ._numba import Scalar, compiled, inner
from ._route import choose
from .reference.storage import FLOAT32

_TILE = 64
"""Rows of one expert that are computed together, so that their intermediate values stay in cache."""


@inner("void(float32[:,::1], int64, float32, float32, float32[:,::1])")
def _swiglu(gate_up: np.ndarray, i: int, limit: Scalar, scale: Scalar, out: np.ndarray) -> None:
    width = out.shape[1]
    for c in range(0, width, 16):
        swiglu_16(gate_up, i, c, width, limit, scale, out)


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
    choose(logits, bias, bias_image, image, scaling, ids, weights)


@inner()
def _compute(
    x: np.ndarray,
    ids: np.ndarray,
    scale: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    limit: Scalar,
    kind: int,
    out: np.ndarray,
) -> None:
    experts, hidden, double = gate_up.shape[0], gate_up.shape[2], 2 * down.shape[2]
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
            _steps.product(grouped[:count], gate_up[e : e + 1], double, FLOAT32, pairs)
            for i in range(count):
                choice = order[begin + i]
                weight = scale[choice // choices, choice % choices]
                _swiglu(pairs, i, limit, weight, inner)
                round_row(inner, i, inner, kind)
            _steps.product(inner[:count], down[e : e + 1], hidden, FLOAT32, result)
            for i in range(count):
                choice = order[begin + i]
                target = out[choice // choices, choice % choices]
                for c in range(hidden):
                    target[c] = result[i, c]


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
    _compute(x, ids, scale, gate_up, down, limit, kind, out)


@inner()
def _add(outputs: np.ndarray, shared: np.ndarray, out: np.ndarray) -> None:
    for t in range(out.shape[0]):
        for c in range(out.shape[1]):
            total = outputs[t, 0, c]
            for slot in range(1, outputs.shape[1]):
                total += outputs[t, slot, c]
            out[t, c] = shared[t, c] + total


@compiled
def _add_choices(outputs: np.ndarray, shared: np.ndarray, out: np.ndarray) -> None:
    _add(outputs, shared, out)


@dataclass(frozen=True, kw_only=True)
class Router:
    """What ``mixture`` routes by: ``panel_bits`` [1, ...] of the router, and the arguments of ``route``."""

    panels: np.ndarray
    temperature: np.float32
    bias: np.ndarray
    bias_image: np.ndarray
    scaling: np.float32


@compiled
def _mixture(
    x: np.ndarray,
    router: np.ndarray,
    temperature: Scalar,
    bias: np.ndarray,
    bias_image: np.ndarray,
    image: np.ndarray,
    scaling: Scalar,
    gate_up: np.ndarray,
    down: np.ndarray,
    shared_gate_up: np.ndarray,
    shared_down: np.ndarray,
    limit: Scalar,
    kind: int,
    ids: np.ndarray,
    weights: np.ndarray,
    out: np.ndarray,
) -> None:
    rows, hidden = x.shape
    logits = np.empty((rows, bias.shape[0]), np.float32)
    _steps.product(x, router, bias.shape[0], FLOAT32, logits)
    if temperature != np.float32(1):
        for t in range(rows):
            for e in range(bias.shape[0]):
                logits[t, e] /= temperature
    choose(logits, bias, bias_image, image, scaling, ids, weights)
    rounded = np.empty(x.shape, np.float32)
    _steps.round_all(x, kind, rounded)
    outputs = np.empty((rows, ids.shape[1], hidden), np.float32)
    _compute(rounded, ids, weights, gate_up, down, limit, kind, outputs)
    shared = np.empty((rows, 1, hidden), np.float32)
    alone, one = np.zeros((rows, 1), np.int64), np.ones((rows, 1), np.float32)
    _compute(rounded, alone, one, shared_gate_up, shared_down, limit, kind, shared)
    _add(outputs, shared.reshape((rows, hidden)), out)


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
    gate_up: np.ndarray,
    down: np.ndarray,
    limit: float,
    kind: int,
) -> Tensor:
    """Outputs of the experts ``ids`` int64 [T, k] of every row ``x`` [T, H], each times ``scale`` [T, k]: [T, k, H].

    ``gate_up`` [E, 2 I, H] and ``down`` [E, H, I] are ``panel_bits``; the activation is rounded as ``kind``
    says before the second product.
    """
    out = torch.empty((*ids.shape, x.shape[1]))
    _experts(
        x.numpy(),
        ids.numpy(),
        scale.numpy(),
        gate_up,
        down,
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


def mixture(
    x: Tensor,
    image: Tensor,
    router: Router,
    num_chosen: int,
    routed: tuple[np.ndarray, np.ndarray],
    shared: tuple[np.ndarray, np.ndarray],
    limit: float,
    kind: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """A whole mixture whose experts are all here, in one call: (output [T, H], ids and weights as of ``route``).

    ``x`` [T, H] is rounded as ``kind`` says before the experts; ``routed`` and ``shared`` are the ``panel_bits`` of
    their gate_up and down, as of ``expert_outputs``.
    """
    out = torch.empty_like(x)
    ids = torch.empty((x.shape[0], num_chosen), dtype=torch.int64)
    weights = torch.empty((x.shape[0], num_chosen))
    _mixture(
        x.numpy(),
        router.panels,
        router.temperature,
        router.bias,
        router.bias_image,
        image.numpy(),
        router.scaling,
        *routed,
        *shared,
        np.float32(limit),
        kind,
        ids.numpy(),
        weights.numpy(),
        out.numpy(),
    )
    return out, ids, weights
