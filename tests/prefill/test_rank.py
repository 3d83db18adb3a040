"""A prefill rank as its loop and its readers see it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.batch import Logits, Span
from headrace.prefill.config import PrefillConfig
from headrace.prefill.rank import Offered, PrefillFailed
from headrace.tests.fake_network import FakeNetwork
from headrace.transfer.checksum import verify
from headrace.transfer.errors import (
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    PromptTooLongError,
)
from headrace.transfer.messages import LeaseAlive, LeaseGone
from headrace.transfer.request import Request, SamplingParams

from .conftest import Bench, prompt


def with_logprobs(request: Request, number: int) -> Request:
    return replace(request, sampling=SamplingParams(prompt_logprobs=number))


def test_a_prompt_becomes_a_handoff_with_all_but_its_last_row(bench: Bench) -> None:
    bench.rank.submit(prompt("a", 14))
    assert bench.turn() == []
    (span,) = bench.network.spans
    assert (span.start, len(span.token_ids), span.history, span.logits) == (0, 8, (), Logits.NONE)
    bench.now += 5
    (event,) = bench.turn()
    (span,) = bench.network.spans
    ids = prompt("a", 14).prompt_ids
    assert (span.start, span.token_ids, span.history) == (8, ids[8:13], ids[5:8])
    assert isinstance(event, Offered)
    assert (event.prefill_started, event.offered) == (1000.0, 1005.0)
    handoff = event.handoff
    assert (handoff.num_tokens, len(handoff.blocks)) == (13, 4)
    assert handoff.block_checksums and handoff.incarnation == bench.backend.incarnation
    verify(
        bench.network.cache.layout,
        bench.network.cache.blocks,
        handoff.blocks,
        bench.network.cache.slots,
        handoff.slot,
        13,
        handoff.block_checksums,
        handoff.slot_checksum,
    )
    assert not bench.rank.has_work


def test_tail_start_counts_from_the_end_of_the_whole_prompt(bench: Bench) -> None:
    keep = bench.network.cache.layout.keep
    bench.rank.submit(prompt("a", keep + 9))
    bench.turn()
    assert bench.network.spans[0].tail_start == 9
    bench.rank.submit(prompt("b", 3))
    bench.turn()
    assert [(span.start, span.tail_start) for span in bench.network.spans] == [(8, 9), (0, 0)]
    bench.run()


def test_prompt_logprobs_run_all_rows_through_all_layers(bench: Bench) -> None:
    request = with_logprobs(prompt("a", bench.network.cache.layout.keep + 12), 3)
    ids, other = request.prompt_ids, prompt("b", 6)
    bench.rank.submit(request)
    bench.rank.submit(other)
    bench.rank.submit(with_logprobs(prompt("c", 5), 0))
    events = {event.request_id: event for event in bench.run() if isinstance(event, Offered)}
    found = events["a"].prompt_logprobs

    whole = Span(
        token_ids=ids[:-1],
        start=0,
        history=(),
        slot=1,
        blocks=tuple(range(1, 12)),
        tail_start=0,
        logits=Logits.ALL,
    )
    logits = FakeNetwork().forward([whole]).double().log_softmax(dim=-1)
    assert len(found) == len(ids) - 1
    for row, entry in enumerate(found):
        assert entry.logprob == pytest.approx(float(logits[row, ids[row + 1]]), abs=1e-9)
        assert entry.rank == 1 + int((logits[row] > logits[row, ids[row + 1]]).sum())
        top = logits[row].topk(3)
        assert entry.likeliest.ids == tuple(top.indices.tolist())
        assert entry.likeliest.logprobs == pytest.approx(top.values.tolist(), abs=1e-9)
    assert events["b"].prompt_logprobs == ()
    assert [entry.likeliest.ids for entry in events["c"].prompt_logprobs] == [()] * 4


def test_prompt_logprobs_of_one_token_are_none(bench: Bench) -> None:
    bench.rank.submit(with_logprobs(prompt("a", 1), 3))
    (event,) = bench.run()
    assert isinstance(event, Offered) and event.prompt_logprobs == ()


def test_sampling_ids_beyond_the_vocabulary_are_refused(bench: Bench) -> None:
    size = bench.network.config.vocab_size
    for name, params in (
        ("logit_bias id", SamplingParams(logit_bias=((3, 1.0), (size, 1.0)))),
        ("stop_token_ids id", SamplingParams(stop_token_ids=(size,))),
    ):
        with pytest.raises(InvalidRequestError, match=f"{name} = {size} .* from 0 to {size - 1}"):
            bench.rank.submit(replace(prompt("a", 5), sampling=params))
    assert not bench.rank.has_work


def test_a_prompt_of_one_token_is_offered_at_once_with_a_cleared_slot(bench: Bench) -> None:
    bench.network.cache.slots.fill_(255)
    handoff = bench.offer(prompt("one", 1))
    assert (handoff.num_tokens, handoff.blocks, handoff.block_checksums) == (0, (), ())
    assert not bench.network.cache.slots[handoff.slot].any()


def test_a_reused_slot_is_cleared(bench: Bench) -> None:
    for name in ("a", "b", "c", "d", "e", "f"):  # the fake network refuses a slot with a past
        handoff = bench.offer(prompt(name, 9))
        assert handoff.num_tokens == 8
        bench.release(handoff)


def test_blocks_stay_until_the_reader_releases_them(bench: Bench) -> None:
    handoff = bench.offer(prompt("a", 40))  # 10 of 12 blocks
    bench.rank.submit(prompt("b", 40))
    assert bench.turn() == [] and not bench.rank.has_work, "waiting for memory is no work"
    assert isinstance(bench.confirm(handoff), LeaseAlive)
    before = bench.network.cache.blocks[list(handoff.blocks)].clone()
    bench.turn()
    assert torch.equal(bench.network.cache.blocks[list(handoff.blocks)], before)
    bench.release(handoff)
    bench.release(handoff)  # doubled: frees nothing twice
    (event,) = bench.run()
    assert isinstance(event, Offered) and event.request_id == "b"
    gone = bench.confirm(handoff, nonce=9)
    assert isinstance(gone, LeaseGone) and gone.nonce == 9


def test_a_lease_that_ends_frees_its_blocks(bench: Bench) -> None:
    handoff = bench.offer(prompt("a", 40))
    bench.now += bench.config.lease_s
    assert isinstance(bench.confirm(handoff), LeaseGone)
    assert bench.rank.stats()["leases_expired"] == 1
    assert bench.rank.stats()["free_blocks"] == 12


def test_only_the_very_lease_is_confirmed(bench: Bench) -> None:
    handoff = bench.offer(prompt("a", 9))
    assert isinstance(bench.confirm(handoff, generation=handoff.generation + 1), LeaseGone)
    assert isinstance(bench.confirm(handoff, incarnation="another"), LeaseGone)
    assert isinstance(bench.confirm(handoff, request_id="b"), LeaseGone)
    assert isinstance(bench.confirm(handoff, lease_id="none"), LeaseGone)
    assert isinstance(bench.confirm(handoff), LeaseAlive)


def test_the_same_request_may_be_prefilled_again_while_its_first_offer_lives(bench: Bench) -> None:
    first = bench.offer(prompt("a", 9))
    second = bench.offer(prompt("a", 9))
    assert second.generation > first.generation
    assert first.blocks == second.blocks, "its two blocks are whole, and found"
    assert first.slot != second.slot
    assert first.block_checksums == second.block_checksums
    bench.rank.cancel("a")
    assert isinstance(bench.confirm(first), LeaseGone)
    assert isinstance(bench.confirm(second), LeaseGone)


@pytest.mark.parametrize("turns", [0, 1, 2, 9])
def test_cancel_frees_everything_in_every_state(bench: Bench, turns: int) -> None:
    bench.rank.submit(prompt("a", 20))
    bench.rank.submit(prompt("b", 3))
    for _ in range(turns):
        bench.turn()
    bench.rank.cancel("a")
    bench.rank.cancel("a")
    events = bench.run()
    assert "a" not in [event.request_id for event in events]
    bench.rank.cancel("b")
    assert bench.rank.stats()["free_blocks"] == 12


def test_what_can_never_work_is_refused_and_hurts_nobody() -> None:
    bench = Bench(network=FakeNetwork(context=60))
    bench.rank.submit(prompt("good", 9))
    with pytest.raises(PromptTooLongError, match=r"60 tokens leaves no room .* context of 60"):
        bench.rank.submit(prompt("long", 60))
    with pytest.raises(PromptTooLongError, match=r"55 tokens needs 14 blocks .* has 12"):
        bench.rank.submit(prompt("big", 55))
    with pytest.raises(InvalidRequestError, match="prompt_ids hold 512"):
        bench.rank.submit(Request(request_id="x", prompt_ids=(1, 512)))
    with pytest.raises(InvalidRequestError, match="'good' is not allowed"):
        bench.rank.submit(prompt("good", 2))
    (event,) = bench.run()
    assert event.request_id == "good"
    bench.assert_empty()


def test_a_prompt_that_waits_too_long_fails_by_phase() -> None:
    bench = Bench(config=PrefillConfig(lease_s=1000.0, queue_timeout_s=60.0))
    bench.offer(prompt("a", 48))  # all blocks, for as long as the lease
    bench.rank.submit(prompt("b", 40))
    bench.now += 60
    assert bench.turn() == []
    bench.rank.submit(prompt("c", 1))
    bench.now += 1
    failed, offered = bench.run()
    assert isinstance(failed, PrefillFailed) and failed.request_id == "b"
    assert isinstance(failed.error, DeadlineError) and "prefill queue" in str(failed.error)
    assert isinstance(offered, Offered) and offered.request_id == "c"
    bench.assert_empty()


def test_messages_that_are_none_are_counted_and_dropped(bench: Bench) -> None:
    bench.reader.send("prefill", b"\x00nonsense")
    bench.turn()
    assert bench.rank.stats()["bad_messages"] == 1


@pytest.mark.parametrize(
    "wrong", [{"chunk_tokens": 0}, {"lease_s": 0.0}, {"lease_s": 1e9}, {"queue_timeout_s": -1.0}]
)
def test_a_wrong_limit_is_named(wrong: dict[str, float]) -> None:
    (name, value) = next(iter(wrong.items()))
    with pytest.raises(ConfigError, match=f"{name} = {value}"):
        PrefillConfig(**wrong)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), lengths=st.lists(st.integers(1, 45), min_size=1, max_size=8))
def test_nothing_is_lost_or_freed_twice(data: st.DataObject, lengths: list[int]) -> None:
    bench = Bench(config=PrefillConfig(chunk_tokens=data.draw(st.integers(1, 20)), lease_s=10.0))
    cancelled = set[str]()
    for name, length in enumerate(lengths):
        bench.rank.submit(prompt(str(name), length))
    for _ in range(12):
        bench.turn()
        handoffs = [event.handoff for event in bench.events if isinstance(event, Offered)]
        match data.draw(st.sampled_from(["nothing", "release", "cancel", "time"])):
            case "release" if handoffs:
                bench.release(data.draw(st.sampled_from(handoffs)))
            case "cancel":
                cancelled.add(name := str(data.draw(st.integers(0, len(lengths) - 1))))
                bench.rank.cancel(name)
            case "time":
                bench.now += 4
            case _:
                pass
        bench.rank.check_integrity()
    for _ in range(len(lengths)):
        bench.now += 20
        bench.run()
    ended = [event.request_id for event in bench.events]
    assert len(set(ended)) == len(ended)
    assert set(ended) | cancelled == {str(name) for name in range(len(lengths))}
    for event in bench.events:
        assert isinstance(event, Offered)
        assert event.handoff.num_tokens == lengths[int(event.request_id)] - 1
    bench.assert_empty()


def test_a_prompt_past_its_deadline_is_given_up_wherever_it_is(bench: Bench) -> None:
    for name in ("a", "b"):
        bench.rank.submit(replace(prompt(name, 40), deadline_s=5.0))
    bench.turn()
    assert (bench.rank.stats()["running"], bench.rank.stats()["queued"]) == (1, 1)
    bench.rank.submit(replace(prompt("c", 9), deadline_s=50.0))
    bench.now += 5.5
    events = bench.run()
    failures = {event.request_id: event for event in events if isinstance(event, PrefillFailed)}
    assert failures.keys() == {"a", "b"}
    for failure in failures.values():
        assert isinstance(failure.error, DeadlineError)
        assert "5.5 s after its arrival, deadline_s = 5 of the request is over" in str(
            failure.error
        )
    assert [event.request_id for event in events if isinstance(event, Offered)] == ["c"]


def test_prompts_of_a_higher_priority_run_first(bench: Bench) -> None:
    bench.rank.submit(prompt("a", 30))
    bench.turn()
    bench.rank.submit(replace(prompt("b", 9), priority=5))
    (offered,) = bench.turn()
    assert offered.request_id == "b"
    assert [span.start for span in bench.network.spans] == [0], "nothing of a ran beside it"
    bench.run()


@pytest.mark.parametrize(
    "wrong", [{"priority": 101}, {"priority": -101}, {"deadline_s": 0.0}, {"deadline_s": -1.0}]
)
def test_a_wrong_priority_or_deadline_is_named(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match=f"{next(iter(wrong))} = "):
        replace(prompt("a", 3), **wrong)
