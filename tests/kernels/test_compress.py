"""Pair pooling against its twin, and across passes."""

import torch

from headrace.kernels.compress import pool_pairs
from headrace.kernels.reference import compress as twin


def test_pool_pairs(seeded: torch.Generator) -> None:
    counts, starts = torch.tensor([1, 5, 0, 12, 1]), torch.tensor([3, 4, 8, 7, 0])
    slots = torch.tensor([4, 2, 6, 1, 3])
    first = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    projected = torch.randn(19, 64, generator=seeded)
    ours = torch.randn(8, 7, 2, 32, generator=seeded)
    theirs = ours.clone()
    latents = pool_pairs(projected, ours, slots, starts, first, 9)
    expected = twin.pool_pairs(projected, theirs, slots, starts, first, 9)
    torch.testing.assert_close(latents, expected, rtol=0, atol=16 * 2.0**-24 * 4)
    assert torch.equal(ours, theirs)


def test_a_pair_is_the_same_when_its_halves_come_in_two_passes(seeded: torch.Generator) -> None:
    projected = torch.randn(10, 64, generator=seeded)
    slot, one = torch.tensor([1]), torch.zeros(2, 7, 2, 32)
    whole = pool_pairs(projected, one, slot, torch.tensor([0]), torch.tensor([0, 10]), 5)
    two = torch.zeros(2, 7, 2, 32)
    parts = [
        pool_pairs(projected[t : t + 1], two, slot, torch.tensor([t]), torch.tensor([0, 1]), t % 2)
        for t in range(10)
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(one, two)
