"""What the planner may run while it knows less than the device."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.decode.planner import cached_tokens, max_drafts, replay_chunks


def test_drafts_never_reach_beyond_the_limit() -> None:
    assert max_drafts(100, 5) == 5
    assert max_drafts(3, 5) == 2
    assert max_drafts(1, 5) == 0
    assert max_drafts(0, 5) is None, "what is in flight may end it"


@given(
    st.integers(1, 50),
    st.integers(1, 60),
    st.integers(0, 6),
    st.lists(st.integers(0, 6), max_size=60),
)
def test_every_answer_ends_within_its_limit_and_its_blocks(
    num_prompt: int, limit: int, drafts: int, accepted: list[int]
) -> None:
    known = in_flight = 0
    flights: list[int] = []
    for luck in accepted + [0] * 3 * limit:
        planned = max_drafts(limit - known - in_flight, drafts)
        if planned is not None:
            assert cached_tokens(num_prompt + known, in_flight, planned) <= num_prompt + limit - 1
            flights.append(planned)
            in_flight += 1 + planned
        if len(flights) == 2 or planned is None:
            first = flights.pop(0)
            in_flight -= 1 + first
            known += 1 + min(first, luck)
        if known == limit:
            break
    assert known == limit


def test_replays_share_the_budget_in_order() -> None:
    assert replay_chunks([100, 30, 5], [90, 0, 0], 25) == [10, 15, 0]
    assert replay_chunks([], [], 25) == []
