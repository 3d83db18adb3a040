"""The cluster as its users see it: start it, ask it, shut it down.

    generate()          Cluster (one thread with an event loop)                       ranks
       |--- request --->|  route: choose a prefill and a decode rank with room
                        |--- submit --------------------------------------------> prefill
                        |<-- Offered(handoff) ----------------------------------- prefill
                        |--- submit with handoff -------------------------------> decode   reads, confirms, releases
                        |<-- Tokens, Tokens ... finish_reason ------------------- decode
       |<- Completion --|

A transfer that fails sends the request back to route, a bounded number of times. A lost rank fails the requests that
are on it with RankError, and its whole instance is taken out of service.
"""

import asyncio
import atexit
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import ray

from ..decode.events import DecodeFailed, Tokens
from ..prefill.events import Offered, PrefillFailed
from ..transfer.errors import (
    DeadlineError,
    HeadraceError,
    InvalidRequestError,
    RankError,
    TransferError,
)
from ..transfer.messages import Handoff
from ..transfer.request import Completion, Request, TopLogprobs
from ..transfer.timeline import Timeline
from .config import ClusterConfig, checkpoint_dir
from .instance import Fleet
from .link import Flight, RankLink
from .placement import node_list, plan_gangs
from .progress import SilentProgress, StartProgress
from .rank_host import RankBuilder
from .rank_loop import Event, Refused
from .ray_errors import translate
from .ray_session import RaySession, open_ray
from .router.book import Book, Entry, RankBook
from .router.least_load import choose
from .router.types import Decision, RouteQuery

T = TypeVar("T")
_MARGIN_S = 5.0


