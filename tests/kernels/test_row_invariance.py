"""A row's bits do not depend on its neighbours: what ``deterministic`` rests on, for every shape a small model uses."""

import pytest
import torch

from headrace.kernels.reference.attention import sink_attention
from headrace.kernels.reference.index import index_scores
from headrace.kernels.reference.linear import ROW_TILE, matmul_rows

SHAPES = [(64, 32), (64, 96), (96, 256), (128, 64), (256, 16), (256, 160), (256, 4096), (1024, 24)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_products_do_not_depend_on_place_or_number_of_rows(inner: int, outer: int) -> None:
    generator = torch.Generator().manual_seed(inner * outer)
    x = torch.randn(20 * ROW_TILE, inner, generator=generator)
    weight_t = torch.randn(outer, inner, generator=generator).t().contiguous()
    whole = matmul_rows(x, weight_t, tiled=True)
    for rows in (1, 2, 5, 12):
        part = matmul_rows(x[: rows * ROW_TILE], weight_t, tiled=True)
        assert torch.equal(part, whole[: rows * ROW_TILE])
    order = torch.randperm(len(x), generator=generator)
    assert torch.equal(matmul_rows(x[order], weight_t, tiled=True), whole[order])


def test_attention_of_a_row_does_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(7)
    queries = torch.randn(64, 4, 64, generator=generator)
    keys = torch.randn(64, 48, 64, generator=generator)
    valid = torch.rand(64, 48, generator=generator) < 0.8
    sink = torch.randn(4, generator=generator)
    whole = sink_attention(queries, keys, valid, sink)
    for rows in (16, 32, 48):
        assert torch.equal(
            sink_attention(queries[:rows], keys[:rows], valid[:rows], sink), whole[:rows]
        )


def test_what_an_invalid_key_holds_does_not_matter() -> None:
    queries, keys = torch.randn(16, 4, 64), torch.randn(16, 8, 64)
    valid = torch.arange(8).expand(16, 8) < 5
    poisoned = keys.clone()
    poisoned[:, 5:] = torch.nan
    clean = sink_attention(queries, keys, valid, torch.zeros(4))
    assert torch.equal(sink_attention(queries, poisoned, valid, torch.zeros(4)), clean)


@pytest.mark.parametrize("heads", [2, 4, 32])
def test_index_scores_do_not_depend_on_rows_or_entries(heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    queries = torch.randn(1, 23, heads, 32, generator=generator)
    weights = torch.randn(1, 23, heads, generator=generator)
    keys = torch.randn(1, 512, 32, generator=generator)
    whole = index_scores(queries, weights, keys)
    assert torch.equal(
        index_scores(queries, weights, keys[:, :256].contiguous()), whole[:, :, :256]
    )
    for row in (0, 1, 11, 22):
        alone = index_scores(queries[:, row : row + 1], weights[:, row : row + 1], keys)
        assert torch.equal(alone, whole[:, row : row + 1])
