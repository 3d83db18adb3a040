"""One rank of an instance whose experts have replicas and change places between passes.

``wide_rank.py KIND ADDRESS RANK SIZE FOLDER`` leaves its logits in the folder.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.model.batch import Logits, Span
from headrace.model.exchange import join_exchange
from headrace.model.experts_config import ExpertsConfig
from headrace.model.network import Network, load_network
from headrace.model.network_options import NetworkOptions
from headrace.model.parallel import ExpertExchange, LocalExchange
from headrace.model.placement import ExpertPlacement

CHECKPOINT = Path(__file__).parents[1] / "data" / "golden" / "v41-spec-micro" / "checkpoint"
LAYERS, EXPERTS = 6, 8
LENGTHS = (1, 40, 0, 9, 0, 23, 0, 2)
"""Tokens of the prompt of rank 0, 1, .., and again; 0 is a rank that steps without rows."""
STEPS = 3
NARROW = ExpertsConfig(dispatch="fp8", combine="bfloat16")

Flips = list[tuple[int, NDArray[np.int32]]]


def prompt_of(rank: int) -> tuple[int, ...]:
    return tuple(range(3, 3 + LENGTHS[rank % len(LENGTHS)]))


def random_layer(draw: np.random.Generator, ranks: int, slots: int) -> NDArray[np.int32]:
    """Every expert somewhere, replicas and empty slots anywhere: [ranks, slots]."""
    layer = np.full((ranks, slots), -1, np.int32)
    places = draw.permutation(ranks * slots)
    layer.reshape(-1)[places[:EXPERTS]] = np.arange(EXPERTS)
    for place in places[EXPERTS:]:
        expert = draw.integers(EXPERTS)
        if expert not in layer[place // slots]:
            layer.reshape(-1)[place] = expert
    return layer


def story(ranks: int, seed: int) -> tuple[ExpertPlacement, list[Flips]]:
    """An initial placement, and the layers that flip before each pass; the same for all who ask."""
    draw = np.random.default_rng(seed)
    slots = -(-EXPERTS // ranks) + 2
    first = np.stack([random_layer(draw, ranks, slots) for _ in range(LAYERS)])
    flips: list[Flips] = [
        [
            (layer, random_layer(draw, ranks, slots))
            for layer in range(LAYERS)
            if draw.random() < 0.6
        ]
        for _ in range(STEPS)
    ]
    return ExpertPlacement(num_experts=EXPERTS, slots=first), flips


def open_wide(
    exchange: ExpertExchange, experts: ExpertsConfig, placement: ExpertPlacement | None = None
) -> Network:
    torch.set_num_threads(1)
    options = NetworkOptions(
        block_tokens=16, num_blocks=8, num_slots=2, experts=experts, placement=placement
    )
    return load_network(CHECKPOINT, options=options, exchange=exchange)


def flip(network: Network, library: Network, rank: int, flips: Flips) -> None:
    """Stage what this rank lacks, from a network that holds everything, and flip."""
    store, every = network.expert_store, library.expert_store
    for layer, slots in flips:
        held = set(network.placement.slots[layer, rank].tolist())
        staged: dict[int, int] = {}
        for slot, expert in enumerate(slots[rank].tolist()):
            if expert >= 0 and expert not in held:
                staged[slot] = len(staged)
                row = store.staging_row(staged[slot])
                store.arena[row] = every.arena[every.row_of(layer, expert)]
        network.set_layer_placement(layer, slots, staged)


def run_wide(
    network: Network,
    prompt: tuple[int, ...],
    rank: int = 0,
    library: Network | None = None,
    flips: Sequence[Flips] = ([],) * STEPS,
) -> torch.Tensor:
    """Prefill in the first pass, then greedy steps: logits [STEPS, V], or [0] without a prompt."""
    ids, outputs, start = list(prompt), [], 0
    for step in range(STEPS):
        if library is not None:
            flip(network, library, rank, flips[step])
        span = Span(
            token_ids=tuple(ids[start:]),
            start=start,
            history=tuple(ids[max(0, start - 3) : start]),
            slot=1,
            blocks=(1, 2, 3),
            tail_start=max(0, len(prompt) - 20),
            logits=Logits.LAST,
        )
        logits = network.forward([span] if prompt else [])
        if prompt:
            start = len(ids)
            outputs.append(logits[0])
            ids.append(int(logits[0].argmax()))
    return torch.stack(outputs) if outputs else torch.zeros(0)


def main(kind: str, address: str, rank: int, size: int, folder: Path) -> None:
    exchange = join_exchange(kind, address, rank, size, timeout_s=60)
    placement, flips = story(size, seed=size)
    network = open_wide(exchange, NARROW, placement)
    library = open_wide(LocalExchange(), NARROW)
    logits = run_wide(network, prompt_of(rank), rank, library, flips)
    torch.save(logits, folder / f"{rank}.pt")
    exchange.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
