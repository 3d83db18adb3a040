"""The central test: a disaggregated cluster gives the tokens of one process, bit for bit the same choices.

Every combination of rank counts, transport and chunk size answers the same prompts, whose lengths straddle blocks,
windows, ratio pairs and chunk borders, greedy and sampled. Ranks are the product's own loops on threads of this
process; ``cluster/test_ray_cluster.py`` repeats it with processes on Ray.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from headrace.cluster.generate import continue_prompt, open_for_one, prompt_logits
from headrace.cluster.rank_loop import RankLoop
from headrace.decode.config import DecodeConfig
from headrace.decode.rank import DecodeRank, Tokens
from headrace.model.network import Network, NetworkOptions, load_network
from headrace.model.parallel import LocalExchange, ThreadExchange, ThreadHub
from headrace.prefill.config import PrefillConfig
from headrace.prefill.rank import Offered, PrefillRank
from headrace.transfer.backend import Arenas, TransferBackend
from headrace.transfer.loopback import LoopbackBackend, LoopbackHub
from headrace.transfer.nixl import NixlBackend
from headrace.transfer.request import Request, SamplingParams

CHECKPOINT = Path(__file__).parents[1] / "configs" / "checkpoints" / "tiny-v41"
LENGTHS = (
    *(1, 2, 3, 5, 31, 32, 33, 43, 44, 45, 63, 64, 65, 100, 127, 128, 129, 130, 131, 172),
    *(255, 256, 257, 300, 384, 511, 512, 513, 640, 1025, 1500, 2000),
)
MAX_TOKENS = 6
BLOCKS = 200
TIMEOUT_S = 240.0
MakeBackend = Callable[[str, Arenas], TransferBackend]


def requests() -> list[Request]:
    """32 prompts of random ids; every other one is sampled with its own seed."""
    draw = random.Random(20261130)
    found: list[Request] = []
    for number, length in enumerate(LENGTHS):
        sampling = SamplingParams(
            max_tokens=MAX_TOKENS,
            temperature=0.0 if number % 2 else 0.9,
            top_p=1.0 if number % 4 else 0.95,
            seed=number,
            ignore_eos=True,
        )
        ids = (0, *(draw.randrange(3, 4000) for _ in range(length - 1)))
        found.append(Request(request_id=f"r{length}", prompt_ids=ids, sampling=sampling))
    return found


def tokens_of_one_process(network: Network, request: Request) -> tuple[int, ...]:
    network.cache.clear_slot(1)
    first = list(prompt_logits(network, request.prompt_ids, exact=False, score=False))[-1]
    steps = continue_prompt(
        network, request.prompt_ids, first, request.sampling, exact=False, num_logprobs=0
    )
    return tuple(step.token_id for step in steps)


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[int, ...]]:
    network = open_for_one(CHECKPOINT, max(LENGTHS) + MAX_TOKENS, numerics="released")
    return {request.request_id: tokens_of_one_process(network, request) for request in requests()}


@dataclass(frozen=True)
class Pool:
    """The loops of one instance, their ranks and transports."""

    loops: list[RankLoop]
    backends: list[TransferBackend]

    def stop(self) -> None:
        for loop in self.loops:
            loop.check_integrity(timeout_s=30)
        for loop in self.loops:
            assert loop.stop(timeout_s=30)

    def connect(self, other: "Pool") -> None:
        """Make every rank of ``other`` known to every rank; a transport is used from its loop's thread alone."""
        for loop, backend in zip(self.loops, self.backends, strict=True):
            for peer in other.backends:
                loop.call(partial(backend.connect, peer.pairing()), TIMEOUT_S, "pair")


def start_pool(kind: str, size: int, chunk: int, make_backend: MakeBackend) -> Pool:
    hub = ThreadHub(size, timeout_s=TIMEOUT_S)
    pool = Pool([], [])
    for rank in range(size):
        options = NetworkOptions(num_blocks=BLOCKS, num_slots=len(LENGTHS) + 1)
        exchange = ThreadExchange(hub, rank) if size > 1 else LocalExchange()
        network = load_network(CHECKPOINT, options=options, exchange=exchange)
        cache, name = network.cache, f"{kind}.{rank}"
        backend = make_backend(
            name, Arenas(layout=cache.layout, blocks=cache.blocks, slots=cache.slots)
        )
        worker = (
            PrefillRank(
                name, network, backend, PrefillConfig(chunk_tokens=chunk, lease_s=TIMEOUT_S)
            )
            if kind == "prefill"
            else DecodeRank(name, network, backend, DecodeConfig(max_batch=len(LENGTHS)))
        )
        loop = RankLoop(name)
        loop.on_close(backend.close)
        loop.on_close(exchange.close)  # a rank that leaves lets the others go, as in the cluster
        loop.begin(worker, exchange)
        pool.loops.append(loop)
        pool.backends.append(backend)
    return pool


def answer(prefill: Pool, decode: Pool, asked: list[Request]) -> dict[str, tuple[int, ...]]:
    """Send every request through a prefill and a decode rank, spread in turn."""
    by_id = {request.request_id: (number, request) for number, request in enumerate(asked)}
    for number, request in enumerate(asked):
        prefill.loops[number % len(prefill.loops)].submit_many([(request,)])
    answers: dict[str, tuple[int, ...]] = {request.request_id: () for request in asked}
    unfinished = set(answers)
    deadline = time.monotonic() + TIMEOUT_S
    while unfinished:
        assert time.monotonic() < deadline, f"unanswered: {sorted(unfinished)}"
        for loop in prefill.loops:
            for event in loop.collect(0.005):
                assert isinstance(event, Offered), event
                number, request = by_id[event.request_id]
                decode.loops[number % len(decode.loops)].submit_many([(request, event.handoff)])
        for loop in decode.loops:
            for event in loop.collect(0.005):
                assert isinstance(event, Tokens), event
                answers[event.request_id] += event.ids
                if event.finish_reason is not None:
                    unfinished.discard(event.request_id)
    return answers


@pytest.fixture(params=["loopback", "nixl"])
def make_backend(request: pytest.FixtureRequest) -> MakeBackend:
    if request.param == "nixl":
        return lambda name, arenas: NixlBackend(name, arenas)
    hub = LoopbackHub()
    return lambda name, arenas: LoopbackBackend(hub, name, arenas)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("chunk", [32, 512])
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 1), (1, 2), (2, 2)])
def test_the_cluster_gives_the_tokens_of_one_process(
    prefill_ranks: int,
    decode_ranks: int,
    chunk: int,
    make_backend: MakeBackend,
    expected: dict[str, tuple[int, ...]],
) -> None:
    prefill = start_pool("prefill", prefill_ranks, chunk, make_backend)
    decode = start_pool("decode", decode_ranks, chunk, make_backend)
    decode.connect(prefill)
    prefill.connect(decode)
    assert answer(prefill, decode, requests()) == expected
    decode.stop()
    prefill.stop()
