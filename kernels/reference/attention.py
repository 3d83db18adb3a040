"""Sparse attention over window keys and selected entries with one sink per head (spec/model.md 2.5)."""

import torch
from torch import Tensor


def sink_attention(queries: Tensor, keys: Tensor, valid: Tensor, sink: Tensor) -> Tensor:
    """One softmax over all keys of a row and the head's sink; a key is also its value.

    ``queries`` [T, h, d], ``keys`` [T, n, d], ``valid`` bool [T, n], ``sink`` [h]: [T, h, d]. A row without a valid
    key gives 0, and what an invalid key holds does not matter. Every row is its own product of fixed shape
    (h, d) x (d, n).
    """
    keys = keys.masked_fill(~valid.unsqueeze(-1), 0.0)
    scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(queries.shape[-1] ** -0.5)
    scores.masked_fill_(~valid.unsqueeze(1), -torch.inf)
    peak = torch.maximum(scores.amax(dim=-1, keepdim=True), sink.view(1, -1, 1))
    weights = torch.exp(scores - peak)
    total = weights.sum(dim=-1, keepdim=True) + torch.exp(sink.view(1, -1, 1) - peak)
    return torch.bmm(weights, keys) / total

