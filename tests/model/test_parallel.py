"""Expert parallelism: the number of ranks, uneven work and idle ranks change nothing in a row's bits."""

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from headrace.model.exchange import join_exchange
from headrace.model.parallel import LocalExchange, ThreadExchange, ThreadHub
from headrace.transfer.errors import RankError

from .process_rank import PROMPTS, open_rank, run_rank


@pytest.fixture(scope="module")
def alone() -> list[torch.Tensor]:
    network = open_rank(LocalExchange())
    results = []
    for prompt in PROMPTS:
        network.cache.clear_slot(1)
        results.append(run_rank(network, prompt))
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_as_threads_give_the_same_bits(size: int, alone: list[torch.Tensor]) -> None:
    hub = ThreadHub(size, timeout_s=60)
    networks = [open_rank(ThreadExchange(hub, rank)) for rank in range(size)]
    work = [PROMPTS[rank] if rank < len(PROMPTS) - 1 else None for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run_rank, networks, work))
    for rank, prompt in enumerate(work):
        if prompt is not None:
            assert torch.equal(found[rank], alone[rank])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("kind", ["gloo", "shared_memory"])
def test_ranks_as_processes_give_the_same_bits(
    kind: str, tmp_path: Path, alone: list[torch.Tensor]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, str(Path(__file__).with_name("process_rank.py")), kind, address]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)]) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    for rank in range(2):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), alone[rank])


def test_a_rank_that_does_not_come_is_an_error_in_time() -> None:
    with pytest.raises(RankError, match="rank 0 of 2"):
        join_exchange("gloo", f"127.0.0.1:{free_port()}", 0, 2, timeout_s=0.5)
    with pytest.raises(RankError, match="did not come in time"):
        ThreadExchange(ThreadHub(2, timeout_s=0.2), 0).gather([1.0])
