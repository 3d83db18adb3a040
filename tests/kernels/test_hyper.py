"""mHC kernels against their twins."""

import pytest
import torch

from headrace.kernels import hyper
from headrace.kernels.linear import matmul_rows, pack_weight, panel_bits
from headrace.kernels.reference import hyper as twin

ROWS = (0, 1, 5, 33)


@pytest.mark.parametrize("rows", ROWS)
def test_mix_weights(rows: int, seeded: torch.Generator) -> None:
    streams = torch.randn(rows, 4, 64, generator=seeded)
    mixes = torch.randn(rows, 24, generator=seeded) * 3
    scale, base = torch.rand(3, generator=seeded), torch.randn(24, generator=seeded)
    ours = hyper.mix_weights(streams, mixes, scale, base, 20, 1e-6, 1e-20)
    theirs = twin.mix_weights(streams, mixes, scale, base, 20, 1e-6, 1e-20)
    for mine, other in zip(ours, theirs, strict=True):
        # A few dozen roundings of 2^-24 in a row; normalisation keeps them from growing.
        torch.testing.assert_close(mine, other, rtol=64 * 2.0**-24, atol=64 * 2.0**-24)


@pytest.mark.parametrize("rows", ROWS)
def test_mix_streams_is_its_parts_to_the_bit(rows: int, seeded: torch.Generator) -> None:
    streams = torch.randn(rows, 4, 64, generator=seeded)
    panels = pack_weight(torch.randn(24, 256, generator=seeded))
    scale, base = torch.rand(3, generator=seeded), torch.randn(24, generator=seeded)
    rest = (scale, base, 20, 1e-6, 1e-20)
    mixes = matmul_rows(streams.flatten(1), panels, 24)
    whole = hyper.mix_streams(streams, panel_bits(panels)[None], *rest)
    for mine, other in zip(whole, hyper.mix_weights(streams, mixes, *rest), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("rows", ROWS)
def test_collapse_norm(rows: int, seeded: torch.Generator) -> None:
    streams = torch.randn(rows, 4, 96, generator=seeded)
    weights, norm = torch.rand(rows, 4, generator=seeded), torch.rand(96, generator=seeded)
    # The mean of 96 squares: at most 96 roundings either way, halved by the root, and the products.
    torch.testing.assert_close(
        hyper.collapse_norm(streams, weights, norm, 1e-20),
        twin.collapse_norm(streams, weights, norm, 1e-20),
        rtol=100 * 2.0**-24,
        atol=0,
    )


@pytest.mark.parametrize("rows", ROWS)
def test_collapse_is_the_same_to_the_bit(rows: int, seeded: torch.Generator) -> None:
    streams = torch.randn(rows, 4, 96, generator=seeded)
    weights = torch.rand(rows, 4, generator=seeded)
    assert torch.equal(hyper.collapse(streams, weights), twin.collapse(streams, weights))


@pytest.mark.parametrize("rows", ROWS)
def test_combine_is_the_same_to_the_bit(rows: int, seeded: torch.Generator) -> None:
    streams, output = (
        torch.randn(rows, 4, 96, generator=seeded),
        torch.randn(rows, 96, generator=seeded),
    )
    post, comb = torch.rand(rows, 4, generator=seeded), torch.rand(rows, 4, 4, generator=seeded)
    ours = hyper.combine(streams, output, post, comb)
    assert torch.equal(ours, twin.combine(streams, output, post, comb))
