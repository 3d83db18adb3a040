"""Admission by reservation on literal numbers, then on random queues."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.decode.admission import blocks_needed, check_fits, count_admissible, output_limit
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


def test_first_in_first_out_without_overtaking() -> None:
    assert count_admissible([3, 4, 1], free_blocks=7, free_slots=9, free_places=9) == 2
    assert count_admissible([3, 5, 1], free_blocks=7, free_slots=9, free_places=9) == 1
    assert count_admissible([1, 1, 1], free_blocks=7, free_slots=2, free_places=9) == 2
    assert count_admissible([1, 1, 1], free_blocks=7, free_slots=9, free_places=1) == 1
    assert count_admissible([1], free_blocks=7, free_slots=9, free_places=0) == 0
    assert count_admissible([], free_blocks=7, free_slots=9, free_places=9) == 0


@given(
    demands=st.lists(st.integers(1, 10), max_size=10),
    free_blocks=st.integers(0, 30),
    free_slots=st.integers(0, 6),
    free_places=st.integers(0, 6),
)
def test_admission_is_the_longest_prefix_that_fits(
    demands: list[int], free_blocks: int, free_slots: int, free_places: int
) -> None:
    count = count_admissible(
        demands, free_blocks=free_blocks, free_slots=free_slots, free_places=free_places
    )
    fits = [
        sum(demands[:n]) <= free_blocks and n <= free_slots and n <= free_places
        for n in range(len(demands) + 1)
    ]
    assert count == max(n for n, ok in enumerate(fits) if ok)
