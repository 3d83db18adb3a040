"""Thresholds of an instance: exactly the best of all, the same everywhere, and with a floor for every user."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from headrace.decode.cost_table import CostTable
from headrace.decode.step_cost import StepCost
from headrace.decode.survival import NUM_THRESHOLDS, THRESHOLDS, SurvivalPool
from headrace.decode.verify_budget import (
    VECTOR_LENGTH,
    Drafting,
    RankLoad,
    affordable_requests,
    choose,
)

SIZES = (1, 16, 256, 2048)


def cost(fixed: float, per_row: float, draft: float = 0.0) -> StepCost:
    return StepCost(
        forward=CostTable(SIZES, (0,), [[fixed + per_row * r] for r in SIZES]),
        sample=CostTable((1,), (0,), [[1e-9]]),
        draft=CostTable((1,), (0,), [[max(draft, 1e-9)]]),
    )


def pool(*confidences: float, rows: int = 8) -> SurvivalPool:
    made = SurvivalPool(len(confidences))
    made.observe([confidences] * rows)
    return made


def load(requests: int, costs: StepCost, *confidences: float) -> RankLoad:
    return RankLoad.of(pool(*confidences), costs, num_requests=requests, context_tokens=0)


def staircase(requests: int, tokens: list[float], seconds: list[float]) -> RankLoad:
    """A rank whose first steps are given; the rest repeat the last one."""
    longer = NUM_THRESHOLDS + 1 - len(tokens)
    return RankLoad(
        num_requests=requests,
        draft_s=0.1,
        tokens=(*tokens, *tokens[-1:] * longer),
        seconds=(*seconds, *seconds[-1:] * longer),
    )


def test_free_rows_are_all_verified_and_dear_ones_are_not() -> None:
    cheap = choose([load(4, cost(1.0, 1e-6), 0.9, 0.9, 0.9)])
    assert cheap.min_survivals[0] <= 0.9**3
    assert cheap.tokens == pytest.approx(4 * (1 + 0.9 + 0.81 + 0.729))
    assert cheap.gain > 3.0
    dear = choose([load(4, cost(1e-6, 1.0), 0.9, 0.9, 0.9)])
    assert dear.min_survivals == (np.inf,)
    assert dear.tokens == 4.0
    assert dear.gain <= 1.0


def test_the_threshold_parts_good_drafts_from_bad_ones() -> None:
    mixed = SurvivalPool(2)
    mixed.observe([(0.95, 0.9), (0.2, 0.1)] * 8)
    chosen = choose([RankLoad.of(mixed, cost(1.0, 0.1), num_requests=10, context_tokens=0)])
    assert 0.2 < chosen.min_survivals[0] <= 0.95 * 0.9


def test_the_search_sees_beyond_a_step_of_the_staircase() -> None:
    # the first draft does not pay, all four together do: an early stop would verify nothing
    found = choose([staircase(1, [1.0, 1.3, 1.6, 1.9, 2.2], [1.0, 1.6, 1.6, 1.6, 1.6])])
    assert found.tokens == pytest.approx(2.2)
    assert found.seconds == pytest.approx(1.7)
    assert found.gain == pytest.approx(2.2 / 1.7)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_all_pairs_of_thresholds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = [
        replace(
            staircase(
                int(rng.integers(1, 5)),
                (1.0 + rng.uniform(0.0, 1.0, 12).cumsum()).tolist(),
                (1.0 + rng.uniform(0.0, 0.5, 12).cumsum()).tolist(),
            ),
            draft_s=0.3,
        )
        for _ in range(2)
    ]
    a, b = ranks
    best = max(
        (a.tokens[i] + b.tokens[j]) / (max(a.seconds[i], b.seconds[j]) + 0.3)
        for i, j in itertools.product(range(12), repeat=2)
    )
    found = choose(ranks)
    assert found.tokens / found.seconds == pytest.approx(best)
    i, j = (THRESHOLDS.tolist().index(t) for t in found.min_survivals)
    assert a.tokens[i] + b.tokens[j] == pytest.approx(found.tokens)


def test_a_light_rank_uses_the_time_that_the_slowest_takes_anyway() -> None:
    costs = cost(1.0, 0.2)
    alone = choose([load(64, costs, 0.6, 0.6)])
    light, heavy = choose([load(2, costs, 0.6, 0.6), load(64, costs, 0.6, 0.6)]).min_survivals
    assert alone.min_survivals == (np.inf,)
    assert heavy == np.inf
    assert light <= 0.36


def test_every_rank_decides_alike_from_what_was_sent() -> None:
    costs = cost(1.0, 0.05, 0.3)
    loads = [load(n, costs, 0.8, 0.7, 0.6) for n in (3, 0, 40)]
    sent = [RankLoad.from_vector(x.to_vector()) for x in loads]
    assert sent == loads
    assert all(len(x.to_vector()) == VECTOR_LENGTH for x in loads)
    assert choose(sent, 0.5) == choose(loads, 0.5)
    with pytest.raises(ValueError, match=f"3 numbers, not {VECTOR_LENGTH}"):
        RankLoad.from_vector([1.0, 2.0, 3.0])


def test_an_idle_instance_verifies_nothing() -> None:
    idle = choose([load(0, cost(1.0, 1.0), 0.9)] * 2)
    assert idle.min_survivals == (np.inf, np.inf)
    assert (idle.tokens, idle.gain) == (0.0, 0.0)


def test_an_idle_rank_does_not_count_as_a_slow_user() -> None:
    loads = [load(0, cost(1.0, 1e-6), 0.9), load(4, cost(1.0, 1e-6), 0.9)]
    assert choose(loads).tokens_per_s == pytest.approx(1.9, rel=1e-3)
    assert choose(loads, 1.5).tokens == pytest.approx(4 * 1.9)


def test_the_floor_protects_the_rank_that_gains_least() -> None:
    many = staircase(1, [1.0, 5.0], [1.0, 2.0])  # its drafts are good and slow
    few = staircase(1, [1.0, 1.0], [1.0, 1.0])  # its drafts never survive
    assert choose([many, few]).tokens == 6.0
    kept = choose([many, few], 0.9)
    assert kept.tokens == 2.0
    assert kept.tokens_per_s == pytest.approx(1.0 / 1.1)
    # nothing is fast enough: the slowest users get the most that there is
    assert choose([many, few], 50.0) == kept


def probes(num_requests: int, steps: int = 600) -> list[tuple[int, int]]:
    """(first step, number of steps) of every run of drafting while it never pays."""
    state = Drafting()
    runs: list[tuple[int, int]] = []
    for step in range(steps):
        state = state.next(0.9, num_requests)
        if state.draft and runs and sum(runs[-1]) == step:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        elif state.draft:
            runs.append((step, 1))
    return runs


def test_drafting_that_does_not_pay_is_tried_again_ever_more_rarely() -> None:
    made = probes(num_requests=32)
    assert [length for _, length in made] == [1] * len(made)
    assert 14 <= made[0][0] <= 18
    gaps = np.diff([first for first, _ in made]).tolist()
    assert gaps == sorted(gaps)
    assert max(gaps) <= Drafting.MAX_WAIT + 1
    assert len(made) < 10


@pytest.mark.parametrize(("num_requests", "length"), [(1, 4), (3, 2), (4, 1)])
def test_a_probe_of_a_small_batch_takes_several_steps(num_requests: int, length: int) -> None:
    assert {found for _, found in probes(num_requests)[:-1]} == {length}


def test_drafting_begins_again_only_for_a_clear_gain() -> None:
    off = Drafting().next(0.9, 1)
    assert not off.draft
    assert not off.next(1.01, 1).draft
    again = off.next(1.1, 1)
    assert again.draft
    assert again.pays
    assert Drafting().next(1.01, 1).draft


def test_a_gain_that_does_not_last_leaves_the_wait_long() -> None:
    tired = Drafting(draft=False, pays=False, wait=64)
    short = tired.next(1.2, 8).next(0.9, 8)
    assert not short.draft
    assert short.wait == 64
    lasting = tired
    for _ in range(64):
        lasting = lasting.next(1.2, 8)
    assert lasting == Drafting()


def test_as_many_requests_as_all_can_be_fast() -> None:
    costs = cost(1.0, 0.1)
    made = pool(0.5)
    limits = [affordable_requests(made, costs, 0.0, floor, 64) for floor in (0.9, 0.5, 0.2, 0.01)]
    assert limits == sorted(limits)
    assert limits[0] == 3  # 1.5 tokens in 1.6 s
    assert limits[-1] == 64
    most = limits[1]
    for requests, enough in ((most, True), (most + 1, False)):
        one = RankLoad.of(made, costs, num_requests=requests, context_tokens=0)
        assert (choose([one]).tokens_per_s >= 0.5) is enough
    assert affordable_requests(made, costs, 0.0, 1e9, 64) == 1  # one request is always let in
