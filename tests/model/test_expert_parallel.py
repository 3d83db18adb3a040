"""Neither ranks, replicas, placements, flips, uneven work nor payloads change a bit of a row, and counts add up."""

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.model.batch import Span
from headrace.model.drafter import DraftSpan
from headrace.model.experts_config import ExpertsConfig
from headrace.model.network import Network, load_network
from headrace.model.network_options import NetworkOptions
from headrace.model.parallel import LocalExchange, ThreadExchange, ThreadHub
from headrace.model.placement import ExpertPlacement
from headrace.transfer.errors import ConfigError, PlacementError

from .wide_rank import (
    CHECKPOINT,
    EXPERTS,
    LAYERS,
    LENGTHS,
    NARROW,
    STEPS,
    open_wide,
    prompt_of,
    run_wide,
    story,
)

WIDE = ExpertsConfig()


@cache
def library(experts: ExpertsConfig) -> Network:
    """A network of one rank; its store holds expert e of every layer in slot e."""
    return open_wide(LocalExchange(), experts)


@cache
def alone(experts: ExpertsConfig, length: int) -> torch.Tensor:
    network = library(experts)
    network.cache.clear_slot(1)
    return run_wide(network, tuple(range(3, 3 + length)))


def instance(
    size: int, experts: ExpertsConfig, placement: ExpertPlacement | None = None
) -> list[Network]:
    hub = ThreadHub(size, timeout_s=60)
    exchanges = (
        [ThreadExchange(hub, rank) for rank in range(size)] if size > 1 else [LocalExchange()]
    )
    return [open_wide(exchange, experts, placement) for exchange in exchanges]


def expect(found: list[torch.Tensor], experts: ExpertsConfig) -> None:
    for rank, logits in enumerate(found):
        if prompt_of(rank):
            assert torch.equal(logits, alone(experts, len(prompt_of(rank)))), f"rank {rank}"


@pytest.mark.parametrize("experts", [WIDE, NARROW], ids=["float32", "fp8"])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 64])
def test_flips_between_passes_change_no_bit(size: int, experts: ExpertsConfig) -> None:
    placement, flips = story(size, seed=size)
    networks = instance(size, experts, placement)
    with ThreadPoolExecutor(size) as pool:
        found = list(
            pool.map(
                lambda rank: run_wide(
                    networks[rank], prompt_of(rank), rank, library(experts), flips
                ),
                range(size),
            )
        )
    expect(found, experts)
    last = placement.slots.copy()
    for step in flips:
        for layer, slots in step:
            last[layer] = slots
    assert (last != placement.slots).any()
    for network in networks:
        assert (network.placement.slots == last).all()


def test_bfloat16_outputs_are_another_model_than_float32_ones() -> None:
    assert not torch.equal(alone(WIDE, 40), alone(NARROW, 40))


@pytest.mark.parametrize("size", [3, 9])
def test_counts_of_the_ranks_add_up_to_those_of_one(size: int) -> None:
    networks = instance(size, ExpertsConfig(redundant=2))
    with ThreadPoolExecutor(size) as pool:
        expect(
            list(pool.map(lambda rank: run_wide(networks[rank], prompt_of(rank)), range(size))),
            WIDE,
        )
    series = [network.expert_counts.series() for network in networks]
    assert [steps.tolist() for steps, _ in series] == [list(range(STEPS))] * size
    together = sum(rows for _, rows in series)
    one = open_wide(LocalExchange(), WIDE)
    expected = np.zeros((STEPS, LAYERS, EXPERTS), np.int32)
    for number, length in enumerate(LENGTHS[rank % len(LENGTHS)] for rank in range(size)):
        if length:
            one.cache.clear_slot(1)
            run_wide(one, tuple(range(3, 3 + length)))
            steps, rows = one.expert_counts.series(one.step - STEPS)
            assert len(steps) == STEPS, number
            expected += rows
    assert (together == expected).all()
    assert expected.sum() > 0


def test_threads_of_one_rank_count_every_row() -> None:
    rows = 200  # enough for three threads
    network = load_network(CHECKPOINT, options=NetworkOptions(num_blocks=4, num_slots=2))
    span = Span(token_ids=tuple(range(3, 3 + rows)), start=0, history=(), slot=1, blocks=(1, 2))
    for threads in (1, 3):
        network.cache.clear_slot(1)
        torch.set_num_threads(threads)
        network.forward([span])
    torch.set_num_threads(1)
    (first, second), chosen = network.expert_counts.series()[1], network.config.num_experts_per_tok
    assert first.sum(axis=1).tolist() == [rows * chosen] * LAYERS
    assert (first == second).all()


def test_neither_the_warm_up_nor_drafts_are_counted() -> None:
    network = open_wide(LocalExchange(), WIDE)
    network.warm_up()
    run_wide(network, prompt_of(1))
    before = network.expert_counts.series()
    assert before[0].tolist() == list(range(STEPS))
    assert network.drafter is not None
    anchor = DraftSpan(token_id=3, position=LENGTHS[1], slot=1)
    network.drafter.draft((anchor,), lambda _place, _logits: (3,))
    after = network.expert_counts.series()
    assert network.step == STEPS
    assert (after[0] == before[0]).all()
    assert (after[1] == before[1]).all()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(("size", "kind"), [(2, "gloo"), (4, "shared_memory")])
def test_ranks_as_processes_flip_without_a_bit(size: int, kind: str, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    script = str(Path(__file__).with_name("wide_rank.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, kind, address, str(rank), str(size), str(tmp_path)]
        )
        for rank in range(size)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0] * size
    expect([torch.load(tmp_path / f"{rank}.pt") for rank in range(size)], NARROW)


def test_a_flip_that_cannot_serve_is_refused_and_changes_nothing() -> None:
    networks = instance(2, ExpertsConfig(redundant=2))  # 5 slots a rank: 0-3 and 4, 4-7 and 0
    network = networks[0]
    before, arena = network.placement.slots.copy(), network.expert_store.arena.clone()
    layer = before[2].copy()
    layer[0, 0] = 4
    with pytest.raises(PlacementError, match="layer 2, rank 0: expert 4 lies in 2 slots"):
        network.set_layer_placement(2, layer)
    layer = before[2].copy()
    layer[0, 2] = -1
    with pytest.raises(PlacementError, match="layer 2: no rank of 2 holds expert 2"):
        network.set_layer_placement(2, layer)
    layer = before[2].copy()
    layer[0, 4] = 6
    layer[0, :2] = layer[0, 1::-1]
    with pytest.raises(PlacementError, match="layer 2, slot 4: expert 6 is neither on this rank"):
        network.set_layer_placement(2, layer)
    with pytest.raises(PlacementError, match="layer 6: must be 0 to 5"):
        network.set_layer_placement(6, layer)
    with pytest.raises(PlacementError, match="2 ranks of 5 slots"):
        network.set_layer_placement(2, layer[:, :4])
    assert (network.placement.slots == before).all()
    assert torch.equal(network.expert_store.arena[: 6 * 5], arena[: 6 * 5])


def test_a_placement_of_another_instance_is_refused() -> None:
    placement = ExpertPlacement.initial(layers=6, num_experts=8, ranks=4, slots_per_rank=2)
    with pytest.raises(PlacementError, match=r"over 4 ranks: this instance has .* over 1 ranks"):
        open_wide(LocalExchange(), WIDE, placement)


def test_fp8_lines_need_released_numerics() -> None:
    with pytest.raises(ConfigError, match="use dispatch = 'float32'"):
        NetworkOptions(numerics="plain", experts=NARROW)
