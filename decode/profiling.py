"""Measures what decode steps cost on this machine, with real passes over the reserved block and slot."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from ..model.batch import Logits, Span
from ..model.drafter import DraftSpan
from ..transfer.request import SamplingParams
from .config import DecodeConfig
from .executor import Network
from .proposers import make_proposer
from .sampler import SampledRows, sample
from .step_cost import StepCost, cache_folder, cache_key, load, profile, save

_REPEATS = 3


class Exchange(Protocol):
    """How the ranks of an instance agree on a measurement."""

    def gather(self, values: Sequence[float]) -> list[list[float]]: ...


def measured_cost(network: Network, config: DecodeConfig, exchange: Exchange) -> StepCost | None:
    """What steps cost, from disk or by measuring for ``config.profile_s``; None where nothing would be decided by it.

    All ranks of an instance call this at the same time.
    """
    proposer = make_proposer(network.drafter, config.speculation, network.config.eos_token_id)
    fixed = config.speculation.schedule == "fixed" and config.speculation.min_tokens_per_s is None
    if fixed or not proposer.num_drafts or not config.profile_s:
        return None
    key = cache_key(
        {
            "layout": network.cache.layout.fingerprint(),
            "drafts": [config.speculation.proposer, proposer.num_drafts],
            "threads": torch.get_num_threads(),
            "cpus": len(os.sched_getaffinity(0)),
            "ranks": len(exchange.gather([0.0])),
            "batch": config.max_batch,
        }
    )
    found = load(cache_folder(), key)
    if not all(answer[0] for answer in exchange.gather([float(found is not None)])):
        found = _measure(network, config, exchange, proposer.num_drafts)
        save(cache_folder(), key, found)
    return found


def _measure(
    network: Network, config: DecodeConfig, exchange: Exchange, num_drafts: int
) -> StepCost:
    context = network.config.max_position_embeddings
    most = config.max_batch * (1 + num_drafts)
    rows = _doubling(1, most)
    requests = _doubling(1, config.max_batch)

    def slowest(work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return max(answer[0] for answer in exchange.gather([time.perf_counter() - began]))

    def forward(num_rows: int, length: int) -> float:
        spans = [_row(network, length, row) for row in range(num_rows)]
        return slowest(lambda: network.forward(spans))

    vocabulary = network.config.vocab_size
    logits = torch.from_numpy(
        np.random.default_rng(0).normal(size=(most, vocabulary)).astype(np.float32)
    )
    wanted = SampledRows(params=SamplingParams(temperature=1.0), prompt_ids=(0,), output_ids=())

    def sampling(num_rows: int, _: int) -> float:
        return slowest(
            lambda: sample(logits[:num_rows], [wanted] * num_rows, network.config.eos_token_id)
        )

    def draft(num_requests: int, _: int) -> float:
        if network.drafter is None:
            return 1e-6
        drafter = network.drafter
        anchors = [
            DraftSpan(token_id=_token(network, row), position=64, slot=0)
            for row in range(num_requests)
        ]

        def choose(_: int, chosen: torch.Tensor) -> list[int]:
            return sample(chosen, [wanted] * num_requests, network.config.eos_token_id).tolist()

        return slowest(lambda: drafter.draft(anchors, choose, num_drafts))

    share = config.profile_s
    cost = StepCost(
        forward=profile(
            forward,
            rows,
            [c for c in (128, 1024, 4096) if c < context] or [1],
            budget_s=0.7 * share,
            repeats=_REPEATS,
        ),
        sample=profile(sampling, rows, budget_s=0.1 * share, repeats=_REPEATS),
        draft=profile(draft, requests, budget_s=0.2 * share, repeats=_REPEATS),
    )
    network.cache.blocks[0].zero_()
    network.cache.clear_slot(0)
    return cost


def _token(network: Network, row: int) -> int:
    """Rows of different ids, so that they go to different experts, as those of real requests do."""
    return (1 + 37 * row) % network.config.vocab_size


def _row(network: Network, position: int, row: int) -> Span:
    """A row far into a text of which every block is the reserved one."""
    block_tokens = network.cache.layout.block_tokens
    return Span(
        token_ids=(_token(network, row),),
        start=position,
        history=(0, 0, 0)[:position],
        slot=0,
        blocks=(0,) * (position // block_tokens + 1),
        logits=Logits.ALL,
    )


def _doubling(first: int, last: int) -> list[int]:
    sizes = [first]
    while sizes[-1] * 2 < last:
        sizes.append(sizes[-1] * 2)
    return sizes if last == first else [*sizes, last]
