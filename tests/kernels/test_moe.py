"""Router and expert kernels against their twins."""

import numpy as np
import pytest
import torch

from headrace.kernels import moe
from headrace.kernels.linear import matmul_rows, pack_weight, panel_bits
from headrace.kernels.moe import ExpertMath, ExpertShape, row_bits
from headrace.kernels.quant import fake_quantize_fp8
from headrace.kernels.reference import moe as twin
from headrace.kernels.reference.storage import FLOAT32, FP8


def rows_of(gate_up: torch.Tensor, down: torch.Tensor) -> np.ndarray:
    """Experts [E, 2 I, H] and [E, H, I] as the kernels read them."""
    shape = ExpertShape(gate_up.shape[2], down.shape[2])
    return row_bits(torch.stack([shape.pack(*each) for each in zip(gate_up, down, strict=True)]))


def how(kind: int, *, halves: bool = False) -> ExpertMath:
    return ExpertMath(shape=ExpertShape(64, 32), limit=np.float32(2), kind=kind, halves=halves)


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
    gate_up = torch.randn(4, 64, 64, generator=seeded)
    down = torch.randn(4, 64, 32, generator=seeded)
    ids = torch.rand(rows, 4, generator=seeded).argsort(dim=1)[:, :choices].contiguous()
    scale = torch.rand(rows, choices, generator=seeded)
    weights = rows_of(gate_up, down)
    ours = moe.expert_outputs(x, ids, scale, weights, how(kind))
    theirs = twin.expert_outputs(x, ids, scale, pack_weight(gate_up), pack_weight(down), 2.0, kind)
    # Without rounding: sums of 64 and 32 products. With it, a last bit may move a value by one E4M3 step, 2^-3.
    bound = 2.0**-14 if kind == FLOAT32 else 2.0**-3 * 8 * 4
    assert bool(((ours - theirs).abs() <= bound).all())
    if rows:
        assert (ours - theirs).abs().mean() < 1e-3
        last = moe.expert_outputs(x[-1:], ids[-1:], scale[-1:], weights, how(kind))
        assert torch.equal(last, ours[-1:])
    rounded = moe.expert_outputs(x, ids, scale, weights, how(kind, halves=True))
    assert torch.equal(rounded, ours.bfloat16().float())


@pytest.mark.parametrize(("hidden", "width"), [(64, 32), (96, 32), (32, 16), (160, 80)])
def test_a_row_holds_the_panels_one_behind_the_other(
    hidden: int, width: int, seeded: torch.Generator
) -> None:
    gate_up = torch.randn(2 * width, hidden, generator=seeded).bfloat16().float()
    down = torch.randn(hidden, width, generator=seeded).bfloat16().float()
    shape = ExpertShape(hidden, width)
    row = shape.pack(gate_up, down)
    assert row.dtype == torch.bfloat16
    panels = pack_weight(gate_up), pack_weight(down)
    assert torch.equal(row, torch.cat([each.flatten() for each in panels]))
    assert row.shape == (shape.size,)
    assert shape.pack(gate_up, down / 3).dtype == torch.float32


def test_add_choices_is_the_same_to_the_bit(seeded: torch.Generator) -> None:
    outputs, shared = torch.randn(9, 3, 40, generator=seeded), torch.randn(9, 40, generator=seeded)
    assert torch.equal(moe.add_choices(outputs, shared), twin.add_choices(outputs, shared))


@pytest.mark.parametrize("rows", [0, 1, 70])
@pytest.mark.parametrize("halves", [False, True])
def test_mixture_is_its_parts_to_the_bit(rows: int, halves: bool, seeded: torch.Generator) -> None:
    def experts(number: int) -> np.ndarray:
        gate_up = torch.randn(number, 64, 64, generator=seeded)
        return rows_of(gate_up, torch.randn(number, 64, 32, generator=seeded))

    routed, shared = experts(5), experts(1)
    slot_of = np.array([3, 0, 4, 1])  # slot 2 is empty
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
    math, counts = how(FP8, halves=halves), np.full(4, 7, np.int32)
    whole, ids, weights = moe.mixture(x, image, router, 2, slot_of, routed, shared, math, counts)
    logits = matmul_rows(x, pack_weight(gate), 4) / 1.5
    chosen = moe.route(logits, bias[0], bias[1], image, 2, 1.25)
    assert torch.equal(ids, chosen[0])
    assert torch.equal(weights, chosen[1])
    assert (counts - 7).tolist() == torch.bincount(ids.flatten(), minlength=4).tolist()
    rounded = fake_quantize_fp8(x)
    slots = torch.from_numpy(slot_of)[ids]
    parts = moe.add_choices(
        moe.expert_outputs(rounded, slots, weights, routed, math),
        moe.shared_outputs(rounded, shared, math),
    )
    assert torch.equal(whole, parts)
