"""The life of a request inside the cluster, on the cluster's event loop.

                 route              prefill                decode
    request --> [book, choose] --> [submit, Offered] --> [submit, Tokens ...] --> Completion
                   ^                                        |
                   `---------- TransferError, a few times --'

A lost rank fails the requests that are on it with RankError, and its whole instance is taken out of service.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

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
from ..transfer.request import Completion, Request, TopLogprobs
from ..transfer.timeline import Timeline
from .config import ClusterConfig
from .instance import RankProcess
from .link import Flight, RankLink
from .rank_loop import Event, Refused
from .ray_errors import translate
from .router.book import Book, Entry, RankBook
from .router.least_load import choose
from .router.types import Decision, RouteQuery


class Dispatcher:
    """Links to all ranks, the router's book, and the requests under way. Made and used on one event loop."""

    def __init__(
        self, config: ClusterConfig, ranks: Mapping[str, RankProcess], context_tokens: int
    ) -> None:
        self._config = config
        self._context_tokens = context_tokens
        self._active: set[str] = set()
        self._turnstile = asyncio.Lock()
        self._freed = asyncio.Event()
        answer_s = config.timeouts.step_s
        self._links = {
            name: RankLink(rank.who, rank.actor, answer_s, self._lose)
            for name, rank in ranks.items()
        }
        books = {kind: self._books(kind) for kind in ("prefill", "decode")}
        self._book = Book(
            books["prefill"],
            books["decode"],
            config.model.block_tokens,
            config.router.decode_overcommit,
        )

    async def serve(self, request: Request, arrived: float) -> Completion:
        """The answer to one request that came at instant ``arrived``. Raises as ``Cluster.generate`` says."""
        if request.request_id in self._active:
            raise InvalidRequestError(
                f"request_id = {request.request_id!r} is not allowed: a request of that id is under way"
            )
        self._active.add(request.request_id)
        try:
            return await self._serve_again(request, arrived)
        finally:
            self._active.discard(request.request_id)

    async def ask(self, method: str) -> dict[str, Any]:
        """What every living rank answers to a call without arguments, by name."""
        alive = {name: link for name, link in self._links.items() if link.failure is None}
        calls = [getattr(link.actor, method).remote() for link in alive.values()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for name, answer in zip(alive, answers, strict=True):
            if isinstance(answer, BaseException):
                raise translate(answer, name) from answer
        return dict(zip(alive, answers, strict=True))

    def _books(self, kind: str) -> list[RankBook]:
        """What the ranks of a pool have to promise: one block and one slot of each are reserved."""
        config = self._config
        pool = config.prefill if kind == "prefill" else config.decode
        slots = pool.num_slots - 1
        return [
            RankBook(
                name=name,
                instance=link.who.instance,
                num_blocks=pool.num_blocks - 1,
                num_slots=slots if kind == "prefill" else min(slots, config.decode.max_batch),
            )
            for name, link in self._links.items()
            if link.who.kind == kind
        ]

    def _lose(self, lost: RankLink) -> None:
        """A rank is gone: its instance cannot step without it, so the others of it are ended, too."""
        self._book.lose_instance(lost.who.instance)
        self._freed.set()
        for link in self._links.values():
            if link.who.instance == lost.who.instance and link.failure is None:
                link.fail(RankError(f"{link.who.name} is ended, because {lost.failure}"))
                ray.kill(link.actor)

    async def _serve_again(self, request: Request, arrived: float) -> Completion:
        avoid: frozenset[str] = frozenset()
        for left in reversed(range(self._config.max_prefills)):
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
            max_tokens=max(1, min(request.sampling.max_tokens, self._context_tokens - length)),
            avoid=avoid,
        )
        limit = self._config.timeouts.route_s
        try:
            async with asyncio.timeout(limit), self._turnstile:
                while True:
                    self._freed.clear()
                    decision = choose(query, self._book.view(), self._config.router)
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
            offered = await self._prefill(request, prefill, timeline)
            self._book.offered(entry)
            completion = await self._decode(request, offered, decode, entry, timeline)
        except BaseException:
            prefill.cancel(request.request_id)
            decode.cancel(request.request_id)
            raise
        prefill.leave(request.request_id)
        decode.leave(request.request_id)
        return completion

    async def _prefill(self, request: Request, link: RankLink, timeline: Timeline) -> Offered:
        flight = Flight(request.request_id)
        link.submit(flight, request)
        event = await flight.next(self._config.timeouts.prefill_s, "prefill")
        if not isinstance(event, Offered):
            raise _reason(event)
        timeline.prefill_started, timeline.offered = event.prefill_started, event.offered
        return event

    async def _decode(
        self, request: Request, offered: Offered, link: RankLink, entry: Entry, timeline: Timeline
    ) -> Completion:
        flight = Flight(request.request_id)
        link.submit(flight, request, offered.handoff)
        ids: list[int] = []
        logprobs: list[float] = []
        top_logprobs: list[TopLogprobs] = []
        limit, phase = self._config.timeouts.first_token_s, "first_token"
        while True:
            event = await flight.next(limit, phase)
            if not isinstance(event, Tokens):
                raise _reason(event)
            ids += event.ids
            logprobs += event.logprobs
            top_logprobs += event.top_logprobs
            self._book.grew(entry, len(event.ids))
            limit, phase = self._config.timeouts.token_s, "token"
            if event.finish_reason is not None:
                timeline.admitted, timeline.first_token = event.admitted, event.first_token
                timeline.last_token = event.last_token
                return Completion(
                    request_id=request.request_id,
                    ids=tuple(ids),
                    finish_reason=event.finish_reason,
                    timeline=timeline,
                    logprobs=tuple(logprobs),
                    top_logprobs=tuple(top_logprobs),
                    prompt_logprobs=offered.prompt_logprobs,
                    num_verified=event.num_verified,
                    num_accepted=event.num_accepted,
                    num_cached=offered.num_cached,
                )


def _reason(event: Event) -> HeadraceError:
    """Why a request ends: the error that an event carries."""
    if isinstance(event, Refused | PrefillFailed | DecodeFailed):
        return event.error
    return RankError(
        f"request {event.request_id!r}: unexpected {type(event).__name__} from its rank"
    )
