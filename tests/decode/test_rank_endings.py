"""Ends and logprobs of answers on a rank that speculates: those of a plain loop, whatever was drafted beyond them."""

import pytest
import torch

from headrace.decode.config import DecodeConfig
from headrace.decode.events import Tokens
from headrace.decode.speculation_config import SpeculationConfig
from headrace.model.batch import Logits, Span
from headrace.tests.fake_network import FakeDrafter, FakeNetwork
from headrace.transfer.errors import InvalidRequestError
from headrace.transfer.request import Request

from .conftest import Pair, make_request, plain_loop

PIECES = [b"", b"", *(f"<{token}".encode() for token in range(2, 600))]
NUM_TOKENS = 24


def answer(request: Request, *, drafter: bool, overlap: bool) -> Pair:
    """The request on a rank whose drafter knows what it answers if nothing ends it."""
    endless = make_request(request.request_id, len(request.prompt_ids), max_tokens=NUM_TOKENS)
    known = [(len(endless.prompt_ids), plain_loop(FakeNetwork(), endless))]

    def make() -> FakeNetwork:
        network = FakeNetwork()
        if drafter:
            network.drafter = FakeDrafter(network.config.vocab_size, known)
        return network

    config = DecodeConfig(
        max_batch=2,
        overlap=overlap,
        speculation=SpeculationConfig(proposer="auto" if drafter else "off", schedule="fixed"),
    )
    pair = Pair(make, decode_config=config, make_prefill_network=FakeNetwork, pieces=PIECES)
    pair.start(request)
    pair.run()
    pair.turn()  # a step that was launched before the end was known
    pair.assert_empty()
    pair.decode.close()
    assert not pair.failures
    return pair


@pytest.mark.parametrize("drafter", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("place", [0, 1, 4, 9, 14])
@pytest.mark.parametrize("kind", ["stop", "id", "spread"])
def test_a_stop_ends_the_answer_where_it_does_without_drafts(
    kind: str, place: int, overlap: bool, drafter: bool
) -> None:
    ids = plain_loop(FakeNetwork(), make_request("a", 6, max_tokens=NUM_TOKENS))
    text = "".join(PIECES[token].decode() for token in ids[: place + 1])
    endings: dict[str, dict[str, object]] = {
        "stop": {"stop": ("zzz", PIECES[ids[place]].decode())},
        "id": {"stop_token_ids": (511, ids[place])},
        "spread": {"stop": (text[-7:],)},
    }
    request = make_request("a", 6, max_tokens=NUM_TOKENS, logprobs=True, **endings[kind])
    wanted = plain_loop(FakeNetwork(), request, pieces=PIECES)
    assert len(wanted) <= place + 1
    pair = answer(request, drafter=drafter, overlap=overlap)
    assert (pair.tokens["a"], pair.last["a"].finish_reason) == (wanted, "stop")


@pytest.mark.parametrize("overlap", [False, True])
def test_logprobs_belong_to_the_tokens_though_drafts_were_refused(overlap: bool) -> None:
    request = make_request(
        "a",
        6,
        max_tokens=NUM_TOKENS,
        temperature=1.3,
        logprobs=True,
        top_logprobs=2,
        prompt_logprobs=1,
    )
    pair = Pair(
        decode_config=DecodeConfig(
            max_batch=2, overlap=overlap, speculation=SpeculationConfig(proposer="ngram")
        )
    )
    pair.start(request)
    found: list[float] = []
    for _ in range(3 * NUM_TOKENS):
        for event in pair.turn():
            assert isinstance(event, Tokens)
            assert len(event.logprobs) == len(event.top_logprobs) == len(event.ids)
            found += event.logprobs
    ids = pair.tokens["a"]
    assert ids == plain_loop(FakeNetwork(), request)
    span = Span(
        token_ids=(*request.prompt_ids, *ids[:-1]),
        start=0,
        history=(),
        slot=1,
        blocks=tuple(range(1, 12)),
        tail_start=0,
        logits=Logits.ALL,
    )
    rows = FakeNetwork().forward([span])[len(request.prompt_ids) - 1 :].double().log_softmax(-1)
    exact = rows[torch.arange(len(ids)), torch.tensor(ids)].tolist()
    assert found == pytest.approx(exact, abs=1e-9)
    pair.decode.close()


def test_a_stop_string_without_a_tokenizer_is_refused(pair: Pair) -> None:
    request = make_request("a", 6, stop=("x",))
    handoff = pair.offer(request)
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        pair.decode.submit(request, handoff)
    pair.prefill.cancel("a")
