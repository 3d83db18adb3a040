"""Sparse attention over window keys and selected entries with one sink per head (spec/model.md 2.5)."""

import torch
from torch import Tensor


def sink_attention(
    queries: Tensor,
    window: Tensor,
    window_index: Tensor,
    entries: Tensor,
    chosen: Tensor,
    sink: Tensor,
) -> Tensor:
    """One softmax over all keys of a row and the head's sink; a key is also its value.

    ``queries`` [T, h, d]. A row's keys are ``window`` [N, d] at ``window_index`` int64 [T, W] and its own
    ``entries`` [T, k, d] where ``chosen`` int64 [T, k]; a negative index or choice is no key. ``sink`` [h]: [T,
    h, d]. A row without keys gives 0, and what lies behind no key does not matter.
    """
    valid = torch.cat((window_index, chosen), dim=1) >= 0
    keys = torch.cat((window[window_index.clamp(min=0)], entries), dim=1)
    keys = keys.masked_fill(~valid.unsqueeze(-1), 0.0)
    scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(queries.shape[-1] ** -0.5)
    scores.masked_fill_(~valid.unsqueeze(1), -torch.inf)
    peak = torch.maximum(scores.amax(dim=-1, keepdim=True), sink.view(1, -1, 1))
    weights = torch.exp(scores - peak)
    total = weights.sum(dim=-1, keepdim=True) + torch.exp(sink.view(1, -1, 1) - peak)
    return torch.bmm(weights, keys) / total
