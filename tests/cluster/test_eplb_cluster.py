"""Rebalancing in a whole cluster: experts move between processes while requests run, and nobody's tokens tell."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from headrace.cluster.cluster import Cluster
from headrace.cluster.config import ClusterConfig, load_cluster_config
from headrace.cluster.ray_session import open_ray
from headrace.tests.cluster.ray_support import (
    SMALL,
    alive,
    answers_of_one_process,
    descendants,
    request_of,
    wait_until,
)
from headrace.transfer.errors import RankError
from headrace.transfer.request import Completion, Request

EAGER = (
    "decode.ranks=2",
    "decode.num_slots=24",
    "decode.max_batch=20",
    "decode.experts.redundant=4",
    "decode.eplb.enabled=true",
    "decode.eplb.interval_s=0.3",
    "decode.eplb.collect_s=0.1",
    "decode.eplb.min_steps=5",
    "decode.eplb.keep_steps=10",
    "decode.eplb.min_gain=0",
    "decode.eplb.move_cost_passes=0",
)


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    others = descendants(os.getpid())
    session = open_ray(
        load_cluster_config("local", [*SMALL, "ray.address=local", "ray.local.num_cpus=8"])
    )
    started = descendants(os.getpid())
    yield
    started = (started | descendants(os.getpid())) - others
    session.close()
    assert wait_until(lambda: not alive(started)), f"processes {alive(started)} are left"


def config_of(*settings: str) -> ClusterConfig:
    return load_cluster_config("local", [*SMALL, *EAGER, *settings])


def requests(count: int, max_tokens: int = 24) -> list[Request]:
    return [
        request_of(f"r{n}", 5 + 7 * n % 60, max_tokens, temperature=0.8 * (n % 2))
        for n in range(count)
    ]


async def ask(cluster: Cluster, asked: list[Request], at_once: int = 16) -> list[Any]:
    """Completions and errors, in order; so many under way at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(request: Request) -> Completion:
        async with gate:
            return await cluster.generate(request)

    return await asyncio.gather(*(one(request) for request in asked), return_exceptions=True)


def decode_report(cluster: Cluster) -> dict[str, Any]:
    pool = cluster.eplb_report()["decode"]
    return {**pool["instances"][0], "restarted": pool["restarted"]} if pool["instances"] else {}


def eplb_pid(cluster: Cluster) -> int:
    pools = cluster._experts
    assert pools is not None
    return ray.get(pools._actors["decode"].pid.remote())


def test_experts_move_and_the_actor_dies_while_tokens_stay_the_same() -> None:
    asked = requests(60)
    expected = answers_of_one_process(asked)
    with Cluster.start(config_of()) as cluster:
        first = asyncio.run(ask(cluster, asked))
        assert wait_until(lambda: decode_report(cluster).get("flips", 0) > 0)
        before = decode_report(cluster)
        os.kill(eplb_pid(cluster), signal.SIGKILL)
        second = asyncio.run(ask(cluster, [_renamed(request) for request in asked]))
        assert wait_until(lambda: decode_report(cluster).get("restarted", False))
        third = asyncio.run(ask(cluster, [_renamed(_renamed(request)) for request in asked]))
        assert wait_until(lambda: decode_report(cluster)["epoch"] > before["epoch"])
        after = decode_report(cluster)
        stats = [cluster.stats()[f"decode-0.{rank}"] for rank in range(2)]
        cluster.check_integrity()
    for answers in (first, second, third):
        assert [answer.ids for answer in answers] == expected
    assert before["moved_experts"] > 0 and after["moved_bytes"] > before["moved_bytes"]
    assert before["restarted"] is False
    assert len({each["experts_epoch"] for each in stats}) == 1
    assert all(each["experts_flips"] >= after["flips"] for each in stats)
    assert any(entry["outcome"] == "moved" for entry in before["history"])


def _renamed(request: Request) -> Request:
    return Request(
        request_id=f"{request.request_id}+",
        prompt_ids=request.prompt_ids,
        sampling=request.sampling,
    )


def test_a_decode_rank_killed_in_a_move_fails_its_requests_and_nothing_hangs() -> None:
    with Cluster.start(config_of("decode.eplb.bandwidth_mib_per_s=0.02")) as cluster:
        (killed,) = (
            rank for rank in cluster._fleet.ranks.values() if rank.who.name == "decode-0.1"
        )

        async def run() -> list[Any]:
            work = asyncio.create_task(ask(cluster, requests(200)))
            deadline = time.monotonic() + 60
            while not await asyncio.to_thread(_is_moving, cluster):
                assert time.monotonic() < deadline, "nothing moves"
                await asyncio.sleep(0.05)
            os.kill(killed.pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                return await work

        answers = asyncio.run(run())
        report = cluster.eplb_report()["decode"]
    errors = [answer for answer in answers if not isinstance(answer, Completion)]
    assert errors and all(isinstance(error, RankError) for error in errors)
    assert any("decode-0.1" in str(error) for error in errors)
    assert report["enabled"] is True, "the actor goes on and says what it knew"


def _is_moving(cluster: Cluster) -> bool:
    return any(entry["outcome"] == "moving" for entry in decode_report(cluster).get("history", []))
