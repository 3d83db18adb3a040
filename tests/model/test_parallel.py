"""Expert parallelism: the number of ranks, uneven work and idle ranks change nothing in a row's bits."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from headrace.model.batch import Logits, Span
from headrace.model.network import Network, NetworkOptions, load_network
from headrace.model.parallel import (
    ExpertExchange,
    GlooExchange,
    LocalExchange,
    ThreadExchange,
    ThreadHub,
)
from headrace.transfer.errors import RankError

CHECKPOINT = Path(__file__).parents[1] / "data" / "golden" / "v41-spec-micro" / "checkpoint"
PROMPTS = [tuple(range(3, 3 + length)) for length in (1, 40, 9, 23)]
STEPS = 3


def open_rank(exchange: ExpertExchange) -> Network:
    torch.set_num_threads(1)
    options = NetworkOptions(block_tokens=16, num_blocks=8, num_slots=2)
    return load_network(CHECKPOINT, options=options, exchange=exchange)


def run_rank(network: Network, prompt: tuple[int, ...] | None) -> torch.Tensor:
    """Prefill ``prompt`` in one step, then greedy steps; a rank without a prompt steps with zero rows."""
    ids, outputs = list(prompt or ()), []
    start = 0
    for _ in range(STEPS):
        spans: list[Span] = []
        if prompt is not None:
            history = tuple(ids[max(0, start - 3) : start])
            spans = [
                Span(
                    token_ids=tuple(ids[start:]),
                    start=start,
                    history=history,
                    slot=1,
                    blocks=(1, 2, 3),
                    tail_start=max(0, len(prompt) - 20),
                    logits=Logits.LAST,
                )
            ]
        logits = network.forward(spans)
        if prompt is not None:
            start = len(ids)
            outputs.append(logits[0])
            ids.append(int(logits[0].argmax()))
    return torch.stack(outputs) if outputs else torch.zeros(0)


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


def _gloo_rank(rank: int, size: int, port: int, folder: str) -> None:
    exchange = GlooExchange(f"127.0.0.1:{port}", rank, size, timeout_s=60)
    assert exchange.any(rank == size - 1)
    assert not exchange.any(False)
    result = run_rank(open_rank(exchange), PROMPTS[rank])
    torch.save(result, Path(folder) / f"{rank}.pt")
    exchange.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_ranks_as_processes_over_gloo_give_the_same_bits(
    tmp_path: Path, alone: list[torch.Tensor]
) -> None:
    mp.spawn(_gloo_rank, (2, free_port(), str(tmp_path)), nprocs=2)
    for rank in range(2):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), alone[rank])


def test_a_rank_that_does_not_come_is_an_error_in_time() -> None:
    with pytest.raises(RankError, match="rank 0 of 2"):
        GlooExchange(f"127.0.0.1:{free_port()}", 0, 2, timeout_s=0.5)
    with pytest.raises(RankError, match="did not come in time"):
        ThreadExchange(ThreadHub(2, timeout_s=0.2), 0).any(True)