class Cluster:
    """A running deployment. Use as a context manager, or call ``shutdown`` when done.

    ``generate`` may be awaited from any event loop, by any number of tasks at a time.
    """

    def __init__(self, config: ClusterConfig, session: RaySession, fleet: Fleet) -> None:
        self.config = config
        self._session = session
        self._fleet = fleet
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="headrace cluster", daemon=True
        )
        self._thread.start()
        self._links: dict[str, RankLink] = {}
        self._book = Book((), (), config.model.block_tokens)
        self._active: set[str] = set()
        self._turnstile = asyncio.Lock()
        self._freed = asyncio.Event()
        self._closed = False
        atexit.register(self.shutdown)

    @classmethod
    def start(
        cls,
        config: ClusterConfig,
        progress: StartProgress | None = None,
        builder: RankBuilder | None = None,
    ) -> "Cluster":
        """Connect to Ray or start it, place the instances, and bring every rank to ready.

        Without a ``builder``, ranks are those of the configured checkpoint.
        Raises ConfigError where the cluster cannot hold the deployment, CheckpointError, RankError or DeadlineError
        naming the first rank that fails. Nothing is left running then.
        """
        progress = progress or SilentProgress()
        session = open_ray(config)
        cluster: Cluster | None = None
        try:
            gangs = plan_gangs(config, node_list(ray.nodes()))
            fleet = Fleet(config, builder, progress)
            cluster = cls(config, session, fleet)
            cluster._run(fleet.start(gangs))
            cluster._run(cluster._open_links())
        except BaseException:
            if cluster is None:
                session.close()
            else:
                cluster.shutdown()
            raise
        finally:
            progress.close()
        return cluster

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    @property
    def checkpoint_dir(self) -> Path:
        """Where tokenizer and model configuration lie on this host."""
        return checkpoint_dir(self.config)

    @property
    def num_actors(self) -> int:
        """Rank actors that were started."""
        return len(self._fleet.ranks)

    def nodes(self) -> dict[str, str]:
        """Rank name -> id of the Ray node on which it runs."""
        return {name: rank.node_id for name, rank in self._fleet.ranks.items()}

    async def generate(self, request: Request) -> Completion:
        """The answer to one request.

        Raises RequestError for a request that cannot be served, TransferError when every prefill of it was lost on
        the way, DeadlineError naming the phase, RankError when a rank died under it. Cancelling the awaiting task frees
        the request everywhere.
        """
        if self._closed:
            raise RankError("the cluster is shut down")
        future = asyncio.run_coroutine_threadsafe(self._serve(request, time.time()), self._loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise RankError("the cluster was shut down under the request") from None
            raise

    def stats(self) -> dict[str, dict[str, Any]]:
        """Counters and gauges of every living rank, by name."""
        return self._run(self._ask("stats"))

    def check_integrity(self) -> None:
        """Raises IntegrityError if the books of any living rank do not balance."""
        self._run(self._ask("check_integrity"))

    def shutdown(self) -> None:
        """End every rank, give the placement back, and end Ray if it was started here. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        pids = [rank.pid for rank in self._fleet.ranks.values() if rank.pid]
        try:
            self._run(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_MARGIN_S)
            self._session.close(pids)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work`` on the cluster's loop and wait; if the waiting is interrupted, the work is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _open_links(self) -> None:
        answer_s = self.config.timeouts.step_s
        books: dict[str, list[RankBook]] = {"prefill": [], "decode": []}
        for name, rank in self._fleet.ranks.items():
            self._links[name] = RankLink(rank.who, rank.actor, answer_s, self._lose)
            pool = self.config.prefill if rank.who.kind == "prefill" else self.config.decode
            places = self.config.decode.max_batch if rank.who.kind == "decode" else pool.num_slots
            books[rank.who.kind].append(
                RankBook(
                    name=name,
                    instance=rank.who.instance,
                    num_blocks=pool.num_blocks - 1,
                    num_slots=min(pool.num_slots - 1, places),
                )
            )
        self._book = Book(books["prefill"], books["decode"], self.config.model.block_tokens)

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=_MARGIN_S)
        await self._fleet.stop()

    async def _ask(self, method: str) -> dict[str, Any]:
        alive = {name: link for name, link in self._links.items() if link.failure is None}
        calls = [getattr(link.actor, method).remote() for link in alive.values()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for name, answer in zip(alive, answers, strict=True):
            if isinstance(answer, BaseException):
                raise translate(answer, name) from answer
        return dict(zip(alive, answers, strict=True))

    def _lose(self, lost: RankLink) -> None:
        """A rank is gone: its instance cannot step without it, so the others of it are ended, too."""
        self._book.lose_instance(lost.who.instance)
        self._freed.set()
        for link in self._links.values():
            if link.who.instance == lost.who.instance and link.failure is None:
                link.fail(RankError(f"{link.who.name} is ended, because {lost.failure}"))
                ray.kill(link.actor)

    async def _serve(self, request: Request, arrived: float) -> Completion:
        if request.request_id in self._active:
            raise InvalidRequestError(
                f"request_id = {request.request_id!r} is not allowed: a request of that id is under way"
            )
        self._active.add(request.request_id)
        try:
            return await self._serve_again(request, arrived)
        finally:
            self._active.discard(request.request_id)

    async def _serve_again(self, request: Request, arrived: float) -> Completion:
        avoid: frozenset[str] = frozenset()
        for left in reversed(range(self.config.max_prefills)):
            decision, entry = await self._route(request, avoid)
            try:
                timeline = Timeline(arrived=arrived, routed=time.time())
                return await self._attempt(request, decision, entry, timeline)
            except TransferError:
                if not left:
                    raise
                avoid |= {decision.prefill, decision.decode}
            finally:
                self._book.close(entry)
                self._freed.set()
        raise AssertionError("max_prefills is at least 1")

    async def _route(self, request: Request, avoid: frozenset[str]) -> tuple[Decision, Entry]:
        """Wait, first come first served, for a decode rank with room, and promise it to the request."""
        length = len(request.prompt_ids)
        query = RouteQuery(
            request_id=request.request_id,
            prompt_tokens=length,
            max_tokens=max(
                1, min(request.sampling.max_tokens, self._fleet.context_tokens - length)
            ),
            avoid=avoid,
        )
        limit = self.config.timeouts.route_s
        try:
            async with asyncio.timeout(limit), self._turnstile:
                while True:
                    self._freed.clear()
                    decision = choose(query, self._book.view(), self.config.router)
                    room = {
                        candidate.rank: candidate.has_room
                        for candidate in decision.decode_candidates
                    }
                    if room[decision.decode] or self._book.is_idle(decision.decode):
                        return decision, self._book.open(query, decision)
                    await self._freed.wait()
        except TimeoutError as error:
            raise DeadlineError(
                f"phase route: request {request.request_id!r} waited longer than timeouts.route_s = {limit:g} for "
                "room on a decode rank: send less at a time, or add decode ranks"
            ) from error

    async def _attempt(
        self, request: Request, decision: Decision, entry: Entry, timeline: Timeline
    ) -> Completion:
        """Prefill, then decode. Whatever ends it early is cancelled on both sides."""
        prefill, decode = self._links[decision.prefill], self._links[decision.decode]
        try:
            handoff = await self._prefill(request, prefill, timeline)
            self._book.offered(entry)
            completion = await self._decode(request, handoff, decode, entry, timeline)
        except BaseException:
            prefill.cancel(request.request_id)
            decode.cancel(request.request_id)
            raise
        prefill.leave(request.request_id)
        decode.leave(request.request_id)
        return completion

    async def _prefill(self, request: Request, link: RankLink, timeline: Timeline) -> Handoff:
        flight = Flight(request.request_id)
        link.submit(flight, request)
        event = await flight.next(self.config.timeouts.prefill_s, "prefill")
        if not isinstance(event, Offered):
            raise _reason(event)
        timeline.prefill_started, timeline.offered = event.prefill_started, event.offered
        return event.handoff

    async def _decode(
        self, request: Request, handoff: Handoff, link: RankLink, entry: Entry, timeline: Timeline
    ) -> Completion:
        flight = Flight(request.request_id)
        link.submit(flight, request, handoff)
        ids: list[int] = []
        top_logprobs: list[TopLogprobs] = []
        limit, phase = self.config.timeouts.first_token_s, "first_token"
        while True:
            event = await flight.next(limit, phase)
            if not isinstance(event, Tokens):
                raise _reason(event)
            ids += event.ids
            top_logprobs += event.top_logprobs
            self._book.grew(entry, len(event.ids))
            limit, phase = self.config.timeouts.token_s, "token"
            if event.finish_reason is not None:
                timeline.admitted, timeline.first_token = event.admitted, event.first_token
                timeline.last_token = event.last_token
                return Completion(
                    request_id=request.request_id,
                    ids=tuple(ids),
                    finish_reason=event.finish_reason,
                    timeline=timeline,
                    top_logprobs=tuple(top_logprobs),
                )


def _reason(event: Event) -> HeadraceError:
    """Why a request ends: the error that an event carries."""
    if isinstance(event, Refused | PrefillFailed | DecodeFailed):
        return event.error
    return RankError(
        f"request {event.request_id!r}: unexpected {type(event).__name__} from its rank"
    )
