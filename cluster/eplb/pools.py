"""Who looks after the experts of each pool: its EPLB actor, or a PoolWatch in this process where nothing moves."""

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, cast

import ray
from ray.exceptions import RayError

from ...transfer.errors import ConfigError, DeadlineError
from ..config import ClusterConfig
from ..ray_errors import translate
from .actor import create_eplb_actor, find_ranks
from .pool import PoolWatch
from .watch import Piece

_STOP_S = 5.0


class ExpertPools:
    """``names``: pool -> names of its ranks' actors, instance by instance. Used on one event loop."""

    def __init__(self, config: ClusterConfig, names: Mapping[str, Sequence[Sequence[str]]]) -> None:
        self._limit_s = config.timeouts.step_s
        self._watches: dict[str, PoolWatch] = {}
        self._actors: dict[str, Any] = {}
        for kind, ranks in names.items():
            pool = config.prefill if kind == "prefill" else config.decode
            if pool.ranks == 1:
                continue
            if pool.eplb.enabled:
                self._actors[kind] = create_eplb_actor(kind, config, ranks)
            else:
                self._watches[kind] = PoolWatch(kind, config, find_ranks(ranks))

    async def report(self) -> dict[str, Any]:
        """Pool -> what ``report`` describes. Raises RankError or DeadlineError where an EPLB actor does not answer."""
        found: dict[str, Any] = {}
        for kind, watch in self._watches.items():
            await watch.collect()
            found[kind] = watch.report()
        for kind, actor in self._actors.items():
            found[kind] = await self._ask(kind, actor.report.remote())
        return found

    async def series(self, kind: str, since: int) -> list[Piece]:
        """What the instances of a pool still have from pass ``since`` on, summed over ranks. Raises ConfigError."""
        if kind in self._watches:
            return await self._watches[kind].series(since)
        if kind in self._actors:
            actor = self._actors[kind]
            return cast(list[Piece], await self._ask(kind, actor.series.remote(since)))
        raise ConfigError(f"no ranks of pool {kind!r} share experts: its instances have one rank")

    async def close(self) -> None:
        """End the actors; what they have learned is saved first, if the configuration names a folder for it."""
        stops = [asyncio.ensure_future(actor.stop.remote()) for actor in self._actors.values()]
        if stops:
            await asyncio.wait(stops, timeout=_STOP_S)
        for actor in self._actors.values():
            with contextlib.suppress(RayError):
                ray.kill(actor)
        self._actors.clear()
        self._watches.clear()

    async def _ask(self, kind: str, answer: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._limit_s):
                return await answer
        except TimeoutError as error:
            raise DeadlineError(
                f"the EPLB actor of pool {kind} gave no answer for {self._limit_s:g} s (timeouts.step_s); ranks go"
                " on with the placement in force"
            ) from error
        except RayError as error:
            raise translate(error, f"the EPLB actor of pool {kind}") from error
