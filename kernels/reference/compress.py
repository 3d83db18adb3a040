"""Pooling of token pairs into one latent (spec/model.md 2.6)."""

import torch
from torch import Tensor


def pool_pairs(
    projected: Tensor,
    pending: Tensor,
    slots: Tensor,
    starts: Tensor,
    first_row: Tensor,
    num_pairs: int,
) -> Tensor:
    """Latents [num_pairs, d] of the pairs that end in ``projected`` [T, 2 d] (values, gates), in row order.

    Per channel, a softmax over the two gates weights the two values. Span s has the rows ``first_row[s]`` to
    ``first_row[s + 1]`` at positions from ``starts[s]`` (int64 [S]); a pair ends at an odd position. The even
    half may be older: ``pending`` [slots, ring, 2, d] holds the last rows by position, and is brought up to
    date.
    """
    ring = pending.shape[1]
    latents: list[Tensor] = []
    for slot, start, begin, end in zip(
        slots.tolist(),
        starts.tolist(),
        first_row[:-1].tolist(),
        first_row[1:].tolist(),
        strict=True,
    ):
        current = projected[begin:end].unflatten(1, (2, -1))
        rows = torch.cat((pending[slot, (start - 1) % ring].unsqueeze(0), current))
        odd = torch.nonzero((start + torch.arange(end - begin)) % 2).flatten()
        first, second = rows[odd], rows[odd + 1]
        share = torch.sigmoid(first[:, 1] - second[:, 1])
        latents.append(share * first[:, 0] + (1 - share) * second[:, 0])
        kept = torch.arange(max(0, end - begin - ring), end - begin)
        pending[slot, (start + kept) % ring] = current[kept]
    result = torch.cat(latents) if latents else projected.new_zeros(0, pending.shape[3])
    assert len(result) == num_pairs
    return result
