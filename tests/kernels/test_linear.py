"""Products against their twins, and the independence of rows that ``deterministic`` rests on."""

import pytest
import torch

from headrace.kernels import linear
from headrace.kernels.reference import linear as twin

SHAPES = [(64, 32), (96, 256), (129, 65), (256, 16), (256, 600), (1024, 24)]


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_matmul_rows(inner: int, outer: int, seeded: torch.Generator) -> None:
    x, weight = (
        torch.randn(37, inner, generator=seeded),
        torch.randn(outer, inner, generator=seeded),
    )
    panels = linear.pack_weight(weight)
    whole = linear.matmul_rows(x, panels, outer)
    # A sum of `inner` products in any order is within inner * 2^-24 of the sum of their magnitudes; two such sums.
    bound = 2 * inner * 2.0**-24 * (x.abs() @ weight.abs().t())
    assert bool(((whole - twin.matmul_rows(x, panels, outer)).abs() <= bound).all())
    assert bool(((whole - x @ weight.t()).abs() <= bound).all())
    for row in (0, 1, 17, 36):
        assert torch.equal(
            linear.matmul_rows(x[row : row + 1], panels, outer), whole[row : row + 1]
        )
    order = torch.randperm(37, generator=seeded)
    assert torch.equal(linear.matmul_rows(x[order], panels, outer), whole[order])


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_matmul_groups(groups: int, seeded: torch.Generator) -> None:
    x = torch.randn(11, groups * 48, generator=seeded)
    panels = linear.pack_weight(torch.randn(groups, 100, 48, generator=seeded))
    ours = linear.matmul_groups(x, panels, 100)
    torch.testing.assert_close(ours, twin.matmul_groups(x, panels, 100), rtol=0, atol=1e-4)
    assert torch.equal(linear.matmul_groups(x[7:8], panels, 100), ours[7:8])


def test_weights_that_bfloat16_holds_give_the_same_bits(seeded: torch.Generator) -> None:
    x = torch.randn(9, 64, generator=seeded)
    weight = torch.randn(70, 64, generator=seeded).bfloat16().float()
    panels = linear.pack_weight(weight)
    assert panels.dtype == torch.bfloat16
    assert linear.pack_weight(weight + 1e-6).dtype == torch.float32
    assert torch.equal(linear.matmul_rows(x, panels, 70), linear.matmul_rows(x, panels.float(), 70))


def test_zero_depth_gives_zeros() -> None:
    assert torch.equal(
        linear.matmul_rows(torch.zeros(2, 0), torch.zeros(1, 0, 5), 5), torch.zeros(2, 5)
    )
