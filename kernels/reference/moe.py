"""Router and expert activation (spec/model.md 4)."""

import torch
from torch import Tensor

from .index import top_indices


def route(
    logits: Tensor, bias: Tensor, num_chosen: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Choose experts by sqrt(softplus(logits)) + bias; the bias steers the choice only.

    ``logits`` [T, E] to (expert ids int64 [T, k], weights float32 [T, k]); ties go to the smaller id.
    """
    scores = torch.nn.functional.softplus(logits).sqrt()
    chosen = top_indices(scores + bias, num_chosen)
    weights = scores.gather(1, chosen)
    if num_chosen > 1:
        total = weights[:, 0]
        for slot in range(1, num_chosen):
            total = total + weights[:, slot]
        weights = weights / (total + 1e-20).unsqueeze(1)
    return chosen, weights * scaling


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) for ``gate_up`` [T, 2 I]: [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
