"""The sampler: its distribution under every filter, and its indifference to company, order and drafts."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.decode.sampler import SampledRows, logprobs, sample, warm_up
from headrace.transfer.request import SamplingParams

EOS = 1
LOGITS = [1.0, 2.0, 0.5, 2.0, -1.0, 0.0, 1.5, -3.0]
# Exceeded by chance once in a million, for 1, 2, ... degrees of freedom.
CHI_SQUARE_1E_6 = [0.0, 23.9, 27.6, 30.7, 33.4, 35.9, 38.3, 40.5]


def rows(count: int, params: SamplingParams) -> list[SampledRows]:
    """Positions 1, 2, 3 ... of one stream."""
    return [
        SampledRows(params=params, prompt_ids=(0,), output_ids=range(at)) for at in range(count)
    ]


def draws(logits: Sequence[float], count: int, **params: object) -> Counter[int]:
    """Tokens of ``count`` positions of one stream."""
    wanted = rows(count, SamplingParams(**({"temperature": 1.0} | params)))  # type: ignore[arg-type]
    return Counter(sample(torch.tensor(logits).expand(count, -1), wanted, EOS).tolist())


def assert_follows(counts: Counter[int], expected: Sequence[float]) -> None:
    """Chi-square; whatever is expected never, happens never."""
    total = counts.total()
    alive = [i for i, share in enumerate(expected) if share > 0]
    assert set(counts) <= set(alive)
    found = sum((counts[i] - total * expected[i]) ** 2 / (total * expected[i]) for i in alive)
    assert found <= CHI_SQUARE_1E_6[len(alive) - 1]


def softmax(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    scaled = np.array(logits, dtype=np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return list(weights / weights.sum())


def kept(shares: Sequence[float], ids: set[int]) -> list[float]:
    """``shares`` of ``ids`` alone, of sum 1."""
    left = [share if i in ids else 0.0 for i, share in enumerate(shares)]
    return [share / sum(left) for share in left]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_draws_follow_the_softmax(temperature: float, seed: int) -> None:
    counts = draws(LOGITS, 20_000, temperature=temperature, seed=seed)
    assert_follows(counts, softmax(LOGITS, temperature))


def test_seeds_of_one_position_are_as_random_as_positions() -> None:
    count = 20_000
    wanted = [
        SampledRows(params=SamplingParams(temperature=1.0, seed=s), prompt_ids=(0,), output_ids=())
        for s in range(count)
    ]
    ids = sample(torch.tensor(LOGITS).expand(count, -1), wanted, EOS).tolist()
    assert_follows(Counter(ids), softmax(LOGITS))


@pytest.mark.parametrize(
    ("params", "ids"),
    [
        ({"top_k": 3}, {1, 3, 6}),
        ({"top_k": 1}, {1}),
        ({"top_k": 8}, set(range(8))),
        ({"top_p": 0.5}, {1, 3}),  # 0.29, 0.29, 0.18, 0.11, 0.06, 0.04, 0.01, 0.002
        ({"top_p": 0.6}, {1, 3, 6}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.3}, {0, 1, 3, 6}),  # e^-1 = 0.37 of the largest, e^-1.5 = 0.22
        ({"min_p": 1.0}, {1, 3}),
        ({"top_p": 0.6, "top_k": 2, "min_p": 0.3}, {1, 3}),
        ({"top_p": 0.5, "top_k": 5, "min_p": 0.01}, {1, 3}),
        ({"top_p": 0.99, "top_k": 5, "min_p": 0.5}, {1, 3, 6}),
    ],
)
def test_filters_leave_the_shortest_prefix(params: dict[str, float], ids: set[int]) -> None:
    for seed in range(3):
        assert_follows(draws(LOGITS, 10_000, seed=seed, **params), kept(softmax(LOGITS), ids))


def test_top_p_comes_before_top_k() -> None:
    # 0.55 needs two of {0.4, 0.3, 0.2, 0.1}, but only one of the renormalised pair {0.57, 0.43}.
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert set(draws(logits, 2_000, top_p=0.55, top_k=2)) == {1, 3}


def test_ties_go_to_the_smaller_id() -> None:
    assert set(draws([1.0, 2.0, 1.0, 1.0], 2_000, top_k=2)) == {0, 1}
    assert set(draws([0.0] * 8, 2_000, top_p=0.5)) == {0, 1, 2, 3}
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 5.0, 5.0], [1.0, 0.0, 2.0]])
    assert sample(logits, rows(3, SamplingParams()), EOS).tolist() == [1, 0, 2]


def test_positions_and_tokens_are_independent() -> None:
    """Pairs of neighbouring positions, and of equal positions of neighbouring seeds, fill all cells alike."""
    side, count = 4, 40_000
    uniform = torch.zeros(count, side)
    for params in (
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=1.0, seed=4),
    ):
        ids = sample(uniform, rows(count, params), EOS)
        pairs = np.bincount(ids[:-1] * side + ids[1:], minlength=side * side)
        assert ((pairs - count / 16) ** 2 / (count / 16)).sum() < 62  # 15 degrees, 1e-7
    other = sample(uniform, rows(count, SamplingParams(temperature=1.0, seed=3)), EOS)
    pairs = np.bincount(ids * side + other, minlength=side * side)
    assert ((pairs - count / 16) ** 2 / (count / 16)).sum() < 62


def test_bias_and_penalties_change_the_distribution() -> None:
    changed = [*LOGITS]
    changed[0] += 2.0
    changed[7] -= 100.0
    changed[1] = changed[1] / 1.5 - 0.4 - 2 * 0.3  # twice in the answer
    changed[4] = changed[4] * 1.5 - 0.4 - 0.3
    params = SamplingParams(
        temperature=1.0,
        logit_bias=((0, 2.0), (7, -100.0)),
        repetition_penalty=1.5,
        presence_penalty=0.4,
        frequency_penalty=0.3,
    )
    wanted = [
        SampledRows(params=replace(params, seed=seed), prompt_ids=(5,), output_ids=(1, 4, 1))
        for seed in range(20_000)
    ]
    changed[5] = 0.0  # of the prompt, and 0 stays 0
    ids = sample(torch.tensor(LOGITS).expand(len(wanted), -1), wanted, EOS).tolist()
    assert_follows(Counter(ids), kept(softmax(changed), set(range(7))))


def test_min_tokens_bans_what_would_end_the_answer() -> None:
    logits = torch.tensor([[0.0, 9.0, 8.0, 7.0, 0.0]]).expand(3, -1)

    def ids(**params: object) -> list[int]:
        asked = SamplingParams(max_tokens=9, **params)  # type: ignore[arg-type]
        wanted = SampledRows(params=asked, prompt_ids=(0,), output_ids=(0,), drafts=(0, 0))
        return sample(logits, [wanted], EOS).tolist()

    assert ids() == [1, 1, 1]
    assert ids(min_tokens=2) == [2, 1, 1]
    assert ids(min_tokens=9, stop_token_ids=(2,)) == [3, 3, 3]
    assert ids(min_tokens=3, stop_token_ids=(2,), ignore_eos=True) == [1, 1, 1]


def test_masks_are_of_rows_and_meet_min_tokens() -> None:
    mask = np.array([[0b00110], [0b01000], [0b00010]], np.uint32)
    params = SamplingParams(max_tokens=9, min_tokens=1)
    wanted = SampledRows(params=params, prompt_ids=(0,), output_ids=(), drafts=(0, 0), mask=mask)
    assert sample(torch.tensor([[0.0, 9.0, 8.0, 7.0]] * 3), [wanted], EOS).tolist() == [2, 3, 1]
    assert mask.tolist() == [[6], [8], [2]]
    starved = SampledRows(params=params, prompt_ids=(0,), output_ids=(), mask=mask[2:])
    assert sample(torch.zeros(1, 4), [starved], EOS).tolist() == [-1]


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5]),
    min_p=st.sampled_from([0.0, 0.05]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
    logit_bias=st.sampled_from([(), (), ((3, 5.0),)]),
    min_tokens=st.sampled_from([0, 4]),
    seed=st.integers(0, 2**63 - 1),
)


@settings(max_examples=40, deadline=None)
@given(params=st.lists(PARAMS, min_size=6, max_size=6), order=st.permutations(range(6)))
def test_a_row_does_not_depend_on_its_company_or_on_drafts(
    params: list[SamplingParams], order: list[int]
) -> None:
    generator = torch.Generator().manual_seed(params[0].seed % 2**31)
    output, drafts = (3, 4, 3, 99), (4, 5, 5)
    logits = torch.randn(6, 1 + len(drafts), 777, generator=generator) * 4
    masks = torch.randint(2**31, (6, 1 + len(drafts), 25), generator=generator).numpy()
    prompts = [tuple(range(10 + r)) for r in range(6)]

    def asked(r: int, before: int, ahead: int, last_only: bool = False) -> SampledRows:
        """Request r, rows ``before`` .. ``before + ahead``; what lies before is no draft."""
        mask = masks[r, before : before + ahead + 1].astype(np.uint32)
        return SampledRows(
            params=params[r],
            prompt_ids=prompts[r],
            output_ids=(*output, *drafts[:before]),
            drafts=drafts[before : before + ahead],
            mask=(mask[-1:] if last_only else mask) if r % 2 else None,
            last_only=last_only,
        )

    together = sample(
        logits[order].flatten(0, 1), [asked(r, 0, len(drafts)) for r in order], EOS
    ).reshape(6, -1)
    for place, r in enumerate(order):
        alone = [sample(logits[r, j : j + 1], [asked(r, j, 0)], EOS)[0] for j in range(4)]
        assert together[place].tolist() == alone
        (last,) = sample(logits[r, 3:], [asked(r, 0, 3, last_only=True)], EOS)
        assert last == alone[3]


def test_drafts_with_the_same_noise_agree_as_often_as_two_distributions_do() -> None:
    count = 20_000
    draft = [x + 0.2 * i for i, x in enumerate(LOGITS)]
    wanted = rows(count, SamplingParams(temperature=1.0, seed=9))
    agree = sample(torch.tensor(LOGITS).expand(count, -1), wanted, EOS) == sample(
        torch.tensor(draft).expand(count, -1), wanted, EOS
    )
    p, q = np.array(softmax(LOGITS)), np.array(softmax(draft))
    # Gumbel coupling: P(agree) = sum over x of 1 / sum over y of max(p(y)/p(x), q(y)/q(x)), below 1 - TV(p, q)
    exact = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(8))
    assert abs(agree.mean() - exact) < 5 * math.sqrt(exact * (1 - exact) / count)
    assert exact < np.minimum(p, q).sum()


def test_logprobs_are_the_raw_distribution_with_ties_by_id() -> None:
    chosen, (first, second) = logprobs(torch.tensor([LOGITS, [0.0] * 8]), [7, 2], 3)
    exact = np.log(softmax(LOGITS))
    assert chosen == pytest.approx([exact[7], -math.log(8)], abs=1e-12)
    assert first.ids == (1, 3, 6) and second.ids == (0, 1, 2)
    assert first.logprobs == pytest.approx([exact[1], exact[3], exact[6]], abs=1e-12)
    assert second.logprobs == pytest.approx([-math.log(8)] * 3, abs=1e-12)
    assert len(logprobs(torch.tensor([LOGITS]), [0], 20)[1][0].ids) == 8
    assert logprobs(torch.tensor([LOGITS]), [1], 0) == (pytest.approx([exact[1]]), ())


def test_warm_up_and_no_rows() -> None:
    warm_up()
    assert sample(torch.zeros(0, 8), [], EOS).tolist() == []
