"""A pool's ranks as they are asked: some answer, some are slow, some are gone; instances do not wait for each other."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cluster.config import load_cluster_config
from headrace.cluster.eplb.history import TrafficHistory
from headrace.cluster.eplb.pool import PoolWatch
from headrace.model.expert_plan import ExpertPlan
from headrace.transfer.errors import DeadlineError, RankError, StalePlanError

from .reports import EXPERTS, LAYERS, RANKS, rows_of
from .test_controller import state

CONFIG = load_cluster_config(
    "local_ep4",
    ["decode.eplb.interval_s=1000", "decode.eplb.keep_steps=60", "timeouts.step_s=0.2"],
)


@dataclass
class Call:
    """``method.remote(...)`` of an actor."""

    answer: Callable[..., Awaitable[Any]]

    def remote(self, *arguments: object) -> Awaitable[Any]:
        return self.answer(*arguments)


@dataclass
class Rank:
    """A rank of the fake instance; ``wrong`` is raised by every answer, ``slow`` is how long they take."""

    rank: int
    rows: np.ndarray
    said: dict[str, Any] = field(default_factory=state)
    wrong: Exception | None = None
    refusal: Exception | None = None
    slow: float = 0.0
    plans: list[ExpertPlan] = field(default_factory=list[ExpertPlan])

    def __post_init__(self) -> None:
        self.expert_series = Call(self._series)
        self.expert_state = Call(self._state)
        self.offer_experts = Call(self._offer)

    async def _series(self, since: int) -> tuple[np.ndarray, np.ndarray]:
        await self._be()
        return np.arange(since, len(self.rows)), self.rows[since:]

    async def _state(self) -> dict[str, Any]:
        await self._be()
        return self.said

    async def _offer(self, plan: bytes) -> None:
        await self._be()
        if self.refusal is not None:
            raise self.refusal
        self.plans.append(ExpertPlan.from_bytes(plan))

    async def _be(self) -> None:
        await asyncio.sleep(self.slow)
        if self.wrong is not None:
            raise self.wrong


def instance(steps: int = 40) -> list[Rank]:
    rows = rows_of(steps)
    return [Rank(rank, rows if rank == 0 else np.zeros_like(rows)) for rank in range(RANKS)]


def reports(watch: PoolWatch) -> dict[int, dict[str, Any]]:
    return {each["instance"]: each for each in watch.report()["instances"]}


async def look(watch: PoolWatch) -> None:
    await watch.collect()
    await watch.rebalance()


def test_every_instance_gets_its_own_plan() -> None:
    ranks = [instance(), instance()]
    ranks[1][0].rows = rows_of(40, seed=9)
    watch = PoolWatch("decode", CONFIG, ranks)
    asyncio.run(look(watch))
    plans = [[rank.plans for rank in each] for each in ranks]
    assert all(len(told) == 1 for each in plans for told in each)
    assert (plans[0][0][0].placement.slots == plans[0][3][0].placement.slots).all()
    assert (plans[0][0][0].placement.slots != plans[1][0][0].placement.slots).any()
    assert watch.report()["enabled"] is True
    assert [each["history"][0]["outcome"] for each in reports(watch).values()] == ["moving"] * 2


@pytest.mark.parametrize("slow", [False, True])
def test_an_instance_with_a_silent_rank_is_left_out_until_it_answers(slow: bool) -> None:
    ranks = [instance(), instance()]
    watch = PoolWatch("decode", CONFIG, ranks)
    ranks[0][2].wrong, ranks[0][2].slow = (None, 5.0) if slow else (RankError("gone"), 0.0)
    asyncio.run(look(watch))
    assert list(reports(watch)) == [1]
    assert ranks[1][0].plans and not ranks[0][0].plans
    ranks[0][2].wrong, ranks[0][2].slow = None, 0.0
    asyncio.run(look(watch))
    assert list(reports(watch)) == [0, 1]
    assert ranks[0][0].plans


def test_a_rank_that_dies_later_keeps_its_report() -> None:
    ranks = [instance()]
    watch = PoolWatch("decode", CONFIG, ranks)
    asyncio.run(watch.collect())
    ranks[0][1].wrong = RankError("gone")
    asyncio.run(look(watch))
    found = reports(watch)[0]
    assert (found["last_step"], found["lost"]) == (39, True)
    ranks[0][1].wrong = None
    asyncio.run(watch.collect())
    assert reports(watch)[0]["lost"] is False
    assert not any(rank.plans for rank in ranks[0])


def test_a_refusal_is_booked_and_nothing_is_raised() -> None:
    ranks = [instance()]
    ranks[0][3].refusal = StalePlanError("plan of epoch 1: this rank knows of epoch 5")
    watch = PoolWatch("decode", CONFIG, ranks)
    asyncio.run(look(watch))
    (entry,) = reports(watch)[0]["history"]
    assert entry["outcome"] == "refused"
    assert entry["reason"] == "decode-0.3: plan of epoch 1: this rank knows of epoch 5"


def test_the_series_is_what_the_ranks_still_know() -> None:
    ranks = [instance(30), instance(10)]
    ranks[0][1].rows = rows_of(30, seed=3)
    watch = PoolWatch("decode", CONFIG, ranks)
    (steps, rows), (others, _) = asyncio.run(watch.series(5))
    assert (len(steps), len(others)) == (25, 5)
    assert (rows == rows_of(30)[5:] + rows_of(30, seed=3)[5:]).all()
    ranks[1][0].wrong = RankError("gone")
    with pytest.raises(RankError, match=r"decode-1\.0: gone"):
        asyncio.run(watch.series(0))
    ranks[1][0].wrong, ranks[1][0].slow = None, 5.0
    with pytest.raises(DeadlineError, match=r"decode-1\.0: no answer for 0\.2 s"):
        asyncio.run(watch.series(0))


def test_it_runs_until_it_is_cancelled() -> None:
    ranks = [instance()]
    quick = load_cluster_config("local_ep4", ["decode.eplb.collect_s=0.01"])
    watch = PoolWatch("decode", quick, ranks)

    async def run() -> None:
        job = asyncio.create_task(watch.run())
        while not ranks[0][0].plans:
            await asyncio.sleep(0.01)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_short_life_does_not_shrink_the_history(tmp_path: Path) -> None:
    keeping = load_cluster_config(
        "local_ep4",
        [f"decode.eplb.history={tmp_path}", "decode.eplb.traffic_class=chat"],
    )
    for steps in (40, 3):
        watch = PoolWatch("decode", keeping, [instance(steps)])
        asyncio.run(watch.collect())
        watch.save()
    found = TrafficHistory(keeping.decode.eplb, "decode").load(LAYERS, EXPERTS)
    assert found is not None
    assert len(found) == 43


def test_shapes_are_those_of_the_model() -> None:
    watch = PoolWatch("decode", CONFIG, [instance()])
    asyncio.run(watch.collect())
    found = reports(watch)[0]
    assert np.array(found["placement"]).shape[0] == LAYERS
    assert found["num_experts"] == EXPERTS
