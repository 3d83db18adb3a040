"""What follows the end of a text, found as a search through the whole text finds it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.decode import ngram
from headrace.decode.ngram import MAX_CANDIDATES, MAX_MATCH, MIN_MATCH, MatchCounts, NgramIndex

texts = st.lists(st.integers(0, 3), max_size=60)


def by_search(ids: list[int], num: int) -> tuple[int, ...]:
    """The continuation of the longest, then latest, match, by comparing everything with everything."""
    best, found = 0, -1
    candidates = 0
    for end in range(len(ids) - 2, 0, -1):
        if ids[end - 1 : end + 1] != ids[-2:]:
            continue
        candidates += 1
        if candidates > MAX_CANDIDATES:
            break
        length = MIN_MATCH
        while length < MAX_MATCH and length <= end and ids[end - length] == ids[-1 - length]:
            length += 1
        if length > best:
            best, found = length, end
    if not best:
        return ()
    text = list(ids)
    for place in range(num):
        text.append(text[found + 1 + place])
    return tuple(text[len(ids) :])


def test_the_longest_match_wins_and_then_the_latest() -> None:
    assert NgramIndex([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]).propose(2).ids == (7, 9)
    assert NgramIndex([4, 2, 3, 7, 5, 2, 3, 8, 1, 2, 3]).propose(1).ids == (8,)


def test_a_period_goes_on() -> None:
    assert NgramIndex([5, 6, 5, 6, 5]).propose(5).ids == (6, 5, 6, 5, 6)
    assert NgramIndex([3, 3, 3]).propose(4).ids == (3, 3, 3, 3)


@pytest.mark.parametrize("ids", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_new_text_has_no_drafts(ids: list[int]) -> None:
    assert NgramIndex(ids).propose(5) == ngram.NgramDrafts()
    assert NgramIndex([1, 2, 1, 2]).propose(0) == ngram.NgramDrafts()


@given(texts, st.lists(texts, max_size=5), st.integers(1, 8))
def test_an_index_finds_what_a_search_finds_however_it_grew(
    prompt: list[int], answers: list[list[int]], num: int
) -> None:
    index, text = NgramIndex(prompt), list(prompt)
    for answer in answers:
        assert index.propose(num).ids == by_search(text, num)
        index.push(answer)
        text += answer
    assert index.num_tokens == len(text)
    assert index.propose(num).ids == by_search(text, num)
    assert NgramIndex(text).propose(num).ids == index.propose(num).ids


def test_an_index_forgets_old_text_and_stays_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_TOKENS", 50)
    rng = np.random.default_rng(1)
    text: list[int] = rng.integers(0, 4, 90).tolist()
    index = NgramIndex(text)
    assert index.propose(3).ids == by_search(text[-50:], 3)
    for _ in range(40):
        more: list[int] = rng.integers(0, 4, 7).tolist()
        index.push(more)
        text += more
        assert index.num_tokens == len(text)
        assert len(index.propose(3).ids) in (0, 3)
    assert len(index._ids) <= 100  # pyright: ignore[reportPrivateUsage]
    assert len(index._last) <= 100  # pyright: ignore[reportPrivateUsage]


def test_confidences_follow_what_happened_at_a_match_length() -> None:
    counts = MatchCounts()
    fresh = [counts.rate(length) for length in range(MAX_MATCH + 5)]
    assert fresh == sorted(fresh)
    assert all(0.0 <= rate < 1.0 for rate in fresh)
    for _ in range(2000):
        counts.count(3, hit=True)
        counts.count(5, hit=False)
    assert counts.rate(3) > 0.97
    assert counts.rate(5) < 0.03
    assert counts.rate(7) == fresh[7]
    for _ in range(2000):
        counts.count(3, hit=False)
    assert counts.rate(3) < 0.1


def test_a_request_starts_from_what_others_taught() -> None:
    shared = MatchCounts()
    period = NgramIndex([1, 2, 3, 4, 1, 2], shared)
    before = period.propose(3).confidences
    for token in [3, 4, 1, 2] * 30:
        period.propose(1)
        period.push([token])
    assert min(period.propose(3).confidences) > 0.9
    other = NgramIndex([1, 2, 3, 4, 1, 2] * 4, shared).propose(3)
    assert other.confidences[0] > before[0]
    assert len(other.confidences) == len(other.ids) == 3


def test_only_drafts_whose_forerunners_were_right_are_judged() -> None:
    shared = MatchCounts()
    index = NgramIndex([1, 2, 3, 4, 5, 1, 2], shared)
    assert index.propose(3).ids == (3, 4, 5)
    rates = [shared.rate(length) for length in (2, 3, 4)]
    index.push([3, 9, 5])  # right, wrong, and a third that nobody can judge
    after = [shared.rate(length) for length in (2, 3, 4)]
    assert after[0] > rates[0]
    assert after[1] < rates[1]
    assert after[2] == rates[2]
    index.push([1])  # nothing was proposed since
    assert [shared.rate(length) for length in (2, 3, 4)] == after
