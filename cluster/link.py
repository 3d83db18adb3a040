"""The cluster's end of one rank's actor: one sender and one collector, whatever the number of requests.

    submit, cancel --> outbox --> [sender: one delivery under way] --> actor.submit_many / cancel
    flights <-- by request id <-- [collector: one long poll]       <-- actor.collect

All methods are called on the cluster's event loop. A link that has failed stays failed.
"""

import asyncio
from collections.abc import Callable, Coroutine
from itertools import groupby
from typing import Any

from ..transfer.errors import DeadlineError, HeadraceError, RankError
from .rank_host import RankId
from .rank_loop import Event
from .ray_errors import translate

_POLL_S = 5.0


class Flight:
    """One request's stay at one rank: its events, in order."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._events: asyncio.Queue[Event | HeadraceError] = asyncio.Queue()

    def put(self, event: Event | HeadraceError) -> None:
        """An event of the request, or the reason why no more will come."""
        self._events.put_nowait(event)

    async def next(self, timeout_s: float, phase: str) -> Event:
        """The next event. Raises the reason why none will come, or DeadlineError naming ``phase``."""
        try:
            # asyncio.timeout, since wait_for loses a cancellation that comes together with the event (Python 3.11)
            async with asyncio.timeout(timeout_s):
                event = await self._events.get()
        except TimeoutError as error:
            raise DeadlineError(
                f"phase {phase}: request {self.request_id!r} waited longer than timeouts.{phase}_s = {timeout_s:g}"
            ) from error
        if isinstance(event, HeadraceError):
            raise event
        return event


class RankLink:
    """``on_lost`` is told once, when the rank can no longer be reached or its loop is dead."""

    def __init__(
        self, who: RankId, actor: Any, answer_s: float, on_lost: Callable[["RankLink"], None]
    ) -> None:
        self.who = who
        self.actor = actor
        self.failure: HeadraceError | None = None
        self._answer_s = answer_s
        self._on_lost = on_lost
        self._flights: dict[str, Flight] = {}
        self._outbox: list[tuple[str, Any]] = []
        self._filled = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._guard(job())) for job in (self._send, self._collect)
        ]

    def submit(self, flight: Flight, *item: Any) -> None:
        """Hand a request to the rank; its events go to ``flight``. Raises RankError if the rank is lost."""
        if self.failure is not None:
            raise RankError(str(self.failure))
        self._flights[flight.request_id] = flight
        self._post("submit", item)

    def leave(self, request_id: str) -> None:
        """No more events are wanted; the rank has finished with the request."""
        self._flights.pop(request_id, None)

    def cancel(self, request_id: str) -> None:
        """No more events are wanted, and the rank is told to forget the request."""
        self.leave(request_id)
        if self.failure is None:
            self._post("cancel", request_id)

    def fail(self, error: HeadraceError) -> None:
        """The rank is lost: every flight ends with ``error``. The first error stays."""
        if self.failure is not None:
            return
        self.failure = error
        for flight in self._flights.values():
            flight.put(type(error)(str(error)))
        self._flights.clear()
        self._outbox.clear()
        self._on_lost(self)

    def close(self) -> None:
        """Stop sending and collecting."""
        for task in self._tasks:
            task.cancel()

    def _post(self, what: str, argument: Any) -> None:
        self._outbox.append((what, argument))
        self._filled.set()

    async def _guard(self, job: Coroutine[Any, Any, None]) -> None:
        try:
            await job
        except TimeoutError:
            self.fail(
                RankError(
                    f"{self.who.name} gave no answer for {self._answer_s:g} s (timeouts.step_s)"
                )
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the flights must learn that their rank is lost
            self.fail(translate(error, self.who.name))

    async def _send(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            outbox, self._outbox = self._outbox, []
            for what, run in groupby(outbox, key=lambda command: command[0]):
                arguments = [argument for _, argument in run]
                method = self.actor.submit_many if what == "submit" else self.actor.cancel
                async with asyncio.timeout(self._answer_s):
                    await method.remote(arguments)

    async def _collect(self) -> None:
        while True:
            async with asyncio.timeout(_POLL_S + self._answer_s):
                events = await self.actor.collect.remote(_POLL_S)
            for event in events:
                flight = self._flights.get(event.request_id)
                if flight is not None:
                    flight.put(event)
