"""Sink attention against its twin."""

import pytest
import torch

from headrace.kernels.attention import sink_attention
from headrace.kernels.reference import attention as twin


def example(rows: int, chosen: int, seeded: torch.Generator) -> tuple[torch.Tensor, ...]:
    index = torch.randint(-1, 50, (rows, 17), generator=seeded)
    return (
        torch.randn(rows, 4, 64, generator=seeded),
        torch.randn(50, 64, generator=seeded),
        index,
        torch.randn(rows, chosen, 64, generator=seeded),
        torch.randint(-1, 3, (rows, chosen), generator=seeded),
        torch.randn(4, generator=seeded),
    )


@pytest.mark.parametrize(("rows", "chosen"), [(0, 5), (1, 0), (1, 16), (23, 7)])
def test_sink_attention(rows: int, chosen: int, seeded: torch.Generator) -> None:
    arguments = example(rows, chosen, seeded)
    ours, theirs = sink_attention(*arguments), twin.sink_attention(*arguments)
    # Scores of 64 products, relative error 64 * 2^-24 of at most ~40; a convex combination keeps it.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    if rows:
        queries, window, index, entries, numbers, sink = arguments
        last = sink_attention(queries[-1:], window, index[-1:], entries[-1:], numbers[-1:], sink)
        assert torch.equal(last, ours[-1:])


def test_what_lies_behind_no_key_does_not_matter(seeded: torch.Generator) -> None:
    queries, window, index, entries, chosen, sink = example(9, 8, seeded)
    clean = sink_attention(queries, window, index, entries, chosen, sink)
    entries[chosen < 0] = torch.nan
    assert torch.equal(sink_attention(queries, window, index, entries, chosen, sink), clean)
    nothing = sink_attention(queries, window, index * 0 - 1, entries, chosen * 0 - 1, sink)
    assert torch.equal(nothing, torch.zeros_like(nothing))
