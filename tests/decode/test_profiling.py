"""Measured step costs, with real passes of the micro network; ranks that share an exchange measure the same points."""

import threading
from pathlib import Path

import pytest

from headrace.decode import profiling
from headrace.decode.config import DecodeConfig
from headrace.decode.profiling import measured_cost
from headrace.decode.speculation_config import SpeculationConfig
from headrace.decode.step_cost import StepCost
from headrace.model.network import load_network
from headrace.model.network_options import NetworkOptions
from headrace.model.parallel import LocalExchange, ThreadExchange, ThreadHub

CHECKPOINT = Path(__file__).parents[1] / "data" / "golden" / "v41-spec-micro" / "checkpoint"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(profiling, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_costs_grow_with_rows_and_are_kept(folder: Path) -> None:
    network = load_network(CHECKPOINT, options=NetworkOptions())
    config = DecodeConfig(max_batch=4, profile_s=0.3)
    cost = measured_cost(network, config, LocalExchange())
    assert cost is not None and len(list(folder.iterdir())) == 1
    seconds = cost.step_seconds([1, 24], 128)
    assert 0 < seconds[0] < seconds[1] and cost.draft_seconds(4) > 0
    assert not network.cache.blocks[0].any() and not network.cache.slots[0].any()
    again = measured_cost(network, config, LocalExchange())
    assert again is not None and again.forward.profiled == cost.forward.profiled


@pytest.mark.parametrize(
    "config",
    [
        DecodeConfig(profile_s=0),
        DecodeConfig(speculation=SpeculationConfig(schedule="fixed")),
        DecodeConfig(speculation=SpeculationConfig(proposer="off")),
    ],
)
def test_nothing_is_measured_where_nothing_is_decided(config: DecodeConfig, folder: Path) -> None:
    network = load_network(CHECKPOINT, options=NetworkOptions())
    assert measured_cost(network, config, LocalExchange()) is None
    assert not list(folder.iterdir())


def test_ranks_of_an_instance_measure_together() -> None:
    hub = ThreadHub(2, timeout_s=60)
    found: list[StepCost | None] = [None, None]

    def rank(number: int) -> None:
        exchange = ThreadExchange(hub, number)
        network = load_network(CHECKPOINT, options=NetworkOptions(), exchange=exchange)
        found[number] = measured_cost(network, DecodeConfig(max_batch=2, profile_s=0.2), exchange)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found[0] is not None and found[1] is not None
    assert found[0].forward.profiled == found[1].forward.profiled
