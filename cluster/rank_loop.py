"""The loop of one rank: one thread that owns the rank, its network and its transport. Knows no Ray.

    callers' threads                         the loop's thread
    call(fn)       --> commands -->   run commands, in order
    submit_many()  -->                pump()                        answer peers, expire leases
                                      gather(outlook, told)         the whole instance agrees
    collect()      <-- events  <--    step(outlooks, flips), or a short nap

Every rank of an instance gathers the outlooks once a turn, and steps exactly when any of them has work; a rank without
work steps with zero rows. What moves experts between ranks tells its numbers in the same gather, and what follows from
them happens in the same turn on every rank, directly before the pass of its step. If the thread dies, everything that
is asked of the loop later raises RankError with the cause, after the events that happened before.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..model.expert_flip import Flip
from ..transfer.errors import DeadlineError, HeadraceError, RankError

_log = logging.getLogger(__name__)
_NAP_S = 0.001
_LONG_NAP_S = 0.005
_SHORT_NAPS = 500

T = TypeVar("T")


class Event(Protocol):
    """Something that happened to a request; which classes exist is the ranks' business."""

    @property
    def request_id(self) -> str:
        """Whose event this is."""
        ...


class SteppedRank(Protocol):
    """What the loop needs of a prefill or decode rank. All methods are called from the loop's thread."""

    @property
    def outlook(self) -> Sequence[float]:
        """What the other ranks of the instance are told before a turn, always equally many numbers.

        The first is above 0 when a step would do anything here.
        """
        ...

    @property
    def submit(self) -> Callable[..., None]:
        """Take a request: (request) for prefill, (request, handoff) for decode. Raises HeadraceError to refuse it."""
        ...

    def cancel(self, request_id: str) -> None:
        """Forget a request; unknown ids are fine."""
        ...

    def pump(self) -> None:
        """Answer peers and expire leases; cheap."""
        ...

    def step(
        self, outlooks: Sequence[Sequence[float]], flips: Sequence[Flip] = ()
    ) -> Sequence[Event]:
        """One turn of the instance, whose ranks have ``outlooks``; with zero rows if there is no work here.

        ``flips`` run between the pass before and the one of this step, which there is whenever there are flips.
        """
        ...

    def check_integrity(self) -> None:
        """Raises IntegrityError if the rank's books do not balance."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Counters and gauges, plain values."""
        ...

    def close(self) -> None:
        """End the threads and processes that the rank started."""
        ...


class Rebalancer(Protocol):
    """What the loop needs of whatever moves experts. All methods are called from the loop's thread."""

    @property
    def is_moving(self) -> bool:
        """Whether anything is under way."""
        ...

    def poll(self) -> None:
        """Go on with what is under way; cheap."""
        ...

    @property
    def told(self) -> Sequence[float]:
        """What the other ranks are told in this turn, always equally many numbers."""
        ...

    def heed(self, told: Sequence[Sequence[float]]) -> Sequence[Flip]:
        """What follows in this turn from what all ranks told; equally many flips on every rank.

        One that raises ends its rank before it computes anything wrong.
        """
        ...


class Agreement(Protocol):
    """What the loop needs of an expert exchange."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's ``values``, in rank order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A request that its rank did not take."""

    request_id: str
    error: HeadraceError


