"""The EPLB actor: a PoolWatch in a process of its own, away from requests and from ranks.

It knows nothing that the ranks, or the folder of `eplb.history`, do not know too: killed at any moment it is started
again by Ray, asks the ranks for what is in force and for their epoch, and goes on. Ranks serve without it.
"""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.metrics import Gauge

from ..config import ClusterConfig
from .controller import Piece
from .pool import PoolWatch

_RESTARTS = -1  # without end
_METRICS_S = 2.0
_METRICS = {
    "balance": "rows of the mean rank over those of the busiest rank, last passes",
    "predicted_balance": "what the plan in force promised",
    "moved_bytes": "bytes of experts that ranks read from each other",
    "flips": "layers that changed their placement",
    "abandoned": "plans that were given up",
    "stall_s": "seconds that passes waited for layers to change",
}


class EplbActor:
    """Watches one pool from its start to ``stop``."""

    def __init__(self, kind: str, config: ClusterConfig, names: Sequence[Sequence[str]]) -> None:
        self._kind = kind
        self._watch = PoolWatch(kind, config, find_ranks(names))
        self._restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._gauges = {
            name: Gauge(f"headrace_expert_{name}", text, tag_keys=("pool", "instance"))
            for name, text in _METRICS.items()
        }
        loop = asyncio.get_running_loop()  # Ray makes an actor with async methods on its loop
        self._jobs = [loop.create_task(job()) for job in (self._watch.run, self._measure)]

    async def pid(self) -> int:
        """Id of the process."""
        return os.getpid()

    async def report(self) -> dict[str, Any]:
        """The pool's part of ``Cluster.eplb_report()``."""
        for job in self._jobs:
            if job.done():
                job.result()  # raises what ended it
        return {**self._watch.report(), "restarted": self._restarted}

    async def series(self, since: int) -> list[Piece]:
        """See ``PoolWatch.series``."""
        return await self._watch.series(since)

    async def stop(self) -> None:
        """End, and keep what was learned if there is a place for it."""
        for job in self._jobs:
            job.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await job
        await asyncio.to_thread(self._watch.save)

    async def _measure(self) -> None:
        while True:
            for instance in self._watch.report()["instances"]:
                tags = {"pool": self._kind, "instance": str(instance["instance"])}
                for name, gauge in self._gauges.items():
                    if instance[name] is not None:
                        gauge.set(float(instance[name]), tags)
            await asyncio.sleep(_METRICS_S)


def find_ranks(names: Sequence[Sequence[str]]) -> list[list[Any]]:
    """Handles of the ranks' actors. Names, unlike handles, outlive whoever made an actor that is started again."""
    return [[ray.get_actor(name) for name in ranks] for ranks in names]


def create_eplb_actor(kind: str, config: ClusterConfig, names: Sequence[Sequence[str]]) -> Any:
    """Ask Ray for the actor of a pool; returns the handle at once. It takes no CPU from the ranks' share.

    ``names`` of the ranks' actors, instance by instance, in rank order.
    """
    return (
        ray.remote(EplbActor)
        .options(num_cpus=0, max_restarts=_RESTARTS, max_task_retries=3)
        .remote(kind, config, names)
    )
