"""Expert exchange between real processes: every byte arrives; a lost rank is noticed in time; nothing stays behind."""

import contextlib
import gc
import multiprocessing
import re
import runpy
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from headrace.model.exchange import join_exchange
from headrace.model.exchange_shared import SharedMemoryExchange
from headrace.model.parallel import LocalExchange, ThreadExchange, ThreadHub
from headrace.transfer.errors import ConfigError, RankError

from .exchange_rank import check_rounds, parts_of, same_bits

LIMIT_S = 60


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Rank:
    """A rank in a process of its own."""

    def __init__(self, *arguments: object) -> None:
        context = multiprocessing.get_context("forkserver")  # torch is imported once
        context.set_forkserver_preload(["headrace.model.exchange"])
        self._pipe, theirs = context.Pipe(duplex=False)
        script = str(Path(__file__).with_name("exchange_rank.py"))
        given = {"RANK": (theirs, arguments)}
        self.process = context.Process(target=runpy.run_path, args=(script, given), daemon=True)
        self.process.start()
        theirs.close()

    def says(self) -> str:
        assert self._pipe.poll(LIMIT_S)
        return self._pipe.recv()

    def ended(self) -> tuple[int | None, list[str]]:
        """Exit status, and what was said that nobody heard."""
        said = []
        try:
            with contextlib.suppress(EOFError):
                while True:
                    said.append(self.says())
        finally:
            self.process.join(LIMIT_S)
            self.process.kill()
        return self.process.exitcode, said


def start(kind: str, size: int, task: str, *hosts: str) -> list[Rank]:
    address = free_address()
    return [Rank(kind, address, rank, size, task, *hosts[rank : rank + 1]) for rank in range(size)]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """No file in /dev/shm; no shared memory that this process keeps open or mapped."""
    before = set(Path("/dev/shm").iterdir())
    yield
    gc.collect()
    assert not [
        path for path in set(Path("/dev/shm").iterdir()) - before if "headrace" in path.name
    ]
    assert "headrace-exchange" not in Path("/proc/self/maps").read_text()
    for spot in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            assert "headrace-exchange" not in str(spot.readlink())


@pytest.mark.parametrize(
    ("kind", "size", "name"),
    [
        ("auto", 2, "SharedMemoryExchange"),
        ("shared_memory", 4, "SharedMemoryExchange"),
        ("shared_memory", 8, "SharedMemoryExchange"),
        ("gloo", 2, "GlooExchange"),
    ],
)
def test_processes_receive_what_was_sent(kind: str, size: int, name: str) -> None:
    ranks = start(kind, size, "rounds")
    assert [rank.ended() for rank in ranks] == [(0, [name])] * size


def test_threads_receive_the_same() -> None:
    hub = ThreadHub(3, timeout_s=30)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(check_rounds, [ThreadExchange(hub, rank) for rank in range(3)], [8] * 3))


def test_an_instance_of_one_meets_nobody() -> None:
    exchange = join_exchange("auto", "", 0, 1, 1.0)
    assert isinstance(exchange, LocalExchange)
    sent = parts_of(1, 0, 1)
    assert all(map(same_bits, exchange.start(sent).wait(), sent))


def test_the_rest_notices_a_killed_rank() -> None:
    ranks = start("shared_memory", 4, "serve")
    assert [rank.says() for rank in ranks] == ["SharedMemoryExchange"] * 4
    time.sleep(0.3)
    ranks[2].process.kill()
    killed = time.monotonic()
    for rank in (ranks[0], ranks[1], ranks[3]):
        status, (said,) = rank.ended()
        assert status == 3
        assert re.match(r"RankError rank \d: another rank of the instance is lost: rank \d", said)
    assert time.monotonic() - killed < 3  # the processes end in that time too
    assert ranks[2].ended() == (-signal.SIGKILL, [])


@pytest.mark.parametrize("lost", [0, 1])
def test_the_survivor_names_the_killed_rank(lost: int) -> None:
    victim, exchange = peer_and_ours("serve", lost)
    exchange.all_to_all(parts_of(0, exchange.rank, 2))
    victim.process.kill()
    killed = time.monotonic()
    with pytest.raises(RankError, match=f"rank {lost} ended: its process is gone"):
        for number in range(1, 1_000_000):
            exchange.all_to_all(parts_of(number % 7, exchange.rank, 2))
    assert time.monotonic() - killed < 1.0
    with pytest.raises(RankError, match=f"rank {lost} ended"):
        exchange.gather([1.0])
    exchange.close()
    assert victim.ended()[0] == -signal.SIGKILL


def peer_and_ours(task: str, peer: int) -> tuple[Rank, SharedMemoryExchange]:
    """A rank in another process, and the other rank of its instance in this one."""
    address = free_address()
    other = Rank("shared_memory", address, peer, 2, task)
    ours = join_exchange("auto", address, 1 - peer, 2, 60.0)
    assert isinstance(ours, SharedMemoryExchange)
    return other, ours


def test_a_rank_that_comes_late() -> None:
    (_, first), (status, second) = (rank.ended() for rank in start("shared_memory", 2, "late"))
    assert status == 3 and "rank 0 did not come in time: 0.5 s" in second[-1]
    assert "rank 1 left" in first[-1]


def test_calls_that_do_not_match_are_refused() -> None:
    ended = [rank.ended() for rank in start("shared_memory", 2, "other")]
    assert all(status == 3 for status, _ in ended)
    assert any("rows of 16 bytes of torch.float32" in said[-1] for _, said in ended)


def test_ranks_that_never_meet() -> None:
    status, (said,) = Rank("shared_memory", free_address(), 0, 2, "join").ended()
    assert status == 3 and said.startswith("RankError rank 0 of 2 could not join its instance")


def test_hosts_decide_the_transport() -> None:
    ranks = start("auto", 2, "rounds", "host-0", "host-1")
    assert [rank.ended() for rank in ranks] == [(0, ["GlooExchange"])] * 2
    for rank in start("shared_memory", 2, "join", "host-0", "host-1"):
        status, (said,) = rank.ended()
        assert status == 3 and said.startswith("ConfigError exchange 'shared_memory' needs all")
        assert "rank 0 is on 'host-0', rank 1 on 'host-1'" in said and "'auto' or 'gloo'" in said


def test_wrong_kinds() -> None:
    with pytest.raises(ConfigError, match="exchange = 'tcp' is not allowed: one of auto"):
        join_exchange("tcp", "", 0, 2, 1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL may work here")
def test_nccl_without_cuda_is_refused() -> None:
    for rank in start("nccl", 2, "join"):
        status, (said,) = rank.ended()
        assert status == 3 and said.startswith("ConfigError") and "needs a CUDA device" in said


def test_wrong_parts() -> None:
    peer, exchange = peer_and_ours("serve", 1)
    for parts, message in (
        ([torch.zeros(1, 2)], "1 parts of torch.float32 for 2 ranks"),
        ([torch.zeros(1, 2), torch.zeros(1, 3)], "of one dtype and width"),
        ([torch.zeros(1, 2), torch.zeros(1, 2).byte()], "of one dtype and width"),
        ([torch.zeros(2), torch.zeros(2)], "of one dtype and width"),
        ([torch.zeros(1, 2, dtype=torch.complex64)] * 2, "2 parts of torch.complex64"),
    ):
        with pytest.raises(ValueError, match=message):
            exchange.start(parts)
    exchange.close()
    exchange.close()
    with pytest.raises(RankError, match="rank 0 left its instance"):
        exchange.gather([1.0])
    status, said = peer.ended()
    assert status == 3 and "rank 0 left" in said[-1]
