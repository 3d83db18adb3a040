"""A request's tokens never depend on how the rank works: loop, drafts, batch, memory, order."""

import random

import pytest

from headrace.decode.config import DecodeConfig
from headrace.decode.speculation_config import SpeculationConfig
from headrace.prefill.config import PrefillConfig
from headrace.tests.fake_network import FakeDrafter, FakeNetwork
from headrace.transfer.request import Request

from .conftest import Pair, make_request, plain_loop

REQUESTS = [
    make_request(
        f"r{number}",
        1 + 5 * number,
        max_tokens=3 + 6 * number,
        temperature=(0.0, 0.9, 1.2)[number % 3],
        top_p=(1.0, 0.9)[number % 2],
        presence_penalty=(0.0, 1.0)[number % 2],
        repetition_penalty=(1.0, 1.3)[number % 3 == 1],
        min_tokens=number % 3,
        logit_bias=((7, 2.0),) if number == 4 else (),
        seed=number,
    )
    for number in range(6)
]


def network(num_blocks: int = 80, num_slots: int = 9) -> FakeNetwork:
    return FakeNetwork(num_blocks=num_blocks, num_slots=num_slots)


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[int, ...]]:
    return {request.request_id: plain_loop(network(), request) for request in REQUESTS}


def run(
    answers: dict[str, tuple[int, ...]],
    requests: list[Request],
    *,
    num_blocks: int = 80,
    drafter: bool = False,
    **settings: object,
) -> Pair:
    """All requests through one pair of ranks; returns the pair when everything has come to rest."""

    def make() -> FakeNetwork:
        made = network(num_blocks)
        if drafter:
            known = [(len(r.prompt_ids), answers[r.request_id]) for r in REQUESTS]
            made.drafter = FakeDrafter(made.config.vocab_size, known)
        return made

    config = DecodeConfig(**({"max_batch": 8} | settings))  # type: ignore[arg-type]
    pair = Pair(make, PrefillConfig(chunk_tokens=16), config, make_prefill_network=network)
    waiting = list(requests)
    for _ in range(2000):
        if waiting:
            pair.start(waiting.pop(0))
        pair.turn()
        stats = pair.decode.stats()
        if not waiting and not any(
            stats[k] for k in ("waiting", "transferring", "draining", "running", "paused")
        ):
            break
    pair.assert_empty()
    pair.decode.close()
    assert not pair.failures
    return pair


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "speculation",
    [
        SpeculationConfig(proposer="off"),
        SpeculationConfig(proposer="ngram", num_drafts=4),
        SpeculationConfig(proposer="drafter", schedule="fixed", num_drafts=1),
        SpeculationConfig(proposer="drafter", schedule="fixed"),
        SpeculationConfig(proposer="drafter"),
    ],
    ids=["off", "ngram", "fixed-1", "fixed-5", "confidence"],
)
@pytest.mark.parametrize("num_blocks", [80, 16])
def test_loop_and_drafts_and_memory(
    answers: dict[str, tuple[int, ...]],
    overlap: bool,
    speculation: SpeculationConfig,
    num_blocks: int,
) -> None:
    pair = run(
        answers,
        REQUESTS,
        overlap=overlap,
        speculation=speculation,
        drafter=speculation.proposer == "drafter",
        num_blocks=num_blocks,
    )
    assert pair.tokens == answers
    stats = pair.decode.stats()
    if speculation.schedule == "fixed":
        verified, accepted = stats["verified_by_position"], stats["accepted_by_position"]
        assert verified[0] > accepted[0] > 0, "some drafts are right and some are wrong"


@pytest.mark.parametrize("host_cache_mib", [0, 64])
@pytest.mark.parametrize("seed", range(4))
def test_order_and_batch_and_pauses(
    answers: dict[str, tuple[int, ...]], host_cache_mib: int, seed: int
) -> None:
    rng = random.Random(seed)
    requests = rng.sample(REQUESTS, len(REQUESTS))
    pair = run(
        answers,
        requests,
        num_blocks=rng.choice([16, 18, 25]),
        drafter=True,
        max_batch=rng.choice([2, 3, 8]),
        overlap=bool(seed % 2),
        host_cache_mib=host_cache_mib,
        recompute_tokens=rng.choice([3, 64]),
    )
    assert pair.tokens == answers


def test_pauses_happen_and_are_counted(answers: dict[str, tuple[int, ...]]) -> None:
    for host_cache_mib in (0, 64):
        pair = run(answers, REQUESTS[2:], num_blocks=16, host_cache_mib=host_cache_mib)
        stats = pair.decode.stats()
        assert stats["pauses"] > 0
        assert bool(stats["recomputed_rows"]) == (host_cache_mib == 0)


def test_overlap_runs_no_row_beyond_the_limit(
    answers: dict[str, tuple[int, ...]],
) -> None:
    plain, overlapped = (
        run(
            answers,
            [REQUESTS[3]],
            overlap=overlap,
            speculation=SpeculationConfig(proposer="off"),
        ).decode.stats()
        for overlap in (False, True)
    )
    assert plain["tokens"] == overlapped["tokens"] == len(answers["r3"])
    assert plain["steps"] == plain["tokens"] == overlapped["rows"]
