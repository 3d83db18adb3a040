"""A decode rank, fed by a prefill rank over loopback: what it delivers and when it lets go."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.decode.config import DecodeConfig
from headrace.decode.events import DecodeFailed, Tokens
from headrace.prefill.config import PrefillConfig
from headrace.tests.fake_network import FakeNetwork
from headrace.transfer.errors import (
    ConfigError,
    CorruptBlockError,
    InvalidRequestError,
    LayoutMismatchError,
    LeaseExpiredError,
    PeerLostError,
    PromptTooLongError,
    RankError,
    TransferError,
)

from .conftest import Pair, make_request, plain_loop


def big_network() -> FakeNetwork:
    return FakeNetwork(num_blocks=40, num_slots=9)


@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
def test_tokens_equal_those_of_one_process(chunk: int) -> None:
    pair = Pair(big_network, PrefillConfig(chunk_tokens=chunk), DecodeConfig(max_batch=8))
    requests = [
        make_request(f"r{length}", length, temperature=0.8 * (length % 2), seed=length)
        for length in (1, 2, 3, 9, 16, 17, 30)
    ]
    for request in requests:
        pair.start(request)
    pair.run()
    assert pair.decode.stats()["bytes_read"] > 0
    for request in requests:
        assert pair.tokens[request.request_id] == plain_loop(big_network(), request)
    pair.assert_empty()


def test_a_request_joins_a_running_batch_and_leaves_it(pair: Pair) -> None:
    pair.start(make_request("a", 5, max_tokens=6))
    for _ in range(3):
        pair.turn()
    pair.start(make_request("b", 6, max_tokens=2))
    pair.run()
    assert [len(pair.tokens[name]) for name in "ab"] == [6, 2]
    assert pair.decode.stats()["tokens"] == 8


def test_the_timeline() -> None:
    pair = Pair(decode_config=DecodeConfig(max_batch=3, overlap=False))
    pair.start(make_request("a", 5, max_tokens=3))
    while "a" not in pair.last:
        pair.now += 1
        pair.turn()
    first = pair.now
    assert pair.last["a"].finish_reason is None
    pair.now += 10
    pair.turn()
    pair.now += 10
    pair.turn()
    last = pair.last["a"]
    assert (last.admitted, last.first_token, last.last_token) == (first, first, first + 20)
    assert last.finish_reason == "length"


def test_eos_ends_an_answer_unless_it_is_ignored(pair: Pair) -> None:
    request = make_request("a", 5, max_tokens=5)
    ids = plain_loop(FakeNetwork(), request)
    eos = ids[2]
    object.__setattr__(pair.decode_network.config, "eos_token_id", eos)
    pair.start(make_request("a", 5, max_tokens=5, ignore_eos=False))
    pair.start(make_request("b", 5, max_tokens=5))
    pair.run()
    assert pair.tokens["a"] == ids[: ids.index(eos) + 1]
    assert pair.last["a"].finish_reason == "stop"
    assert len(pair.tokens["b"]) == 5


def test_the_context_ends_an_answer() -> None:
    pair = Pair(lambda: FakeNetwork(context=12))
    pair.start(make_request("a", 9, max_tokens=50))
    pair.run()
    assert len(pair.tokens["a"]) == 3 and pair.last["a"].finish_reason == "length"
    pair.assert_empty()


def test_top_logprobs_come_with_every_token(pair: Pair) -> None:
    pair.start(make_request("a", 5, max_tokens=1, top_logprobs=3))
    pair.start(make_request("b", 5, max_tokens=1))
    pair.run()
    (top,) = pair.last["a"].top_logprobs
    assert top.ids[0] == pair.tokens["a"][0] and len(top.ids) == 3
    assert pair.last["b"].top_logprobs == ()


def test_what_can_never_fit_is_refused_at_once(pair: Pair) -> None:
    request = make_request("a", 9, max_tokens=41)
    handoff = pair.offer(request)
    with pytest.raises(PromptTooLongError, match=r"9 tokens .* up to 41 needs 13 blocks .* has 12"):
        pair.decode.submit(request, handoff)
    pair.prefill.cancel("a")


def test_an_id_in_use_is_refused_and_hurts_nobody(pair: Pair) -> None:
    request = make_request("a", 9)
    handoff = pair.start(request)
    for _ in range(4):
        with pytest.raises(InvalidRequestError, match="'a' is not allowed"):
            pair.decode.submit(request, handoff)
        pair.turn()
    pair.run()
    assert len(pair.tokens["a"]) == 5


def test_the_batch_and_the_memory_bound_who_enters(pair: Pair) -> None:
    for name in "abcd":
        pair.prefill.pump()
        pair.start(make_request(name, 2, max_tokens=4))
    seen = 0
    for _ in range(30):
        pair.turn()
        stats = pair.decode.stats()
        seen = max(seen, stats["running"] + stats["transferring"])
    assert seen == 3 and len(pair.tokens) == 4


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("slow_polls", [0, 3])
def test_cancel_frees_everything_in_every_state(pair: Pair, turns: int, slow_polls: int) -> None:
    pair.hub.faults.polls_before_copy = slow_polls
    pair.start(make_request("a", 9))
    pair.start(make_request("b", 9))
    for _ in range(turns):
        pair.turn()
    pair.decode.cancel("a")
    pair.decode.cancel("a")
    delivered = pair.tokens.get("a", ())
    pair.run()
    assert pair.tokens.get("a", ()) == delivered and "a" not in pair.failures
    assert pair.tokens["b"] == plain_loop(FakeNetwork(), make_request("b", 9))


def test_memory_that_is_being_written_is_not_given_away(pair: Pair) -> None:
    pair.hub.faults.polls_before_copy = 4
    pair.start(make_request("a", 9))
    pair.turn()
    pair.decode.cancel("a")
    stats = pair.decode.stats()
    assert (stats["draining"], stats["free_slots"]) == (1, 3)
    pair.start(make_request("a", 9))  # the same id again, while the old read runs on
    pair.run()
    assert pair.tokens["a"] == plain_loop(FakeNetwork(), make_request("a", 9))


def test_a_corrupt_block_fails_its_request_only(pair: Pair) -> None:
    pair.start(make_request("a", 9))
    pair.turn()
    pair.hub.faults.corrupt_next_copies = 1
    pair.turn()
    pair.start(make_request("b", 9))
    pair.run()
    assert isinstance(pair.failures["a"].error, CorruptBlockError)
    assert "a" not in pair.tokens and len(pair.tokens["b"]) == 5
    assert pair.decode.stats()["failed"] == 1
    pair.start(make_request("a", 9))  # prefilled again
    pair.run()
    assert pair.tokens["a"] == plain_loop(FakeNetwork(), make_request("a", 9))


def test_a_stale_handoff_is_never_sampled(pair: Pair) -> None:
    request = make_request("a", 9)
    handoff = pair.start(request)
    pair.run()
    for name in ("x", "y", "z"):  # others move into the released blocks
        pair.start(make_request(name, 12))
        pair.run()
    pair.tokens.clear()
    pair.decode.submit(request, handoff)
    pair.run()
    assert isinstance(pair.failures["a"].error, LeaseExpiredError)
    assert pair.tokens == {}


def test_a_lease_that_ends_during_the_read_fails() -> None:
    pair = Pair(prefill_config=PrefillConfig(chunk_tokens=8, lease_s=5.0))
    pair.hub.faults.polls_before_copy = 2
    pair.start(make_request("a", 9))
    pair.turn()
    pair.now += 5
    pair.run()
    assert isinstance(pair.failures["a"].error, LeaseExpiredError)
    pair.assert_decode_empty()
    assert pair.prefill.stats()["leases_expired"] == 1


def test_waiting_past_the_lease_fails_without_a_read() -> None:
    pair = Pair(
        prefill_config=PrefillConfig(chunk_tokens=8, lease_s=5.0),
        decode_config=DecodeConfig(max_batch=1),
    )
    pair.start(make_request("a", 9, max_tokens=30))
    pair.turn()
    read = pair.decode.stats()["bytes_read"]
    pair.start(make_request("b", 9, max_tokens=30))
    pair.turn()
    pair.now += 5
    pair.turn()
    assert isinstance(pair.failures["b"].error, LeaseExpiredError)
    assert pair.decode.stats()["bytes_read"] == read


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"layout_fingerprint": "other"}, LayoutMismatchError),
        ({"incarnation": "other"}, PeerLostError),
        ({"holder": "stranger"}, PeerLostError),
        ({"request_id": "b"}, TransferError),
        ({"num_tokens": 7}, TransferError),
        ({"blocks": (1, 2)}, TransferError),
        ({"blocks": (1, 2, 10**6)}, TransferError),
        ({"slot": 10**6}, TransferError),
        ({"generation": 99}, LeaseExpiredError),
        ({"lease_id": "other"}, LeaseExpiredError),
        ({"slot_checksum": 1}, CorruptBlockError),
        ({"block_checksums": (1, 2, 3)}, CorruptBlockError),
    ],
)
def test_a_handoff_that_is_wrong_in_one_field(
    pair: Pair, changed: dict[str, object], error: type[TransferError]
) -> None:
    pair.start(make_request("a", 10), **changed)
    pair.run()
    assert type(pair.failures["a"].error) is error
    assert pair.tokens == {}
    pair.prefill.cancel("a")


def test_a_lost_answer_fails_by_phase(pair: Pair) -> None:
    pair.start(make_request("a", 9))
    pair.turn()
    pair.hub.faults.lose_next_messages = 1
    pair.turn()
    pair.now += pair.decode_config.confirm_timeout_s + 1
    pair.turn()
    error = pair.failures["a"].error
    assert isinstance(error, PeerLostError) and "phase confirm" in str(error)


def test_a_slow_read_fails_by_phase_and_keeps_its_memory_to_the_end(pair: Pair) -> None:
    pair.hub.faults.polls_before_copy = 3
    pair.start(make_request("a", 9))
    pair.turn()
    pair.now += pair.decode_config.transfer_timeout_s + 1
    pair.turn()
    error = pair.failures["a"].error
    assert isinstance(error, PeerLostError) and "phase read" in str(error)
    assert pair.decode.stats()["draining"] == 1


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_dead_holder_fails_its_arrivals_only(turns: int) -> None:
    pair = Pair()
    pair.hub.faults.polls_before_copy = 1
    pair.start(make_request("running", 5, max_tokens=20))
    for _ in range(6):
        pair.turn()
    pair.start(make_request("a", 9))
    for _ in range(turns):
        pair.turn()
    pair.hub.drop("prefill")
    pair.run()
    assert isinstance(pair.failures["a"].error, PeerLostError)
    assert len(pair.tokens["running"]) == 20
    pair.assert_decode_empty()


def test_a_holder_that_was_restarted_is_another_one() -> None:
    pair = Pair()
    old = pair.offer(make_request("a", 9))
    pair.prefill_backend = pair.join("prefill", pair.prefill_network)
    pair.connect()
    pair.decode.submit(make_request("a", 9), old)
    pair.run()
    assert isinstance(pair.failures["a"].error, PeerLostError)
    pair.assert_decode_empty()


def test_logits_that_are_no_numbers_fail_their_row_only(pair: Pair) -> None:
    assert isinstance(pair.decode_network, FakeNetwork)
    pair.decode_network.poisoned.add(9)
    pair.start(make_request("a", 9))
    pair.start(make_request("b", 2))
    pair.run()
    assert len(pair.tokens["a"]) == 1 and isinstance(pair.failures["a"].error, RankError)
    assert len(pair.tokens["b"]) == 5


def test_an_idle_rank_steps_with_zero_rows(pair: Pair) -> None:
    assert not pair.decode.outlook[0]
    assert pair.decode.step() == []
    assert pair.prefill.step() == []


@pytest.mark.parametrize(
    "wrong", [{"max_batch": 0}, {"transfer_timeout_s": 0.0}, {"confirm_timeout_s": float("inf")}]
)
def test_a_wrong_limit_is_named(wrong: dict[str, float]) -> None:
    (name, value) = next(iter(wrong.items()))
    with pytest.raises(ConfigError, match=f"{name} = {value}"):
        DecodeConfig(**wrong)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_nothing_is_lost_leaked_or_changed_under_faults(data: st.DataObject) -> None:
    pair = Pair()
    requests = {
        name: make_request(
            name,
            data.draw(st.integers(1, 20)),
            max_tokens=data.draw(st.integers(1, 5)),
            temperature=data.draw(st.sampled_from([0.0, 1.0])),
        )
        for name in "abcdef"
    }
    cancelled = set[str]()
    todo = list(requests)
    for _ in range(40):
        action = data.draw(
            st.sampled_from(["start"] * 4 + ["cancel", "corrupt", "lose", "time", "slow"])
        )
        if action == "start" and todo and pair.prefill.stats()["free_blocks"] >= 5:
            if pair.prefill.stats()["free_slots"]:
                pair.start(requests[todo.pop(0)])
        elif action == "cancel":
            cancelled.add(name := data.draw(st.sampled_from(sorted(requests))))
            pair.decode.cancel(name)
        elif action == "corrupt":
            pair.hub.faults.corrupt_next_copies = 1
        elif action == "lose":
            pair.hub.faults.lose_next_messages = 1
        elif action == "time":
            pair.now += 15
        elif action == "slow":
            pair.hub.faults.polls_before_copy = data.draw(st.integers(0, 3))
        pair.turn()
    pair.now += 100
    pair.run()
    pair.now += 100
    pair.turn()
    pair.assert_decode_empty()
    assert pair.prefill.stats()["offered"] == 0
    for name in set(requests) - set(todo):
        if name in pair.failures:
            assert isinstance(pair.failures[name], DecodeFailed)
            assert isinstance(pair.failures[name].error, TransferError)
            assert name not in pair.tokens
        elif name not in cancelled:
            assert isinstance(pair.last[name], Tokens) and pair.last[name].finish_reason
            assert pair.tokens[name] == plain_loop(FakeNetwork(), requests[name])
