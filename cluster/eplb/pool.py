"""Looks after the experts of one pool: asks its ranks, lets each instance's controller decide, offers what it decides.

    every collect_s    ranks: expert_series, expert_state  -->  controller
    every interval_s   controller: a plan that pays        -->  ranks: offer_experts

A rank is a handle whose methods have ``remote``, which returns something to await: an actor, or a fake of one. An
instance of which a rank is silent is left out until it answers, and ``lost`` in the report; the others go on.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ...transfer.errors import DeadlineError, HeadraceError
from ..config import ClusterConfig
from ..ray_errors import translate
from .controller import InstanceController, Piece, summed
from .history import TrafficHistory

_log = logging.getLogger(__name__)
_SAVE_S = 30.0


class PoolWatch:
    """``instances``: handles of the ranks of pool ``kind``, instance by instance, in rank order.

    Used on one event loop; ``timer`` is a steady clock in seconds.
    """

    def __init__(
        self,
        kind: str,
        config: ClusterConfig,
        instances: Sequence[Sequence[Any]],
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kind = kind
        self._config = (config.prefill if kind == "prefill" else config.decode).eplb
        self._limit_s = config.timeouts.step_s
        self._ranks = [list(ranks) for ranks in instances]
        self._history = TrafficHistory(self._config, kind)
        self._controllers: list[InstanceController | None] = [None] * len(self._ranks)
        self._lost: set[int] = set()
        self._timer = timer
        self._began = timer()

    async def collect(self) -> None:
        """Bring the books up to date. Never raises because of a rank."""
        await asyncio.gather(*(self._collect(index) for index in range(len(self._ranks))))

    async def rebalance(self) -> None:
        """Decide for every instance, and offer what pays. Never raises because of a rank."""
        await asyncio.gather(*(self._rebalance(index) for index in range(len(self._ranks))))

    async def run(self) -> None:
        """Collects, decides and saves until it is cancelled."""
        saved = self._timer()
        while True:
            await self.collect()
            await self.rebalance()
            if self._timer() - saved >= _SAVE_S:
                saved = self._timer()
                await asyncio.to_thread(self.save)
            await asyncio.sleep(self._config.collect_s)

    def save(self) -> None:
        """Keep what was learned for the next deployment, if the configuration names a folder."""
        seen = [controller.rows for controller in self._controllers if controller is not None]
        if seen:
            self._history.save(max(seen, key=len))

    def report(self) -> dict[str, Any]:
        """The pool's part of the report; instances that never answered are not in it."""
        instances: list[dict[str, Any]] = []
        for index, controller in enumerate(self._controllers):
            found = None if controller is None else controller.report()
            if found is not None:
                instances.append({**found, "lost": index in self._lost})
        return {"enabled": self._config.enabled, "restarted": False, "instances": instances}

    async def series(self, since: int) -> list[Piece]:
        """Passes from ``since`` on that the ranks still know, summed over ranks: a piece an instance.

        Raises RankError or DeadlineError where a rank does not answer.
        """
        pieces: list[Piece] = []
        for index, ranks in enumerate(self._ranks):
            told = await self._ask(index, [rank.expert_series.remote(since) for rank in ranks])
            pieces.append(summed(told))
        return pieces

    async def _collect(self, index: int) -> None:
        ranks, controller = self._ranks[index], self._controllers[index]
        try:
            since = 0 if controller is None else controller.next_step
            # States come last: what is in force in a pass is known once its counts are.
            pieces = await self._ask(index, [rank.expert_series.remote(since) for rank in ranks])
            states = await self._ask(index, [rank.expert_state.remote() for rank in ranks])
        except HeadraceError as error:
            if index not in self._lost:
                _log.warning("%s instance %d is not looked after: %s", self._kind, index, error)
            self._lost.add(index)
            return
        self._lost.discard(index)
        if controller is None:
            layers, experts = states[0]["checksums"].shape
            seed = await asyncio.to_thread(self._history.load, layers, experts)
            controller = InstanceController(index, self._config, seed)
            self._controllers[index] = controller
        controller.heard(states, self._now())
        controller.collected(pieces)

    async def _rebalance(self, index: int) -> None:
        controller = self._controllers[index]
        if controller is None or index in self._lost:
            return
        question = controller.due(self._now())
        if question is None:
            return
        proposal = await asyncio.to_thread(question.answer)
        plan = controller.decided(proposal, self._now())
        if plan is None:
            return
        try:
            ranks = self._ranks[index]
            await self._ask(index, [rank.offer_experts.remote(plan) for rank in ranks])
        except HeadraceError as error:
            controller.refused(str(error), self._now())

    async def _ask(self, index: int, answers: Sequence[Awaitable[Any]]) -> list[Any]:
        """All answers of an instance, in order. Raises the first error, with the rank's name, once all are there."""
        found = await asyncio.gather(
            *(self._in_time(answer) for answer in answers), return_exceptions=True
        )
        for rank, each in enumerate(found):
            if isinstance(each, BaseException):
                raise translate(each, f"{self._kind}-{index}.{rank}") from each
        return found

    async def _in_time(self, answer: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._limit_s):
                return await answer
        except TimeoutError as error:
            late = f"no answer for {self._limit_s:g} s (timeouts.step_s)"
            raise DeadlineError(late) from error

    def _now(self) -> float:
        return self._timer() - self._began
