"""Under ``deterministic: true`` a request's tokens depend on the request alone: real text, the bundled checkpoint.

What is shuffled here: batch, order, rank, number of ranks, loop, proposer and schedule of drafts, memory and means of
pausing. ``test_same_tokens.py`` does the same for prompt lengths, chunk sizes and transports.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.cluster.generate import continue_prompt, open_for_one, prompt_logits
from headrace.decode.config import DecodeConfig
from headrace.decode.speculation_config import MAX_DRAFTS, SpeculationConfig
from headrace.model.config import load_config
from headrace.model.tokenizer import Tokenizer
from headrace.tests.pools import CHECKPOINT, answer, start_pool, stats
from headrace.transfer.loopback import LoopbackBackend, LoopbackHub
from headrace.transfer.request import Request, SamplingParams

PROMPTS = Path(__file__).parents[1] / "configs" / "demo" / "prompts.jsonl"
NUM_REQUESTS = 12


def requests() -> list[Request]:
    """The first demo prompts, each with sampling of its own."""
    tokenizer = Tokenizer(CHECKPOINT, load_config(CHECKPOINT))
    lines = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    bodies = [line.get("body", line) for line in lines]
    texts = [body["prompt"] for body in bodies if "prompt" in body][:NUM_REQUESTS]
    assert len(texts) == NUM_REQUESTS
    return [
        Request(
            request_id=f"r{number}",
            prompt_ids=tuple(tokenizer.encode_prompt(text)[:300]),
            sampling=SamplingParams(
                max_tokens=20 + 8 * (number % 4),
                temperature=(0.0, 0.7, 1.0)[number % 3],
                top_p=(1.0, 0.9)[number % 2],
                min_p=(0.0, 0.02)[number % 2],
                frequency_penalty=(0.0, 0.5)[number % 4 == 1],
                repetition_penalty=(1.0, 1.1)[number % 4 == 2],
                ignore_eos=True,
                seed=number,
            ),
        )
        for number, text in enumerate(texts)
    ]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[int, ...]]:
    """Tokens of one process, one request after another, without drafts."""
    torch.set_num_threads(1)
    network = open_for_one(CHECKPOINT, 400, numerics="released")
    found: dict[str, tuple[int, ...]] = {}
    for request in requests():
        network.cache.clear_slot(1)
        first = list(prompt_logits(network, request.prompt_ids, exact=False, score=False))[-1]
        steps = continue_prompt(
            network, request.prompt_ids, first, request.sampling, exact=False, num_logprobs=0
        )
        found[request.request_id] = tuple(step.token_id for step in steps)
    return found


FIXED = SpeculationConfig(schedule="fixed")
VARIANTS = {
    "no drafts, plain loop": DecodeConfig(
        speculation=SpeculationConfig(proposer="off"), overlap=False
    ),
    "all drafts": DecodeConfig(speculation=FIXED),
    "all drafts, plain loop, batch of 1": DecodeConfig(
        speculation=FIXED, overlap=False, max_batch=1
    ),
    "scheduled drafts, batch of 5": DecodeConfig(max_batch=5),
    "n-grams": DecodeConfig(speculation=SpeculationConfig(proposer="ngram", num_drafts=MAX_DRAFTS)),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_loop_drafts_batch_ranks_and_order_change_no_token(
    name: str, ranks: int, expected: dict[str, tuple[int, ...]]
) -> None:
    counted = check(expected, VARIANTS[name], ranks=ranks, seed=len(name))
    verified = sum(sum(rank["verified_by_position"]) for rank in counted)
    accepted = sum(sum(rank["accepted_by_position"]) for rank in counted)
    assert verified >= accepted and bool(accepted) == ("no drafts" not in name)


@pytest.mark.parametrize("host_cache_mib", [0, 64])
@pytest.mark.parametrize("overlap", [False, True])
def test_pauses_change_no_token(
    host_cache_mib: int, overlap: bool, expected: dict[str, tuple[int, ...]]
) -> None:
    config = DecodeConfig(
        host_cache_mib=host_cache_mib, overlap=overlap, speculation=FIXED, recompute_tokens=50
    )
    (counted,) = check(expected, config, num_blocks=46, block_tokens=8)
    assert counted["pauses"] > 0
    assert bool(counted["recomputed_rows"]) == (host_cache_mib == 0)


def check(
    expected: dict[str, tuple[int, ...]],
    config: DecodeConfig,
    *,
    ranks: int = 1,
    num_blocks: int = 80,
    block_tokens: int = 128,
    seed: int = 0,
) -> list[dict[str, object]]:
    """Answer everything in a shuffled order and compare; returns what the decode ranks counted."""
    hub = LoopbackHub()
    prefill, decode = (
        start_pool(
            kind,
            size,
            128,
            lambda name, arenas: LoopbackBackend(hub, name, arenas),
            decode=config,
            num_blocks=blocks,
            num_slots=NUM_REQUESTS + 1,
            block_tokens=block_tokens,
        )
        for kind, size, blocks in (("prefill", 1, 600), ("decode", ranks, num_blocks))
    )
    decode.connect(prefill)
    prefill.connect(decode)
    asked = requests()
    random.Random(seed).shuffle(asked)
    try:
        assert answer(prefill, decode, asked) == expected
        return stats(decode)
    finally:
        decode.stop()
        prefill.stop()
