"""RMSNorm and rotation against their twins."""

import pytest
import torch

from headrace.kernels import norm
from headrace.kernels.reference import norm as twin


@pytest.mark.parametrize(("rows", "width"), [(0, 32), (1, 96), (17, 64), (3, 13)])
def test_rms_norm(rows: int, width: int, seeded: torch.Generator) -> None:
    x, weight = (
        torch.randn(rows, width, generator=seeded),
        torch.rand(width, generator=seeded),
    )
    # At most `width` roundings in either sum of squares, halved by the root, and four more on the way.
    bound = (width + 4) * 2.0**-24
    ours, theirs = norm.rms_norm(x, weight, 1e-20), twin.rms_norm(x, weight, 1e-20)
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=0)


def test_rotation_holds_far_away() -> None:
    positions = torch.tensor([0, 1, 77, 2**20 - 1])
    frequencies = twin.rope_frequencies(16, 10000.0)
    ours, theirs = norm.rotation(positions, frequencies), twin.rotation(positions, frequencies)
    # float64 functions of the same angle, rounded to float32: half a unit apart from 1 at most.
    assert float((ours - theirs).abs().max()) <= 2.0**-23
    assert torch.equal(norm.rotation(positions[:0], frequencies), theirs[:0])


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(0, 4, 64), (5, 4, 64), (9, 32)])
def test_rotate_last(shape: tuple[int, ...], inverse: bool, seeded: torch.Generator) -> None:
    x = torch.randn(*shape, generator=seeded)
    positions = torch.arange(shape[0]) * 1000
    turn = twin.rotation(positions, twin.rope_frequencies(16, 10000.0))
    ours, theirs = norm.rotate_last(x, turn, inverse), twin.rotate_last(x, turn, inverse)
    assert torch.equal(ours[..., :-16], x[..., :-16])
    # Two products and a sum, fused or not: three roundings of values below 2 * |x|.
    torch.testing.assert_close(
        ours, theirs, rtol=0, atol=4 * float(x.abs().max() if x.numel() else 0) * 2.0**-23
    )
