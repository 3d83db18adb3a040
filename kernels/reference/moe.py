"""Router and expert products (spec/model.md 4).

Shapes: T rows, E experts, k choices a row, H hidden, I expert width.
"""

import torch
from torch import Tensor

from .index import top_indices
from .linear import unpack_weight
from .storage import rounder


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
    scores = torch.nn.functional.softplus(logits).sqrt()
    steered = scores + torch.where(image.unsqueeze(1), bias_image, bias)
    chosen = top_indices(steered, num_chosen)
    weights = scores.gather(1, chosen)
    if num_chosen > 1:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    return chosen, weights * scaling


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) for ``gate_up`` [T, 2 I]: [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def expert_outputs(
    x: Tensor,
    ids: Tensor,
    scale: Tensor,
    gate_up: Tensor,
    down: Tensor,
    limit: float,
    kind: int,
) -> Tensor:
    """Outputs of the experts ``ids`` int64 [T, k] of every row ``x`` [T, H], each times ``scale`` [T, k]: [T, k, H].

    ``gate_up`` [E, 2 I, H] and ``down`` [E, H, I] are packed by ``pack_weight``; the activation is rounded as ``kind``
    says before the second product.
    """
    gate_up_t = unpack_weight(gate_up, 2 * down.shape[2])
    down_t = unpack_weight(down, x.shape[1])
    out = torch.empty((*ids.shape, x.shape[1]))
    for expert in ids.unique().tolist():
        row, slot = torch.nonzero(ids == expert, as_tuple=True)
        hidden = clamped_swiglu(x[row] @ gate_up_t[expert], limit) * scale[row, slot].unsqueeze(1)
        out[row, slot] = rounder(kind)(hidden) @ down_t[expert]
    return out


def add_choices(outputs: Tensor, shared: Tensor) -> Tensor:
    """``shared`` [T, H] plus the sum of ``outputs`` [T, k, H] in the order of the choices: [T, H]."""
    total = outputs[:, 0]
    for slot in range(1, outputs.shape[1]):
        total = total + outputs[:, slot]
    return shared + total
