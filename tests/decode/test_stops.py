"""Where answers end, and that no part of a stop string is ever shown."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.decode.stops import StopChecker, visible_text
from headrace.model.detokenizer import IncrementalDecoder
from headrace.transfer.request import SamplingParams

EOS = 1
PIECES = [b"", b"", b"a", b"b", b"ab", b"c", b"", b"\xc3", b"\xa9", "é".encode(), b"bca"]


def end(ids: list[int], limit: int = 99, **params: object) -> tuple[int, str | None]:
    asked = SamplingParams(max_tokens=99, **params)  # type: ignore[arg-type]
    return StopChecker(asked, EOS, limit, PIECES).push(ids)


def test_ids_end_an_answer() -> None:
    assert end([2, 3, EOS, 4]) == (3, "stop")
    assert end([2, 3, EOS, 4], ignore_eos=True) == (4, None)
    assert end([2, 3, 5, EOS], stop_token_ids=(5, 9)) == (3, "stop")
    assert end([2, EOS, 5, 2], stop_token_ids=(5, 9), ignore_eos=True) == (3, "stop")


def test_length_ends_an_answer_unless_something_else_does() -> None:
    assert end([2, 3, 3, 3], limit=3) == (3, "length")
    assert end([2, 3, EOS], limit=3) == (3, "stop")
    assert end([2, 3, 5], limit=3, stop=("c",)) == (3, "stop")


@pytest.mark.parametrize(
    ("ids", "stop", "count"),
    [
        ([2, 3, 5, 2], "abc", 3),
        ([2, 4, 5, 2], "abc", 3),  # a ab c
        ([2, 2, 10, 2], "abc", 3),  # within the last token: a a bca
        ([2, 6, 3, 6, 5], "abc", 5),  # tokens without text between them
        ([7, 8, 2], "é", 2),  # half characters
        ([7, 2, 9], "é", 3),
        ([2, 3, 2, 3, 5], "ababc", 5),  # begins twice
        ([2, 2, 2], "b", None),
    ],
)
def test_stop_strings_span_tokens(ids: list[int], stop: str, count: int | None) -> None:
    wanted = (len(ids), None) if count is None else (count, "stop")
    assert end(ids, stop=("zzzz", stop)) == wanted
    asked = SamplingParams(stop=("zzzz", stop))
    one_by_one = StopChecker(asked, EOS, 99, PIECES)
    answers = [one_by_one.push([token])[1] for token in ids[: wanted[0]]]
    assert answers == [None] * (wanted[0] - 1) + [wanted[1]]


def test_nothing_ends_an_answer_within_min_tokens() -> None:
    assert end([2, EOS, 5, 2], min_tokens=3, stop_token_ids=(5,)) == (4, None)
    assert end([2, 3, 5, 2, EOS], min_tokens=3) == (5, "stop")
    assert end([4, 2, 2, 4, 2], min_tokens=3, stop=("ab", "xxxxxxxx")) == (4, "stop")
    assert end([4, 2, 2, 2, 2], min_tokens=3, stop=("ab", "xxxxxxxx")) == (5, None)
    assert end([2, 2, 2, 3, 2], min_tokens=3, stop=("ab",)) == (4, "stop")  # across the border
    assert end([2, 2, 2], limit=2, min_tokens=2) == (2, "length")


def test_the_cut() -> None:
    assert visible_text("one STOP two", ("STOP",), True) == "one "
    assert visible_text("one STOP two", ("STOP",), True, include_stop=True) == "one STOP"
    assert visible_text("one ST", ("STOP",), False) == "one "
    assert visible_text("one ST", ("STOP",), True) == "one ST"
    assert visible_text("xabcd", ("bc", "abcd"), True) == "xa"  # bc is complete first
    assert visible_text("xabc", ("bc", "abc"), True) == "x"  # together: the longer one
    assert visible_text("ab ab", ("ab",), True, begin=2) == "ab "
    assert visible_text("abab", ("aba",), True, begin=2) == ""
    assert visible_text("plain", (), False) == "plain"


TEXT = st.text(alphabet="abc", max_size=24)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=3).map(tuple)


@settings(max_examples=300, deadline=None)
@given(text=TEXT, stops=STOPS, begin=st.integers(0, 6), include=st.booleans())
def test_streams_show_no_part_of_a_stop_and_never_take_back(
    text: str, stops: tuple[str, ...], begin: int, include: bool
) -> None:
    shown = ""
    final = visible_text(text, stops, True, include, begin)
    for length in range(len(text) + 1):
        now = visible_text(text[:length], stops, False, include, begin)
        assert now.startswith(shown) and final.startswith(now)
        shown = now
    assert final == text or any(
        text.startswith(stop, len(final) - len(stop) * include) for stop in stops
    )
    if not include and not begin:
        assert not any(stop in final for stop in stops)


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(2, 10), max_size=20),
    stops=STOPS,
    cuts=st.lists(st.integers(0, 20), max_size=5),
    min_tokens=st.integers(0, 5),
)
def test_an_answer_ends_with_the_token_that_completes_its_text(
    ids: list[int], stops: tuple[str, ...], cuts: list[int], min_tokens: int
) -> None:
    params = SamplingParams(max_tokens=99, stop=stops, min_tokens=min_tokens)
    checker = StopChecker(params, EOS, 99, PIECES)
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    done, reason = 0, None
    for first, last in pairwise(edges):
        count, reason = checker.push(ids[first:last])
        done += count
        if reason is not None:
            break

    def text(number: int) -> str:
        return IncrementalDecoder(PIECES, frozenset()).push(ids[:number])

    begin = len(text(min_tokens))
    whole = [
        n
        for n in range(len(ids) + 1)
        if visible_text(text(n), stops, True, False, begin) != text(n)
    ]
    assert (done, reason) == ((whole[0], "stop") if whole else (len(ids), None))
