"""Admission on literal numbers, then on random queues."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.decode.admission import (
    Demand,
    Supply,
    blocks_needed,
    check_fits,
    count_admissible,
    output_limit,
)
from headrace.transfer.errors import PromptTooLongError


def test_output_limit_ends_with_the_context() -> None:
    assert output_limit(10, 5, 100) == 5
    assert output_limit(98, 5, 100) == 2
    assert output_limit(100, 5, 100) == 0
    assert output_limit(150, 5, 100) == 0


def test_the_last_sampled_token_needs_no_block() -> None:
    assert blocks_needed(16, 1, 16) == 1
    assert blocks_needed(16, 2, 16) == 2
    assert blocks_needed(1, 1, 16) == 1
    assert blocks_needed(100, 29, 16) == 8


def test_what_can_never_fit_is_refused_with_sizes_and_limit() -> None:
    check_fits(100, 28, context=128, block_tokens=16, num_blocks=8)
    with pytest.raises(PromptTooLongError, match=r"100 tokens .* up to 30 needs 9 blocks .* has 8"):
        check_fits(100, 30, context=200, block_tokens=16, num_blocks=8)
    with pytest.raises(PromptTooLongError, match=r"128 tokens .* context of 128"):
        check_fits(128, 1, context=128, block_tokens=16, num_blocks=800)


def supply(**changed: int) -> Supply:
    return replace(Supply(num_blocks=20, free_blocks=7, free_slots=9, free_places=9), **changed)


def fixed(*blocks: int) -> list[Demand]:
    return [Demand(num_blocks=count) for count in blocks]


def growing(*blocks: int) -> list[Demand]:
    return [Demand(num_blocks=count, can_grow=True) for count in blocks]


def test_first_in_first_out_without_overtaking() -> None:
    assert count_admissible(fixed(3, 4, 1), supply()) == 2
    assert count_admissible(fixed(3, 5, 1), supply()) == 1
    assert count_admissible(fixed(1, 1, 1), supply(free_slots=2)) == 2
    assert count_admissible(fixed(1, 1, 1), supply(free_places=1)) == 1
    assert count_admissible(fixed(1), supply(free_places=0)) == 0
    assert count_admissible(fixed(1), supply(free_places=-1)) == 0
    assert count_admissible([], supply()) == 0


def test_headroom_is_a_block_for_everyone_who_may_grow() -> None:
    assert count_admissible(growing(3), supply(num_growing=3)) == 1
    assert count_admissible(growing(3), supply(num_growing=4)) == 0
    assert count_admissible(fixed(3), supply(num_growing=4)) == 1
    assert count_admissible(growing(2, 2), supply(num_growing=1)) == 2  # 7 - 4 = 1 + 2
    assert count_admissible(growing(2, 2), supply(num_growing=2)) == 1
    assert count_admissible(growing(2, 2, 1), supply(num_growing=0, free_blocks=8)) == 3


def test_an_empty_rank_takes_whoever_fits() -> None:
    assert count_admissible(growing(20), supply(free_blocks=20)) == 1
    assert count_admissible(growing(19, 1), supply(free_blocks=20)) == 1
    assert count_admissible(growing(19), supply(free_blocks=19)) == 0


def test_nobody_enters_while_somebody_is_paused_but_overdue_ones_land() -> None:
    late = Demand(num_blocks=7, can_grow=True, overdue=True)
    assert count_admissible(fixed(1), supply(num_paused=1)) == 0
    assert count_admissible([late], supply(num_paused=1, num_growing=5)) == 1
    assert count_admissible([late, *fixed(1)], supply(num_paused=1, free_blocks=15)) == 1
    assert count_admissible([late], supply(free_blocks=6)) == 0


@given(
    blocks=st.lists(st.integers(1, 10), max_size=10),
    free_blocks=st.integers(0, 30),
    free_slots=st.integers(0, 6),
    free_places=st.integers(0, 6),
    num_growing=st.integers(0, 6),
)
def test_admission_is_the_longest_prefix_that_fits(
    blocks: list[int], free_blocks: int, free_slots: int, free_places: int, num_growing: int
) -> None:
    have = supply(
        num_blocks=31,
        free_blocks=free_blocks,
        free_slots=free_slots,
        free_places=free_places,
        num_growing=num_growing,
    )
    fits = [
        n == 0
        or (sum(blocks[:n]) + num_growing + n <= free_blocks and n <= min(free_slots, free_places))
        for n in range(len(blocks) + 1)
    ]
    longest = max(n for n, ok in enumerate(fits) if ok)
    assert count_admissible(growing(*blocks), have) == longest


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=8),
    ahead=st.integers(1, 18),
    grown=st.integers(0, 60),
)
def test_whose_longest_answers_fit_together_never_wait(
    lengths: list[tuple[int, int]], ahead: int, grown: int
) -> None:
    longest = [blocks_needed(prompt, output, 8) for prompt, output in lengths]
    held = [
        min(most, blocks_needed(prompt, grown + ahead, 8))
        for most, (prompt, _) in zip(longest, lengths, strict=True)
    ]
    inside = sum(have < most for have, most in zip(held[:-1], longest[:-1], strict=True))
    have = Supply(
        num_blocks=sum(longest),
        free_blocks=sum(longest) - sum(held[:-1]),
        free_slots=1,
        free_places=1,
        num_growing=inside,
    )
    newcomer = Demand(num_blocks=held[-1], can_grow=held[-1] < longest[-1])
    assert count_admissible([newcomer], have) == 1
