"""Ten times more answers than memory: everybody finishes, and nobody's tokens tell that there was any pressure."""

import random
from collections.abc import Callable, Iterator

import pytest

from headrace.decode.config import DecodeConfig
from headrace.decode.executor import Network as NetworkLike
from headrace.decode.speculation_config import SpeculationConfig
from headrace.model.network import load_network
from headrace.model.network_options import NetworkOptions
from headrace.prefill.config import PrefillConfig
from headrace.tests.fake_network import CHECKPOINT, FakeDrafter, FakeNetwork
from headrace.transfer.request import Request

from .conftest import Pair, make_request, plain_loop

FULL_SPEED = SpeculationConfig(schedule="fixed", num_drafts=5)


def pair_of(
    sizes: Callable[[int], NetworkLike], num_blocks: int, host_cache_mib: int, overlap: bool
) -> Pair:
    """A prefill rank with room for everybody, and a decode rank with ``num_blocks``."""
    made: Iterator[NetworkLike] = iter([sizes(2000), sizes(num_blocks + 1)])
    return Pair(
        lambda: next(made),
        PrefillConfig(chunk_tokens=64),
        DecodeConfig(
            max_batch=40,
            host_cache_mib=host_cache_mib,
            recompute_tokens=16,
            overlap=overlap,
            speculation=FULL_SPEED,
        ),
    )


def soak(pair: Pair, requests: list[Request], expected: dict[str, tuple[int, ...]]) -> None:
    """All at once, and every seventh is cancelled somewhere on its way."""
    rng = random.Random(len(requests))
    for request in requests:
        pair.start(request)
    cancelled = {request.request_id for request in requests[3::7]}
    pending = sorted(cancelled)
    while pending:
        for _ in range(rng.randint(1, 8)):
            pair.turn()
        pair.decode.cancel(pending.pop(rng.randrange(len(pending))))
    pair.run(5000)
    pair.assert_decode_empty()
    assert pair.failures == {}
    assert pair.decode.stats()["pauses"] >= 5
    pair.decode.close()
    for request in requests:
        name = request.request_id
        tokens = pair.tokens.get(name, ())
        if name in cancelled:
            assert tokens == expected[name][: len(tokens)]
        else:
            assert tokens == expected[name], name


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("host_cache_mib", [0, 64])
def test_ten_times_the_memory(host_cache_mib: int, overlap: bool) -> None:
    requests = [
        make_request(f"r{n}", 1 + n % 9, max_tokens=25 + n % 13, temperature=0.9 * (n % 2), seed=n)
        for n in range(30)
    ]
    block_tokens = 4
    longest = [
        -(-(len(r.prompt_ids) + r.sampling.max_tokens - 1) // block_tokens) for r in requests
    ]
    num_blocks = sum(longest) // 10
    plain = FakeNetwork(num_blocks=40)
    expected = {r.request_id: plain_loop(plain, r) for r in requests}

    def network(count: int) -> FakeNetwork:
        made = FakeNetwork(num_blocks=count, num_slots=41)
        answers = [(len(r.prompt_ids), expected[r.request_id]) for r in requests]
        made.drafter = FakeDrafter(made.config.vocab_size, answers)
        return made

    pair = pair_of(network, num_blocks, host_cache_mib, overlap)
    soak(pair, requests, expected)
    stats = pair.decode.stats()
    assert stats["mean_accepted"] > 1.5
    assert host_cache_mib > 0 or stats["recomputed_rows"] > 0


@pytest.mark.parametrize("host_cache_mib", [0, 64])
def test_ten_times_the_memory_of_a_real_network(host_cache_mib: int) -> None:
    requests = [
        make_request(f"r{n}", 1 + n % 3, max_tokens=40, temperature=0.9 * (n % 2), seed=n)
        for n in range(26)
    ]

    def network(count: int) -> NetworkLike:
        options = NetworkOptions(
            numerics="released",
            deterministic=True,
            block_tokens=4,
            num_blocks=count,
            num_slots=41,
        )
        return load_network(CHECKPOINT, options=options)

    plain = network(40)
    expected = {r.request_id: plain_loop(plain, r) for r in requests}
    longest = sum(-(-(len(r.prompt_ids) + 39) // 4) for r in requests)
    soak(pair_of(network, longest // 10, host_cache_mib, overlap=True), requests, expected)
