"""Selection kernels against their twins."""

import pytest
import torch

from headrace.kernels import index
from headrace.kernels.reference import index as twin
from headrace.kernels.storage import PLAIN, RELEASED

HEADS, WIDTH, PER_BLOCK = 4, 32, 8


def example(fmt: str, seeded: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Three spans of 3, 40 and 1 rows whose last rows see 3, 700 and 90 entries; small numbers, so that scores tie."""
    formats = PLAIN if fmt == "plain" else RELEASED
    keys = torch.randint(-2, 3, (200, PER_BLOCK, WIDTH), generator=seeded).float()
    counts, seen = torch.tensor([3, 40, 1]), torch.tensor([3, 700, 90])
    first = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    span_of = torch.repeat_interleave(torch.arange(3), counts)
    visible = seen[span_of] - (first[1:][span_of] - 1 - torch.arange(44))
    return (
        torch.randint(-2, 3, (44, HEADS, WIDTH), generator=seeded).float(),
        torch.randint(1, 3, (44, HEADS), generator=seeded).float(),
        formats.index.store(keys),
        torch.randperm(200, generator=seeded)[: 3 * 60]
        .view(3, 60)
        .repeat(1, 2)[:, :100]
        .contiguous(),
        first,
        span_of,
        visible,
    )


@pytest.mark.parametrize("fmt", ["plain", "released"])
@pytest.mark.parametrize("pool_blocks", [0, 5])
def test_select_entries(fmt: str, pool_blocks: int, seeded: torch.Generator) -> None:
    queries, weights, stored, tables, first, span_of, visible = example(fmt, seeded)
    index_format = (PLAIN if fmt == "plain" else RELEASED).index
    rest = (stored, tables, first, visible, index_format, 16, pool_blocks, 4)
    chosen, pool = index.select_entries(queries, weights, *rest)
    other, other_pool = twin.select_entries(queries, weights, *rest)
    # Small whole numbers: every sum is exact, so choices are equal, ties included.
    assert torch.equal(chosen, other)
    assert torch.equal(pool, other_pool)
    if pool_blocks:
        among = (stored, tables, span_of, visible, index_format, 16, pool, 4)
        assert torch.equal(
            index.select_from_pool(queries, weights, *among),
            twin.select_from_pool(queries, weights, *among),
        )


def test_a_choice_does_not_depend_on_the_other_rows(seeded: torch.Generator) -> None:
    queries, weights, stored, tables, first, _, visible = example("released", seeded)
    queries, weights = queries + torch.rand(queries.shape, generator=seeded), weights * 0.3
    whole, _ = index.select_entries(
        queries, weights, stored, tables, first, visible, RELEASED.index, 16, 0, 4
    )
    alone, _ = index.select_entries(
        queries[20:21],
        weights[20:21],
        stored,
        tables[1:2],
        torch.tensor([0, 1]),
        visible[20:21],
        RELEASED.index,
        16,
        0,
        4,
    )
    assert torch.equal(alone, whole[20:21])
