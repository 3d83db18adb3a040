"""Pooling of token pairs into one latent (spec/model.md 2.6)."""

import torch
from torch import Tensor


def pool_pair(values: Tensor, gates: Tensor) -> Tensor:
    """Per channel, softmax over the two gates weights the two values: ``values``, ``gates`` [n, 2, d] to [n, d]."""
    first = torch.sigmoid(gates[:, 0] - gates[:, 1])
    return first * values[:, 0] + (1 - first) * values[:, 1]
