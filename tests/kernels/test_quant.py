"""Number formats: literal bytes of the specification, and stored = fake-quantised to the bit."""

import pytest
import torch

from headrace.kernels.reference import quant
from headrace.kernels.reference.storage import RELEASED, RowFormat


def test_fp8_bytes_of_the_released_checkpoint() -> None:
    stored = torch.tensor([[0xD8, 0x71, 0xF2, 0x79]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = quant.dequantize_fp8_blocks(stored, torch.tensor([[0x73]], dtype=torch.uint8))
    assert values.tolist() == [[-0.00390625, 0.03515625, -0.0390625, 0.0703125]]


def test_fp4_bytes_of_the_released_checkpoint_come_low_nibble_first() -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, :2] = torch.tensor([0xA0, 0xA8])
    values = quant.dequantize_fp4_experts(
        packed.view(torch.int8), torch.tensor([[0x78]], dtype=torch.uint8)
    )
    assert values[0, :4].tolist() == [0.0, -0.0078125, 0.0, -0.0078125]


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0.25, 0.0),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (3.5, 4.0),
        (5.0, 4.0),
        (5.1, 6.0),
    ],
)
def test_e2m1_rounds_ties_to_the_even_code(value: float, rounded: float) -> None:
    x = torch.zeros(32)
    x[0], x[1], x[2] = 6.0, value, -value
    assert quant.fake_quantize_fp4_mx(x)[:3].tolist() == [6.0, rounded, -rounded]


def test_fp8_scale_is_the_smallest_power_of_two_that_fits() -> None:
    for amax, scale in ((448.0, 1.0), (448.1, 2.0), (1e-9, 2.0**-22)):
        x = torch.zeros(32)
        x[0] = amax
        row = quant.quantize_fp8_row(x)
        assert quant.ue8m0_to_float(row[32:]).item() == scale


@pytest.mark.parametrize(
    "fmt", [RELEASED.main, RELEASED.index, RELEASED.window], ids=["main", "index", "window"]
)
@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e4])
def test_stored_rows_read_back_as_they_were_rounded(fmt: RowFormat, spread: float) -> None:
    x = torch.randn(37, 64, generator=torch.Generator().manual_seed(3)) * spread
    x[3] = 0.0
    stored = fmt.store(x)
    assert stored.shape == (37, fmt.row_bytes(64))
    assert torch.equal(fmt.load(stored), fmt.rounded(x))
    assert torch.equal(fmt.rounded(fmt.rounded(x)), fmt.rounded(x))


def test_row_bytes_of_the_release() -> None:
    assert RELEASED.main.row_bytes(512) == 288
    assert RELEASED.index.row_bytes(128) == 68
    assert RELEASED.window.row_bytes(512) == 528


def test_weights_survive_a_second_round_trip() -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(5))
    once = quant.dequantize_fp8_blocks(*quant.quantize_fp8_blocks(weight))
    assert torch.equal(quant.dequantize_fp8_blocks(*quant.quantize_fp8_blocks(once)), once)
    assert (once - weight).abs().max() <= weight.abs().max() / 16
    expert = quant.dequantize_fp4_experts(*quant.quantize_fp4_experts(weight))
    assert torch.equal(quant.dequantize_fp4_experts(*quant.quantize_fp4_experts(expert)), expert)
