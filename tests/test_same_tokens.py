"""The central test: a disaggregated cluster gives the tokens of one process, bit for bit the same choices.

Combinations of split, rank counts, transport and chunk size answer the same prompts, whose lengths straddle blocks,
windows, ratio pairs and chunk borders, greedy and sampled. Ranks are the product's own loops on threads of this
process; ``cluster/test_ray_cluster.py`` repeats it with processes on Ray.
"""

import random
from collections.abc import Iterator

import pytest
import torch

from headrace.cluster.generate import continue_prompt, open_for_one, prompt_logits
from headrace.model.network import Network
from headrace.tests.pools import CHECKPOINT, MakeBackend, answer, start_pool
from headrace.transfer.loopback import LoopbackBackend, LoopbackHub
from headrace.transfer.nixl import NixlBackend
from headrace.transfer.request import Request, SamplingParams

LENGTHS = (
    *(1, 2, 3, 5, 31, 32, 33, 43, 44, 45, 63, 64, 65, 100, 127, 128, 129, 130, 131, 172),
    *(255, 256, 257, 300, 384, 511, 512, 513, 640, 1025, 1500, 2000),
)
MAX_TOKENS = 6


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


@pytest.mark.parametrize(("chunk", "seam"), [(32, False), (512, False), (64, True)])
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 1), (1, 2), (2, 2)])
def test_the_cluster_gives_the_tokens_of_one_process(
    prefill_ranks: int,
    decode_ranks: int,
    chunk: int,
    seam: bool,
    make_backend: MakeBackend,
    expected: dict[str, tuple[int, ...]],
) -> None:
    prefill = start_pool("prefill", prefill_ranks, chunk, make_backend, seam=seam)
    decode = start_pool("decode", decode_ranks, chunk, make_backend, seam=seam)
    decode.connect(prefill)
    prefill.connect(decode)
    assert answer(prefill, decode, requests()) == expected
    decode.stop()
    prefill.stop()
