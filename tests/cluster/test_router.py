"""The router's choices and its books, in literal numbers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.router.book import Book, RankBook
from headrace.cluster.router.least_load import RouterConfig, choose
from headrace.cluster.router.promise import GROWTH_TOKENS, promised_blocks
from headrace.cluster.router.types import Candidate, ClusterView, PoolView, RankView, RouteQuery
from headrace.transfer.errors import ConfigError, RankError

QUERY = RouteQuery(request_id="q", prompt_tokens=100, max_tokens=28)
FREE = RankView(name="", instance="", free_blocks=10, free_slots=4)
CONFIG = RouterConfig(request_tokens=10)


def view_of(prefill: list[RankView], decode: list[RankView], turn: int = 0) -> ClusterView:
    return ClusterView(
        prefill=PoolView(ranks=tuple(prefill), block_tokens=32),
        decode=PoolView(ranks=tuple(decode), block_tokens=32),
        turn=turn,
    )


def rank(name: str, **known: object) -> RankView:
    return replace(FREE, name=name, instance=name, **known)  # type: ignore[arg-type]


def test_least_queue_and_least_context_win_and_every_candidate_is_explained() -> None:
    view = view_of(
        [
            rank("p0", queued_tokens=50),
            rank("p1", queued_tokens=200, hit_tokens={"host": 64, "device": 96}),
        ],
        [
            rank("d0", context_tokens=300, running_requests=1),
            rank("d1", context_tokens=290, running_requests=3),
        ],
    )
    decision = choose(QUERY, view, CONFIG)
    assert (decision.prefill, decision.decode) == ("p0", "d0")
    assert decision.prefill_candidates == (
        Candidate(rank="p0", cost=150.0, has_room=True),
        Candidate(rank="p1", cost=204.0, has_room=True),
    )
    assert decision.decode_candidates == (
        Candidate(rank="d0", cost=310.0, has_room=True),
        Candidate(rank="d1", cost=320.0, has_room=True),
    )


def test_room_goes_before_load() -> None:
    # 100 + 28 tokens are 4 blocks of 32; prefill needs 4 for the prompt alone
    view = view_of(
        [rank("p0", free_blocks=3), rank("p1", queued_tokens=10_000)],
        [rank("d0", free_slots=0), rank("d1", context_tokens=10_000)],
    )
    decision = choose(QUERY, view, CONFIG)
    assert (decision.prefill, decision.decode) == ("p1", "d1")


def test_a_decode_rank_has_room_for_a_promise_not_for_the_longest_answer() -> None:
    query = replace(QUERY, max_tokens=284)  # 12 blocks at most; 8 with half of the answer
    view = view_of([rank("p0")], [rank("d0", free_blocks=8)])

    def has_room(overcommit: float, free_blocks: int) -> bool:
        decode = replace(view.decode.ranks[0], free_blocks=free_blocks)
        seen = replace(view, decode=replace(view.decode, ranks=(decode,)))
        config = replace(CONFIG, decode_overcommit=overcommit)
        return choose(query, seen, config).decode_candidates[0].has_room

    assert has_room(1.0, 12) and not has_room(1.0, 11)
    assert has_room(2.0, 8) and not has_room(2.0, 7)
    assert has_room(1000.0, 5) and not has_room(1000.0, 4)  # 117 tokens and the block of headroom


@pytest.mark.parametrize("factor", [0.5, 0.0, 1001.0, float("nan")])
def test_an_overcommitment_outside_its_range_is_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match="decode_overcommit"):
        RouterConfig(decode_overcommit=factor)


@given(
    num_prompt=st.integers(1, 500),
    max_tokens=st.integers(1, 500),
    share=st.floats(0.0, 1.0),
    block_tokens=st.sampled_from([2, 16, 128]),
    overcommit=st.floats(1.0, 1000.0),
)
def test_a_promise_covers_what_is_there_and_a_step_ahead_and_never_more_than_the_longest(
    num_prompt: int, max_tokens: int, share: float, block_tokens: int, overcommit: float
) -> None:
    num_output = int(share * max_tokens)
    arguments = (max_tokens, block_tokens, overcommit)
    longest = -(-(num_prompt + max_tokens - 1) // block_tokens)
    promise = promised_blocks(num_prompt, num_output, *arguments)
    assert promise <= longest
    assert promise * block_tokens >= min(
        num_prompt + max_tokens - 1, num_prompt + num_output + GROWTH_TOKENS + block_tokens - 1
    )
    assert promise >= promised_blocks(num_prompt, 0, *arguments)
    assert promised_blocks(num_prompt, num_output, max_tokens, block_tokens, 1.0) == longest


def test_equals_take_turns_from_the_seed_on() -> None:
    view = view_of([rank("p0")], [rank("d0"), rank("d1"), rank("d2")])
    chosen = [choose(QUERY, replace(view, turn=turn), CONFIG).decode for turn in range(4)]
    assert chosen == ["d0", "d1", "d2", "d0"]
    assert choose(QUERY, view, replace(CONFIG, seed=2)).decode == "d2"


def test_dead_ranks_are_no_candidates_and_avoided_ones_come_last() -> None:
    view = view_of(
        [rank("p0", alive=False), rank("p1", queued_tokens=5)],
        [rank("d0"), rank("d1", context_tokens=999)],
    )
    decision = choose(replace(QUERY, avoid=frozenset({"p1", "d0"})), view, CONFIG)
    assert (decision.prefill, decision.decode) == ("p1", "d1")
    assert [candidate.rank for candidate in decision.prefill_candidates] == ["p1"]


def test_a_pool_without_a_living_rank_is_an_error() -> None:
    view = view_of([rank("p0", alive=False), rank("p1", alive=False)], [rank("d0")])
    with pytest.raises(RankError, match=r"^no prefill rank is alive; 2 were started$"):
        choose(QUERY, view, CONFIG)


def book_of() -> Book:
    ranks = [
        RankBook(name=name, instance=name[:2], num_blocks=10, num_slots=4)
        for name in ("p0", "d0.0", "d0.1")
    ]
    return Book(ranks[:1], ranks[1:], block_tokens=32, overcommit=2.0)


def test_an_entry_holds_what_it_was_promised_until_it_is_closed() -> None:
    book = book_of()
    idle = book.view()
    entry = book.open(QUERY, choose(QUERY, idle, CONFIG))
    prefill, decode = book.view().prefill.ranks[0], book.view().decode.ranks[0]
    assert (prefill.queued_tokens, prefill.free_blocks, prefill.free_slots) == (100, 6, 3)
    assert (decode.running_requests, decode.context_tokens, decode.free_blocks) == (1, 100, 6)
    assert not book.is_idle("d0.0")
    assert book.is_idle("d0.1")

    book.offered(entry)
    prefill = book.view().prefill.ranks[0]
    assert (prefill.queued_tokens, prefill.free_blocks) == (0, 6)

    book.grew(entry, 1)
    book.grew(entry, 2)
    prefill, decode = book.view().prefill.ranks[0], book.view().decode.ranks[0]
    assert (prefill.free_blocks, prefill.free_slots) == (10, 4)
    assert decode.context_tokens == 103

    book.close(entry)
    assert book.view() == replace(idle, turn=1)


def test_a_promise_grows_with_the_answer_until_nobody_new_has_room() -> None:
    book = book_of()
    idle = book.view()
    query = replace(QUERY, max_tokens=1000)
    entry = book.open(replace(query, max_tokens=200), choose(QUERY, idle, CONFIG))

    def free() -> int:
        return book.view().decode.ranks[0].free_blocks

    assert free() == 3  # 200 tokens: 7 blocks
    book.grew(entry, 70)
    assert free() == 3  # 170 and 18 ahead: 6 blocks, and headroom
    book.grew(entry, 10)
    assert free() == 2
    book.grew(entry, 120)
    assert free() == 0  # the longest: 299 tokens
    big = book.open(query, choose(QUERY, book.view(), CONFIG))
    assert big.decode is not entry.decode
    book.grew(big, 900)
    assert book.view().decode.ranks[1].free_blocks == 10 - 33
    for open_entry in (entry, big):
        book.close(open_entry)
    assert book.view() == replace(idle, turn=2)


def test_an_entry_that_ends_early_gives_everything_back() -> None:
    book = book_of()
    idle = book.view()
    book.close(book.open(QUERY, choose(QUERY, idle, CONFIG)))
    assert book.view() == replace(idle, turn=1)


def test_an_instance_is_lost_as_a_whole() -> None:
    book = book_of()
    book.lose_instance("d0")
    assert [rank.alive for rank in book.view().decode.ranks] == [False, False]
    assert book.view().prefill.ranks[0].alive