class RankLoop:
    """Runs commands, and turns once ``begin`` was called, on one thread. ``name`` appears in every message."""

    def __init__(self, name: str) -> None:
        self._name = name
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._news = threading.Condition(lock)
        self._commands: deque[Callable[[], None]] = deque()
        self._waiting: set[Future[Any]] = set()
        self._events: deque[Event] = deque()
        self._closers: list[Callable[[], None]] = []
        self._failure: RankError | None = None
        self._stopping = False
        self._turning: tuple[SteppedRank, Agreement, Rebalancer | None] | None = None
        self._thread = threading.Thread(target=self._run, name=f"loop of {name}", daemon=True)
        self._thread.start()

    def call(self, fn: Callable[[], T], timeout_s: float, phase: str) -> T:
        """Run ``fn`` on the loop's thread between two turns; return, or raise, what it does.

        The loop survives what ``fn`` raises. Raises DeadlineError after ``timeout_s``, RankError if the loop is dead.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn()
            except Exception as error:  # noqa: BLE001 - the caller gets it, whole
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._work:
            self._require_alive()
            self._waiting.add(future)
            self._commands.append(run)
            self._work.notify()
        try:
            return future.result(timeout=timeout_s)
        except TimeoutError as error:
            with self._work:
                if not future.cancel() and future.done():
                    raise
            raise DeadlineError(
                f"{self._name}: {phase} took longer than {timeout_s:g} s"
            ) from error
        finally:
            with self._work:
                self._waiting.discard(future)

    def begin(
        self, rank: SteppedRank, agreement: Agreement, rebalancer: Rebalancer | None = None
    ) -> None:
        """From now on take turns; every rank of the instance must begin, all with a ``rebalancer`` or none."""
        with self._work:
            self._require_alive()
            self._turning = (rank, agreement, rebalancer)
            self._work.notify()

    def submit_many(self, items: Sequence[tuple[Any, ...]]) -> None:
        """Hand requests to the rank, in order; each item begins with its Request. A refusal becomes an event."""

        def run() -> None:
            for item in items:
                try:
                    self._rank().submit(*item)
                except HeadraceError as error:
                    self._publish([Refused(request_id=item[0].request_id, error=error)])

        self._post(run)

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Forget requests; their events stop within a turn."""

        def run() -> None:
            for request_id in request_ids:
                self._rank().cancel(request_id)

        self._post(run)

    def collect(self, timeout_s: float) -> list[Event]:
        """All events not yet collected, as soon as there are any; an empty list after ``timeout_s``.

        Raises RankError when the loop is dead or stopped and its last events were collected.
        """
        with self._news:
            self._news.wait_for(lambda: self._events or self._failure or self._stopping, timeout_s)
            if not self._events:
                self._require_alive()
                return []
            events = list(self._events)
            self._events.clear()
            return events

    def check_integrity(self, timeout_s: float) -> None:
        """Raises IntegrityError if the rank's books do not balance."""
        self.call(lambda: self._rank().check_integrity(), timeout_s, "check_integrity")

    def stats(self, timeout_s: float) -> dict[str, Any]:
        """The rank's counters and gauges."""
        return self.call(lambda: dict(self._rank().stats()), timeout_s, "stats")

    def on_close(self, closer: Callable[[], None]) -> None:
        """Run ``closer`` on the loop's thread when the loop ends, for whatever reason; the last one comes first."""
        self._closers.append(closer)

    def stop(self, timeout_s: float) -> bool:
        """End the loop after the present turn and close what was opened. False if that takes longer."""
        with self._work:
            self._stopping = True
            self._work.notify()
            self._news.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _rank(self) -> SteppedRank:
        if self._turning is None:
            raise RankError(f"{self._name} does not serve yet: it is still starting")
        return self._turning[0]

    @property
    def _is_moving(self) -> bool:
        rebalancer = None if self._turning is None else self._turning[2]
        return rebalancer is not None and rebalancer.is_moving

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise RankError(*self._failure.args)
        if self._stopping:
            raise RankError(f"{self._name} is shut down")

    def _post(self, command: Callable[[], None]) -> None:
        with self._work:
            self._require_alive()
            self._commands.append(command)
            self._work.notify()

    def _publish(self, events: Sequence[Event]) -> None:
        if events:
            with self._news:
                self._events.extend(events)
                self._news.notify_all()

    def _run(self) -> None:
        try:
            self._turns()
        except Exception as error:  # noqa: BLE001 - it is logged, kept, and raised by every later call
            if self._stopping:
                _log.info("%s: stopped during a turn: %s", self._name, error)
            else:
                _log.exception("%s: the loop is dead", self._name)
            failure = RankError(f"{self._name} cannot go on: {type(error).__name__}: {error}")
        else:
            failure = RankError(f"{self._name} is shut down")
        for closer in reversed(self._closers):
            try:
                closer()
            except Exception:  # noqa: BLE001 - the other closers must run, whatever this one met
                _log.exception("%s: closing failed", self._name)
        with self._work:
            self._failure = failure
            for future in self._waiting:
                if not future.done():
                    future.set_exception(failure)
            self._news.notify_all()

    def _turns(self) -> None:
        idle_turns = 0
        while True:
            with self._work:
                if not self._commands and not self._stopping:
                    if self._turning is None:
                        self._work.wait()
                    elif idle_turns:
                        self._work.wait(_NAP_S if idle_turns < _SHORT_NAPS else _LONG_NAP_S)
                if self._stopping:
                    return
                commands = list(self._commands)
                self._commands.clear()
            for command in commands:
                command()
            if self._turning is not None:
                if self._turn(*self._turning) or commands:
                    idle_turns = 0
                elif not self._is_moving:
                    idle_turns += 1
                else:
                    idle_turns = 1

    def _turn(self, rank: SteppedRank, agreement: Agreement, rebalancer: Rebalancer | None) -> bool:
        """Whether the instance stepped."""
        rank.pump()
        flips: Sequence[Flip] = ()
        if rebalancer is None:
            outlooks = agreement.gather(rank.outlook)
        else:
            rebalancer.poll()
            outlook = rank.outlook
            everything = agreement.gather([*outlook, *rebalancer.told])
            outlooks = [numbers[: len(outlook)] for numbers in everything]
            flips = rebalancer.heed([numbers[len(outlook) :] for numbers in everything])
        if not flips and not any(outlook[0] for outlook in outlooks):
            return False
        self._publish(rank.step(outlooks, flips))
        return True
