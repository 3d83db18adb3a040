"""Sink attention against its twin."""

import pytest
import torch

from headrace.kernels.attention import attention_inputs, attention_output, sink_attention
from headrace.kernels.linear import matmul_groups, matmul_rows, pack_weight, panel_bits
from headrace.kernels.norm import rms_norm, rotate_last
from headrace.kernels.quant import fake_quantize_fp8
from headrace.kernels.reference import attention as twin
from headrace.kernels.reference.storage import FP8


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


@pytest.mark.parametrize("rows", [0, 1, 20])
def test_inputs_and_output_are_their_parts_to_the_bit(rows: int, seeded: torch.Generator) -> None:
    def panels(*shape: int) -> torch.Tensor:
        return pack_weight(torch.randn(*shape, generator=seeded).bfloat16().float())

    def norm(width: int) -> torch.Tensor:
        return torch.rand(width, generator=seeded)

    hidden, low_width, heads, width, eps = 96, 64, 4, 64, 1e-20
    x = torch.randn(rows, hidden, generator=seeded)
    turn = torch.polar(torch.ones(rows, 8), torch.rand(rows, 8, generator=seeded) * 6)
    latent, latent_norm = panels(width, hidden), norm(width)
    down, down_norm = panels(low_width, hidden), norm(low_width)
    up = panels(heads * width, low_width)
    keys, low, queries = attention_inputs(
        x,
        turn,
        (panel_bits(latent)[None], latent_norm.numpy()),
        (panel_bits(down)[None], down_norm.numpy()),
        panel_bits(up)[None],
        heads,
        eps,
        FP8,
    )
    x8 = fake_quantize_fp8(x)
    key = rms_norm(matmul_rows(x8, latent, width), latent_norm, eps)
    assert torch.equal(keys, rotate_last(key, turn))
    query = fake_quantize_fp8(rms_norm(matmul_rows(x8, down, low_width), down_norm, eps))
    assert torch.equal(low, query)
    wide = matmul_rows(query, up, heads * width).unflatten(1, (heads, width))
    assert torch.equal(queries, rotate_last(wide, turn))

    _, window, index, entries, chosen, sink = example(rows, 7, seeded)
    groups, out = panels(2, 32, 2 * width), panels(hidden, 64)
    keys_of_row = (window, index, entries, chosen, sink)
    output = attention_output(
        queries, *keys_of_row, turn, panel_bits(groups), 32, panel_bits(out)[None], hidden, FP8
    )
    mixed = rotate_last(sink_attention(queries, *keys_of_row), turn, inverse=True)
    narrow = fake_quantize_fp8(matmul_groups(mixed.flatten(1), groups, 32))
    assert torch.equal(output, matmul_rows(narrow, out, hidden))
