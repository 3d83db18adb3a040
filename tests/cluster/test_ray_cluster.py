"""Whole clusters on one Ray of this host. The network is a real one where tokens matter, a fake where failures do."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group_table

from headrace.cluster.cluster import Cluster
from headrace.cluster.config import ClusterConfig, load_cluster_config
from headrace.cluster.fake_rank import FakeBuilder, Faults, fake_answer
from headrace.cluster.progress import STAGES
from headrace.cluster.ray_session import open_ray
from headrace.tests.cluster.ray_support import (
    CHECKPOINT,
    SMALL,
    alive,
    answers_of_one_process,
    descendants,
    request_of,
    settle,
    shared_memory,
    wait_until,
)
from headrace.transfer.errors import (
    CheckpointError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    PromptTooLongError,
    RankError,
    TransferError,
)

DRIVER = Path(__file__).with_name("interrupted_driver.py")


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    """One Ray for the module; at its end nothing may be left of it."""
    before, others = shared_memory(), descendants(os.getpid())
    session = open_ray(
        load_cluster_config("local", [*SMALL, "ray.address=local", "ray.local.num_cpus=8"])
    )
    started = descendants(os.getpid())
    yield
    started = (started | descendants(os.getpid())) - others
    session.close()
    assert wait_until(lambda: not alive(started)), f"processes {alive(started)} are left"
    assert shared_memory() <= before


def placed() -> set[str]:
    """Ids of the placement groups that hold resources or wait for them."""
    table = placement_group_table()
    return {name for name, group in table.items() if group["state"] != "REMOVED"}


class Stages:
    """Notes which rank reached which stage."""

    def __init__(self) -> None:
        self.reached_by: dict[str, list[str]] = {stage: [] for stage in STAGES}
        self.closed = False

    def reached(self, rank: str, stage: str) -> None:
        self.reached_by[stage].append(rank)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """1 prefill rank, 1 decode instance with EP 2 over gloo, NIXL between them."""
    stages = Stages()
    before = placed()
    with Cluster.start(load_cluster_config("local", SMALL), stages) as cluster:
        everyone = ["decode-0.0", "decode-0.1", "prefill-0.0"]
        assert {
            stage: sorted(ranks) for stage, ranks in stages.reached_by.items()
        } == dict.fromkeys(STAGES, everyone)
        assert stages.closed
        assert cluster.num_actors == 3
        yield cluster
        pids = [stats["pid"] for stats in cluster.stats().values() if "pid" in stats]
    assert wait_until(lambda: not alive(pids))
    assert wait_until(lambda: placed() == before)


@pytest.fixture(autouse=True)
def books_balance(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").check_integrity()


def test_the_cluster_answers_what_one_process_answers(cluster: Cluster) -> None:
    lengths = (1, 2, 9, 16, 17, 40, 75, 130)
    requests = [request_of(f"r{n}", n, temperature=0.8 if n % 2 else 0.0) for n in lengths]

    async def ask_all() -> list[tuple[int, ...]]:
        completions = await asyncio.gather(*(cluster.generate(request) for request in requests))
        for completion in completions:
            line = completion.timeline
            instants = (
                line.arrived,
                line.routed,
                line.prefill_started,
                line.offered,
                line.admitted,
                line.first_token,
            )
            assert list(instants) == sorted(instants)
            assert line.last_token > line.first_token
            assert completion.finish_reason == "length"
        return [completion.ids for completion in completions]

    assert asyncio.run(ask_all()) == answers_of_one_process(requests)
    stats = cluster.stats()
    assert stats["decode-0.0"]["finished"] + stats["decode-0.1"]["finished"] == len(requests)
    assert min(stats["decode-0.0"]["finished"], stats["decode-0.1"]["finished"]) > 0


def test_a_cancelled_request_is_freed_on_every_rank(cluster: Cluster) -> None:
    async def begin_and_leave() -> None:
        tasks = [
            asyncio.create_task(cluster.generate(request_of(f"c{n}", 20 + n, 500)))
            for n in range(4)
        ]
        await asyncio.sleep(0.5)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)

    asyncio.run(begin_and_leave())

    def all_free() -> bool:
        stats = cluster.stats()
        return all(rank["free_blocks"] == 63 and not rank["running"] for rank in stats.values())

    assert wait_until(all_free)


def test_a_wrong_request_fails_alone_and_keeps_its_type(cluster: Cluster) -> None:
    async def ask() -> None:
        long, good, again = await asyncio.gather(
            cluster.generate(request_of("long", 2000)),
            cluster.generate(request_of("good", 12)),
            cluster.generate(request_of("good", 12)),
            return_exceptions=True,
        )
        assert isinstance(long, PromptTooLongError)
        assert isinstance(again, InvalidRequestError)
        assert str(again) == "request_id = 'good' is not allowed: a request of that id is under way"
        assert not isinstance(good, BaseException)
        assert len(good.ids) == 8

    asyncio.run(ask())


def fake_config(*overrides: str) -> ClusterConfig:
    return load_cluster_config("local", [*SMALL, "ray.local.num_cpus=8", *overrides])


def test_failures_under_way(one_ray: None) -> None:
    """One fake cluster with three decode instances, and what its requests meet, the deadly faults last."""
    faults = Faults(
        lost_transfers={"lost once": 1, "lost always": 9},
        silent=frozenset({"silent"}),
        exits=frozenset({"exit"}),
        broken_steps=frozenset({"broken"}),
    )
    config = fake_config(
        "decode.instances=3", "decode.ranks=1", "timeouts.first_token_s=1.5", "max_prefills=4"
    )
    with Cluster.start(config, builder=FakeBuilder(faults)) as cluster:

        async def ask(name: str) -> tuple[int, ...]:
            return (await asyncio.wait_for(cluster.generate(request_of(name)), 20)).ids

        async def survivable() -> None:
            answer = fake_answer(request_of("any"))
            assert await asyncio.gather(*(ask(f"r{n}") for n in range(20))) == [answer] * 20
            assert await ask("lost once") == answer
            with pytest.raises(TransferError, match=r"^the read was lost$"):
                await ask("lost always")
            with pytest.raises(
                DeadlineError,
                match=r"^phase first_token: request 'silent' waited longer than timeouts\.first_token_s = 1\.5$",
            ):
                await ask("silent")
            await settle()
            await asyncio.to_thread(cluster.check_integrity)

        async def deadly() -> None:
            with pytest.raises(
                RankError,
                match=r"^decode-\d\.0 cannot go on: RuntimeError: the step of broken is broken$",
            ):
                await ask("broken")
            assert await ask("after one death") == fake_answer(request_of("any"))
            since = time.monotonic()
            with pytest.raises(RankError, match=r"^decode-\d\.0: its process is gone: "):
                await ask("exit")
            assert time.monotonic() - since < 10
            assert await ask("after two deaths") == fake_answer(request_of("any"))

        asyncio.run(survivable())
        # "lost once" meets the loss of all three decode ranks, since a retry avoids where one was met
        assert cluster.stats()["prefill-0.0"]["offered"] == 20 + 4 + 4 + 1
        asyncio.run(deadly())
        asyncio.run(shut_down_under_a_request(cluster))


async def shut_down_under_a_request(cluster: Cluster) -> None:
    asked = asyncio.create_task(cluster.generate(request_of("silent")))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(cluster.shutdown)
    with pytest.raises(RankError, match=r"^the cluster was shut down under the request$"):
        await asked
    with pytest.raises(RankError, match=r"^the cluster is shut down$"):
        await cluster.generate(request_of("too late"))


def test_a_truncated_checkpoint_names_rank_and_file_and_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(CHECKPOINT, broken)
    weights = broken / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    before, placed_before = descendants(os.getpid()), placed()
    since = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        Cluster.start(load_cluster_config("local", [*SMALL, f"model.checkpoint={broken}"]))
    assert time.monotonic() - since < 60
    assert "model.safetensors" in str(caught.value)
    assert str(caught.value).startswith(("decode-0.", "prefill-0."))
    assert wait_until(lambda: placed() == placed_before)
    rank_processes = [pid for pid in descendants(os.getpid()) - before if is_rank(pid)]
    assert wait_until(lambda: not alive(rank_processes))


def is_rank(pid: int) -> bool:
    try:
        return "Actor" in Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_port_in_use_and_a_missing_resource_are_named(one_ray: None) -> None:
    before = placed()
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            RankError,
            match=rf"^decode-0\.0: port {port} of host .* give decode\.rendezvous_port another",
        ):
            Cluster.start(fake_config(f"decode.rendezvous_port={port}"), builder=FakeBuilder())
    with pytest.raises(
        ConfigError,
        match=r"^decode instance 0 needs 2 bundles of {CPU: 1, rack9: 1} .* no node offers rack9",
    ):
        Cluster.start(fake_config("decode.placement.resources={rack9: 1}"), builder=FakeBuilder())
    assert wait_until(lambda: placed() == before)
    assert ray.is_initialized()


def test_ctrl_c_during_a_request_leaves_nothing_behind(tmp_path: Path) -> None:
    """A driver with a Ray of its own is interrupted while it waits for an answer that never comes."""
    shared = shared_memory()
    log = tmp_path / "driver.err"
    with log.open("w") as stderr:
        driver = subprocess.Popen(
            [sys.executable, str(DRIVER), str(CHECKPOINT)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        assert driver.stdout is not None
        assert driver.stdout.readline() == "waiting\n", log.read_text()
        family = descendants(driver.pid)
        assert len(family) > 3
        driver.send_signal(signal.SIGINT)
        rest, _ = driver.communicate(timeout=60)
    assert (rest, driver.returncode) == ("interrupted\n", 0), log.read_text()
    assert wait_until(lambda: not alive(family)), f"processes {alive(family)} are left"
    assert shared_memory() <= shared
