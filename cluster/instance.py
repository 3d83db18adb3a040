"""Start-up and end of instances: gangs of rank actors that become ready stage by stage, or not at all.

    placed    Ray holds a bundle for every rank
    up        every rank's process answers
    checked   every rank has looked at its checkpoint
    joined    the ranks of an instance have met at rank 0's node
    loaded    weights are in memory, caches are exposed
    paired    prefill and decode ranks can reach each other's memory, ranks of an instance each other's experts
    ready     turns have begun

All ranks pass a stage before any begins the next one. The first failure is raised with its rank's name; whoever
called then tears everything down.
"""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from ..transfer.errors import DeadlineError
from .actors import create_actor
from .config import ClusterConfig
from .placement import Gang
from .progress import StartProgress
from .rank_host import Loaded, RankBuilder, RankId
from .ray_errors import translate


@dataclass(slots=True, kw_only=True)
class RankProcess:
    """A rank's actor and, once it is up, its process id and node."""

    who: RankId
    actor: Any
    pid: int = 0
    address: str = ""
    node_id: str = ""


class Fleet:
    """Every placement group and actor of one cluster. ``ranks`` is filled by ``start``; ``stop`` empties it."""

    def __init__(
        self, config: ClusterConfig, builder: RankBuilder | None, progress: StartProgress
    ) -> None:
        self._config = config
        self._builder = builder
        self._progress = progress
        self._id = uuid4().hex[:8]
        self._groups: list[PlacementGroup] = []
        self.ranks: dict[str, RankProcess] = {}
        self.context_tokens = 0

    async def start(self, gangs: Sequence[Gang]) -> None:
        """Bring every gang to ready. Raises the first failure; then call ``stop``."""
        timeouts = self._config.timeouts
        await self._place(gangs)
        ranks = self.ranks
        await self._greet()
        await self._stage(
            "checked", {n: r.actor.check.remote() for n, r in ranks.items()}, timeouts.load_s
        )
        await self._join()
        loads = {n: r.actor.load.remote() for n, r in ranks.items()}
        loaded: dict[str, Loaded] = await self._stage("loaded", loads, timeouts.load_s)
        self.context_tokens = min(each.context_tokens for each in loaded.values())
        pairs = {
            name: rank.actor.pair.remote(
                self._peers_of(rank.who, loaded), self._expert_peers_of(rank.who, loaded)
            )
            for name, rank in ranks.items()
        }
        await self._stage("paired", pairs, timeouts.pair_s)
        await self._stage(
            "ready", {n: r.actor.begin.remote() for n, r in ranks.items()}, timeouts.process_s
        )

    def instances(self, kind: str) -> list[list[str]]:
        """The names of a pool's actors, by which Ray knows them, instance by instance, in rank order."""
        found: dict[int, list[RankId]] = {}
        for rank in self.ranks.values():
            if rank.who.kind == kind:
                found.setdefault(rank.who.index, []).append(rank.who)
        return [
            [self._actor_name(who) for who in sorted(found[index], key=lambda who: who.rank)]
            for index in sorted(found)
        ]

    async def stop(self) -> None:
        """End every rank, politely and then not, and give the placement groups back."""
        actors = [process.actor for process in self.ranks.values() if process.pid]
        limit = self._config.timeouts.shutdown_s
        if actors:
            await asyncio.wait(
                [_settled(actor.shutdown.remote()) for actor in actors], timeout=limit
            )
        for process in self.ranks.values():
            ray.kill(process.actor)
        gone = [_settled(process.actor.hello.remote()) for process in self.ranks.values()]
        if gone:
            await asyncio.wait(gone, timeout=limit)
        for group in self._groups:
            remove_placement_group(group)
        self.ranks.clear()
        self._groups.clear()

    def _actor_name(self, who: RankId) -> str:
        return f"headrace-{self._id}-{who.name}"

    async def _place(self, gangs: Sequence[Gang]) -> None:
        """One gang after the other, so that the large ones find room as it was planned."""
        deadline = time.monotonic() + self._config.timeouts.place_s
        for gang in gangs:
            options: dict[str, Any] = {}
            if gang.label_selector:
                options["bundle_label_selector"] = [dict(gang.label_selector)] * len(gang.bundles)
            bundles = [dict(bundle) for bundle in gang.bundles]
            name = f"headrace-{self._id}-{gang.name}"  # a name belongs to one group of the whole Ray cluster
            try:
                group = placement_group(bundles, strategy=gang.strategy, name=name, **options)
            except RayError as error:
                raise translate(error, gang.name) from error
            self._groups.append(group)
            if not await asyncio.to_thread(group.wait, max(0.0, deadline - time.monotonic())):
                raise DeadlineError(
                    f"phase placed: {gang.name} waited longer than timeouts.place_s = "
                    f"{self._config.timeouts.place_s:g} for {len(bundles)} bundles of {bundles[0]}; free in the "
                    f"cluster is {ray.available_resources()}: something else holds what it needs"
                )
        for gang, group in zip(gangs, self._groups, strict=True):
            for rank in range(len(gang.bundles)):
                who = RankId(kind=gang.kind, index=gang.index, rank=rank, size=len(gang.bundles))
                name = self._actor_name(who)
                actor = create_actor(who, self._config, self._builder, group, name)
                self.ranks[who.name] = RankProcess(who=who, actor=actor)
                self._progress.reached(who.name, "placed")

    async def _greet(self) -> None:
        hellos = {name: rank.actor.hello.remote() for name, rank in self.ranks.items()}
        answers = await self._stage("up", hellos, self._config.timeouts.process_s)
        for name, (pid, address, node_id) in answers.items():
            rank = self.ranks[name]
            rank.pid, rank.address, rank.node_id = pid, address, node_id

    async def _join(self) -> None:
        """Rank 0 of each instance offers a port of its own node; bundle 0 is rank 0, so address and node agree."""
        limit = self._config.timeouts.join_s
        ports = {
            rank.who.name: rank.actor.take_port.remote(self._port(rank.who))
            for rank in self.ranks.values()
            if rank.who.rank == 0 and rank.who.size > 1
        }
        meeting = {
            self.ranks[name].who.instance: f"{self.ranks[name].address}:{port}"
            for name, port in (await self._stage("joined", ports, limit, completes=False)).items()
        }
        joins = {
            name: rank.actor.join.remote(meeting.get(rank.who.instance, ""))
            for name, rank in self.ranks.items()
        }
        await self._stage("joined", joins, limit)

    def _port(self, who: RankId) -> int:
        pool = self._config.prefill if who.kind == "prefill" else self._config.decode
        return pool.rendezvous_port + who.index if pool.rendezvous_port else 0

    def _peers_of(self, who: RankId, loaded: Mapping[str, Loaded]) -> list[bytes]:
        return [
            loaded[name].pairing for name, rank in self.ranks.items() if rank.who.kind != who.kind
        ]

    def _expert_peers_of(self, who: RankId, loaded: Mapping[str, Loaded]) -> list[bytes]:
        return [
            loaded[name].expert_pairing
            for name, rank in self.ranks.items()
            if rank.who.instance == who.instance
            and rank.who.rank != who.rank
            and loaded[name].expert_pairing
        ]

    async def _stage(
        self,
        stage: str,
        calls: Mapping[str, Awaitable[Any]],
        timeout_s: float,
        *,
        completes: bool = True,
    ) -> dict[str, Any]:
        """What every rank answers. Raises the first failure in time, translated, with the rank's name."""

        async def one(name: str, call: Awaitable[Any]) -> Any:
            try:
                result = await call
            except Exception as error:
                raise translate(error, name) from error
            if completes:
                self._progress.reached(name, stage)
            return result

        if not calls:
            return {}
        tasks = {name: asyncio.ensure_future(one(name, call)) for name, call in calls.items()}
        done, late = await asyncio.wait(
            tasks.values(), timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in late:
            task.cancel()
        for task in done:
            if task.exception() is not None:
                task.result()
        if late:
            names = ", ".join(name for name, task in tasks.items() if task in late)
            raise DeadlineError(f"phase {stage}: {names} took longer than {timeout_s:g} s")
        return {name: task.result() for name, task in tasks.items()}


def _settled(call: Awaitable[Any]) -> "asyncio.Future[None]":
    """Ends when the call does, whatever comes of it."""

    async def wait() -> None:
        await asyncio.gather(call, return_exceptions=True)

    return asyncio.ensure_future(wait())
