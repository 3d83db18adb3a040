"""Router and expert kernels against their twins."""

import numpy as np
import pytest
import torch

from headrace.kernels import moe
from headrace.kernels.linear import matmul_rows, pack_weight, panel_bits
from headrace.kernels.quant import fake_quantize_fp8
from headrace.kernels.reference import moe as twin
from headrace.kernels.reference.storage import FLOAT32, FP8


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_route(rows: int, seeded: torch.Generator) -> None:
    logits = torch.randn(rows, 16, generator=seeded) * 20
    bias, bias_image = torch.randn(16, generator=seeded), torch.randn(16, generator=seeded)
    image = torch.rand(rows, generator=seeded) < 0.5
    ids, weights = moe.route(logits, bias, bias_image, image, 3, 1.5)
    other_ids, other_weights = twin.route(logits, bias, bias_image, image, 3, 1.5)
    assert torch.equal(ids, other_ids)
    torch.testing.assert_close(weights, other_weights, rtol=16 * 2.0**-23, atol=0)


def test_equal_scores_go_to_the_smaller_expert() -> None:
    ids, weights = moe.route(
        torch.zeros(1, 8), torch.zeros(8), torch.zeros(8), torch.tensor([False]), 3, 1.0
    )
    assert ids.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((1, 3), 1 / 3))


@pytest.mark.parametrize("kind", [FLOAT32, FP8])
@pytest.mark.parametrize(("rows", "choices"), [(0, 3), (1, 3), (7, 1), (300, 2)])
def test_expert_outputs(kind: int, rows: int, choices: int, seeded: torch.Generator) -> None:
    x = torch.randn(rows, 64, generator=seeded)
    gate_up = pack_weight(torch.randn(4, 64, 64, generator=seeded))
    down = pack_weight(torch.randn(4, 64, 32, generator=seeded))
    ids = torch.rand(rows, 4, generator=seeded).argsort(dim=1)[:, :choices].contiguous()
    scale = torch.rand(rows, choices, generator=seeded)
    bits = panel_bits(gate_up), panel_bits(down)
    ours = moe.expert_outputs(x, ids, scale, *bits, 2.0, kind)
    theirs = twin.expert_outputs(x, ids, scale, gate_up, down, 2.0, kind)
    # Without rounding: sums of 64 and 32 products. With it, a last bit may move a value by one E4M3 step, 2^-3.
    bound = 2.0**-14 if kind == FLOAT32 else 2.0**-3 * 8 * 4
    assert bool(((ours - theirs).abs() <= bound).all())
    if rows:
        assert (ours - theirs).abs().mean() < 1e-3
        last = moe.expert_outputs(x[-1:], ids[-1:], scale[-1:], *bits, 2.0, kind)
        assert torch.equal(last, ours[-1:])


def test_add_choices_is_the_same_to_the_bit(seeded: torch.Generator) -> None:
    outputs, shared = torch.randn(9, 3, 40, generator=seeded), torch.randn(9, 40, generator=seeded)
    assert torch.equal(moe.add_choices(outputs, shared), twin.add_choices(outputs, shared))


@pytest.mark.parametrize("rows", [0, 1, 70])
def test_mixture_is_its_parts_to_the_bit(rows: int, seeded: torch.Generator) -> None:
    def panels(experts: int) -> tuple[np.ndarray, np.ndarray]:
        gate_up = pack_weight(torch.randn(experts, 64, 64, generator=seeded))
        down = pack_weight(torch.randn(experts, 64, 32, generator=seeded).bfloat16().float())
        return panel_bits(gate_up), panel_bits(down)

    routed, shared = panels(4), panels(1)
    x = torch.randn(rows, 64, generator=seeded)
    gate, bias = torch.randn(4, 64, generator=seeded), torch.randn(2, 4, generator=seeded)
    router = moe.Router(
        panels=panel_bits(pack_weight(gate))[None],
        temperature=np.float32(1.5),
        bias=bias[0].numpy(),
        bias_image=bias[1].numpy(),
        scaling=np.float32(1.25),
    )
    image = torch.rand(rows, generator=seeded) < 0.5
    whole, ids, weights = moe.mixture(x, image, router, 2, routed, shared, 2.0, FP8)
    logits = matmul_rows(x, pack_weight(gate), 4) / 1.5
    chosen = moe.route(logits, bias[0], bias[1], image, 2, 1.25)
    assert torch.equal(ids, chosen[0])
    assert torch.equal(weights, chosen[1])
    rounded = fake_quantize_fp8(x)
    alone, one = torch.zeros((rows, 1), dtype=torch.int64), torch.ones((rows, 1))
    parts = moe.add_choices(
        moe.expert_outputs(rounded, ids, weights, *routed, 2.0, FP8),
        moe.expert_outputs(rounded, alone, one, *shared, 2.0, FP8).squeeze(1),
    )
    assert torch.equal(whole, parts)
