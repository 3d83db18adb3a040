"""Number formats: every kernel gives the bits of its twin."""

import pytest
import torch

from headrace.kernels import quant, storage
from headrace.kernels.reference import quant as twin
from headrace.kernels.reference import storage as twin_storage

FORMATS = ["fp8", "fp4_mx", "fp4_nv"]


def values(spread: float, seeded: torch.Generator) -> torch.Tensor:
    """Rows of normal values, of exact steps and ties, with zeros of both signs, and of everything from 2^-149 on."""
    x = torch.randn(40, 64, generator=seeded) * spread
    x[1] = 0.0
    x[2] = -0.0
    x[3, 5:] = 0.0
    x[4] = torch.arange(64) * 0.125 - 4
    x[5] = torch.arange(64) * 0.25 * 2.0**-9
    x[6] = torch.arange(64) * 8.0
    x[7, :] = 2.0 ** torch.linspace(-149, 20, 64)
    x[8] = -(2.0 ** torch.linspace(-20, 100, 64))
    return x


@pytest.mark.parametrize("spread", [1e-30, 1e-5, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("fmt", FORMATS)
def test_bits_of_the_twin(fmt: str, spread: float, seeded: torch.Generator) -> None:
    x = values(spread, seeded)
    ours, theirs = (
        getattr(quant, f"fake_quantize_{fmt}")(x),
        getattr(twin, f"fake_quantize_{fmt}")(x),
    )
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    rows, other = getattr(quant, f"quantize_{fmt}_row")(x), getattr(twin, f"quantize_{fmt}_row")(x)
    assert torch.equal(rows, other)
    read, other = (
        getattr(quant, f"dequantize_{fmt}_row")(rows),
        getattr(twin, f"dequantize_{fmt}_row")(rows),
    )
    assert torch.equal(read.view(torch.int32), other.view(torch.int32))


def test_every_fp8_value_is_read_right() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[127, 255]] = 0  # not a number
    rows = torch.cat(
        (codes.view(8, 32), torch.arange(120, 128, dtype=torch.uint8).view(8, 1)), dim=1
    )
    assert torch.equal(quant.dequantize_fp8_row(rows), twin.dequantize_fp8_row(rows))


@pytest.mark.parametrize("fmt", ["main", "index", "window"])
@pytest.mark.parametrize("numerics", ["released", "plain"])
def test_rows_of_an_arena(numerics: str, fmt: str, seeded: torch.Generator) -> None:
    ours, theirs = (getattr(s.KV_FORMATS[numerics], fmt) for s in (storage, twin_storage))
    width = ours.row_bytes(64)
    arena = torch.zeros(9, 7 + 5 * width, dtype=torch.uint8)
    other = arena.clone()
    views = [a[:, 7:].unflatten(1, (5, width)) for a in (arena, other)]
    x = torch.randn(6, 64, generator=seeded)
    outer, inner = torch.tensor([0, 8, 3, 3, 2, 1]), torch.tensor([0, 4, 1, 2, 0, 3])
    storage.scatter_rows(views[0], outer, inner, x, ours)
    twin_storage.scatter_rows(views[1], outer, inner, x, theirs)
    assert torch.equal(arena, other)
    more = torch.randn(2, 64, generator=seeded)
    read = storage.window_keys(views[0], outer, inner, more, ours)
    assert torch.equal(read, twin_storage.window_keys(views[1], outer, inner, more, theirs))
    assert torch.equal(read, theirs.rounded(torch.cat((x, more))))
    tables, chosen = torch.tensor([[0, 8], [3, 2]]), torch.tensor([[9, 0, -1], [1, 2, 5]])
    place = (tables, torch.tensor([0, 1]), chosen)
    entries = storage.gather_entries(views[0], *place, ours, 64)
    expected = twin_storage.gather_entries(views[1], *place, theirs, 64)
    assert torch.equal(entries[chosen >= 0], expected[chosen >= 0])
