"""Bias and penalties against their twin: equal bits, since both do the same roundings."""

import numpy as np
import torch

from headrace.kernels import penalties as kernel
from headrace.kernels.reference import penalties as twin
from headrace.kernels.reference.penalties import Adjustment


def adjustment(**given: object) -> Adjustment:
    none = np.empty(0, np.int64)
    neutral = {
        "bias_ids": none,
        "biases": np.empty(0, np.float32),
        "prompt_ids": none,
        "output_ids": none,
        "draft_ids": none,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    return Adjustment(**(neutral | given))  # type: ignore[arg-type]


def test_rows_equal_the_twins(seeded: torch.Generator) -> None:
    logits = torch.randn(8, 50, generator=seeded) * 5
    before = logits.clone()
    wanted = adjustment(
        bias_ids=np.array([0, 7, 49, 7]),
        biases=np.array([100.0, -3.3, 0.1, 1.0], np.float32),
        prompt_ids=np.arange(0, 50, 3),
        output_ids=np.array([3, 3, 4, 3, 48]),
        draft_ids=np.array([4, 4, 9, 0]),
        repetition_penalty=1.3,
        presence_penalty=0.7,
        frequency_penalty=-0.31,
    )
    ours, theirs = kernel.adjust(logits, 2, wanted), twin.adjust(logits, 2, wanted)
    assert ours.shape == (5, 50) and torch.equal(ours, theirs)
    assert torch.equal(logits, before)


def test_one_row_in_numbers() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0]])
    wanted = adjustment(
        prompt_ids=np.array([0, 1]),
        output_ids=np.array([2, 3, 3]),
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    (row,) = kernel.adjust(logits, 0, wanted).tolist()
    # prompt: halved or doubled; answer: also less 0.5 and 0.25 for each time
    assert row == [1.0, -4.0, 1.0 - 0.75, -4.0 - 1.0, 2.0]


def test_a_draft_counts_in_the_rows_behind_it() -> None:
    logits = torch.zeros(3, 4)
    rows = kernel.adjust(logits, 0, adjustment(draft_ids=np.array([1, 1]), frequency_penalty=1.0))
    assert rows[:, 1].tolist() == [0.0, -1.0, -2.0] and not rows[:, [0, 2, 3]].any()
