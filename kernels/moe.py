"""Router and expert products (spec/model.md 4).

Shapes: T rows, E experts, S slots, k choices a row, H hidden, I expert width.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import _steps
from ._experts import add, compute, compute_shared
from ._numba import Scalar, compiled
from ._route import choose, route_rows
from .reference.linear import PANEL, pack_weight


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Size of an expert, and how its panels lie behind one another."""

    hidden: int
    width: int

    @property
    def size(self) -> int:
        """Values of one expert, with those that fill up panels."""
        double, hidden = min(2 * self.width, PANEL), min(self.hidden, PANEL)
        return (
            -(-2 * self.width // double) * self.hidden * double
            + -(-self.hidden // hidden) * self.width * hidden
        )

    def pack(self, gate_up: Tensor, down: Tensor) -> Tensor:
        """``gate_up`` [2 I, H] and ``down`` [H, I] as one row [size]: bfloat16 where that is exact, else float32."""
        panels = pack_weight(gate_up), pack_weight(down)
        exact = all(each.dtype == torch.bfloat16 for each in panels)
        return torch.cat([(each if exact else each.float()).flatten() for each in panels])


def row_bits(rows: Tensor) -> np.ndarray:
    """Rows of ``ExpertShape.pack`` as compiled code reads them: bfloat16 as int16."""
    return (rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows).numpy()


@dataclass(frozen=True, kw_only=True)
class Router:
    """What a mixture routes by: ``panel_bits`` [1, ...] of the router, and the arguments of ``route``."""

    panels: np.ndarray
    temperature: np.float32
    bias: np.ndarray
    bias_image: np.ndarray
    scaling: np.float32


@dataclass(frozen=True, kw_only=True)
class ExpertMath:
    """What all experts of a layer compute by.

    ``limit`` clamps; ``kind`` rounds inputs and activations; ``halves`` rounds outputs to bfloat16 before they are
    added, those of the shared expert excepted.
    """

    shape: ExpertShape
    limit: np.float32
    kind: int
    halves: bool = False


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


@compiled
def _experts(
    x: np.ndarray,
    slots: np.ndarray,
    scale: np.ndarray,
    weights: np.ndarray,
    double: int,
    limit: Scalar,
    kind: int,
    halves: bool,
    out: np.ndarray,
) -> None:
    source = np.arange(slots.size) // slots.shape[1]
    flat = out.reshape((slots.size, x.shape[1]))
    compute(x, source, slots.ravel(), scale.ravel(), weights, double, limit, kind, halves, flat)


@compiled
def _shared(
    x: np.ndarray, weights: np.ndarray, double: int, limit: Scalar, kind: int, out: np.ndarray
) -> None:
    compute_shared(x, weights, double, limit, kind, out)


@compiled
def _add_choices(outputs: np.ndarray, shared: np.ndarray, out: np.ndarray) -> None:
    rows, choices, hidden = outputs.shape
    place = np.arange(rows * choices).reshape((rows, choices))
    add(outputs.reshape((rows * choices, hidden)), place, shared, out)


@compiled
def _mixture(
    x: np.ndarray,
    router: np.ndarray,
    temperature: Scalar,
    bias: np.ndarray,
    bias_image: np.ndarray,
    image: np.ndarray,
    scaling: Scalar,
    slot_of: np.ndarray,
    routed: np.ndarray,
    shared: np.ndarray,
    double: int,
    limit: Scalar,
    kind: int,
    halves: bool,
    counts: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    out: np.ndarray,
) -> None:
    rows, hidden = x.shape
    choices = ids.shape[1]
    route_rows(x, router, temperature, bias, bias_image, image, scaling, counts, ids, weights)
    rounded = np.empty(x.shape, np.float32)
    _steps.round_all(x, kind, rounded)
    outputs = np.empty((rows * choices, hidden), np.float32)
    place = np.arange(rows * choices).reshape((rows, choices))
    source, slots = np.empty(place.size, np.int64), np.empty(place.size, np.int64)
    for t in range(rows):
        for c in range(choices):
            source[place[t, c]] = t
            slots[place[t, c]] = slot_of[ids[t, c]]
    compute(rounded, source, slots, weights.ravel(), routed, double, limit, kind, halves, outputs)
    common = np.empty((rows, hidden), np.float32)
    compute_shared(rounded, shared, double, limit, kind, common)
    add(outputs, place, common, out)


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
    x: Tensor, slots: Tensor, scale: Tensor, weights: np.ndarray, how: ExpertMath
) -> Tensor:
    """Outputs [T, k, H] of the experts in ``slots`` int64 [T, k] of every row ``x`` [T, H], times ``scale`` [T, k].

    ``weights`` [S, .] are ``row_bits``; ``x`` is rounded already.
    """
    out = torch.empty((*slots.shape, x.shape[1]))
    _experts(
        x.numpy(),
        slots.numpy(),
        scale.numpy(),
        weights,
        2 * how.shape.width,
        how.limit,
        how.kind,
        how.halves,
        out.numpy(),
    )
    return out


def shared_outputs(x: Tensor, weights: np.ndarray, how: ExpertMath) -> Tensor:
    """Outputs of the shared expert, ``row_bits`` [1, .], for rows ``x`` [T, H] that are rounded already: [T, H]."""
    out = torch.empty_like(x)
    _shared(x.numpy(), weights, 2 * how.shape.width, how.limit, how.kind, out.numpy())
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
    slot_of: np.ndarray,
    routed: np.ndarray,
    shared: np.ndarray,
    how: ExpertMath,
    counts: np.ndarray,
) -> tuple[Tensor, Tensor, Tensor]:
    """A whole mixture whose experts are all here, in one call: (output [T, H], ids and weights as of ``route``).

    ``x`` [T, H] is rounded before the experts; ``slot_of`` int64 [E] is the row of each expert in ``routed``. Adds the
    rows of every expert to ``counts`` int32 [E], or [0] to count nothing.
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
        slot_of,
        routed,
        shared,
        2 * how.shape.width,
        how.limit,
        how.kind,
        how.halves,
        counts,
        ids.numpy(),
        weights.numpy(),
        out.numpy(),
    )
    return out, ids, weights
