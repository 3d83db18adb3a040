"""Pulls handoffs into a decode rank and trusts nothing before it is checked.

    reserve room -> read -> ask the holder (alive until after the last byte?) -> compare every checksum -> Ready

Everything is polled and nothing blocks. A release goes out when a handoff is Ready or given up, so that the holder
gets its blocks back early; when it is lost, the lease ends by itself. ``arrival`` holds the states.
"""

from collections.abc import Iterator
from itertools import count

from ..model.cache import Cache
from ..transfer.backend import TransferBackend
from ..transfer.checksum import verify, verify_tail
from ..transfer.errors import (
    IntegrityError,
    LeaseExpiredError,
    PeerLostError,
    TransferError,
)
from ..transfer.messages import Handoff, LeaseAlive, LeaseGone
from ..transfer.plan import TailCopy, plan_copies
from ..transfer.request import Request
from .admission import Demand, Supply, count_admissible
from .arrival import (
    Accepted,
    Arrival,
    Closed,
    Confirming,
    Draining,
    Dropped,
    Event,
    Failure,
    ReadDone,
    ReadEnded,
    Reading,
    Ready,
    Started,
    State,
    Waiting,
    advance,
    room_of,
)
from .config import DecodeConfig
from .holders import Holders, check_handoff
from .rooms import Rooms


class Inbox:
    """The arrivals of one rank, in order. ``now`` is the rank's monotonic clock in seconds."""

    def __init__(
        self,
        backend: TransferBackend,
        cache: Cache,
        rooms: Rooms,
        config: DecodeConfig,
    ) -> None:
        self._backend = backend
        self._holders = Holders(backend)
        self._cache = cache
        self._fingerprint = cache.layout.fingerprint()
        self._rooms = rooms
        self._config = config
        self._numbers = count(1)
        self._states: dict[int, State] = {}
        self._failures: list[Failure] = []
        self._bytes_read = 0

    def __contains__(self, request_id: str) -> bool:
        return bool(self._wanted(request_id))

    @property
    def states(self) -> list[State]:
        """Every arrival that is not over, oldest first."""
        return list(self._states.values())

    @property
    def num_arriving(self) -> int:
        """Arrivals that will take a place in the batch: they hold a room, and were not given up."""
        return sum(1 for _ in self._arriving())

    @property
    def num_growing(self) -> int:
        """Those of them that may grow beyond the room they hold."""
        return sum(arrival.can_grow for arrival in self._arriving())

    def wanted_blocks(self, now: float) -> int:
        """Blocks that the next arrival waits for although half of its lease is over; 0 if it can wait on."""
        for state in self._states.values():
            if isinstance(state, Waiting):
                return state.arrival.num_blocks if _is_overdue(state.arrival, now) else 0
        return 0

    def add(
        self, request: Request, handoff: Handoff, num_blocks: int, can_grow: bool, now: float
    ) -> None:
        """Queue a handoff that enters with ``num_blocks`` blocks; ``can_grow`` if its answer may need more."""
        self._states[next(self._numbers)] = Waiting(
            Arrival(
                request=request,
                handoff=handoff,
                num_blocks=num_blocks,
                can_grow=can_grow,
                since=now,
            )
        )

    def cancel(self, request_id: str) -> None:
        """Give up a request without a Failure. Unknown ids are fine."""
        for key in self._wanted(request_id):
            self._drop(key, None)

    def poll(self, now: float, free_places: int, num_growing: int = 0, num_paused: int = 0) -> None:
        """Move every arrival as far as it goes now; start reads for those who may enter.

        The batch has ``free_places``, arrivals not counted, and ``num_growing`` requests that may need more blocks;
        ``num_paused`` requests wait to resume.
        """
        for peer, answer in self._holders.answers():
            self._answered(peer, answer)
        for key, state in list(self._states.items()):
            match state:
                case Reading() | Draining():
                    self._poll_read(key, state, now)
                case Confirming() if now - state.since > self._config.confirm_timeout_s:
                    self._drop(key, self._late("confirm", state.arrival, "confirm_timeout_s"))
                case Waiting() if now - state.arrival.since >= state.arrival.handoff.lease_s:
                    self._drop(key, LeaseExpiredError("the lease ended before there was room here"))
                case _:
                    pass
        self._admit(now, free_places, num_growing, num_paused)

    def take_ready(self) -> list[Ready]:
        """Hand over what may join the batch; the caller owns the rooms."""
        ready = {key: state for key, state in self._states.items() if isinstance(state, Ready)}
        for key in ready:
            del self._states[key]
        return list(ready.values())

    def take_failures(self) -> list[Failure]:
        """What was given up since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def stats(self) -> dict[str, int]:
        """Arrivals by kind, and what was read since the start."""
        states = self._states.values()
        waiting = sum(isinstance(state, Waiting) for state in states)
        draining = sum(isinstance(state, Draining) for state in states)
        return {
            "waiting": waiting,
            "transferring": len(states) - waiting - draining,
            "draining": draining,
            "bytes_read": self._bytes_read,
            "bad_messages": self._holders.bad_messages,
        }

    def _wanted(self, request_id: str) -> list[int]:
        return [
            key
            for key, state in self._states.items()
            if state.arrival.request.request_id == request_id and not isinstance(state, Draining)
        ]

    def _arriving(self) -> Iterator[Arrival]:
        for state in self._states.values():
            if isinstance(state, Reading | Confirming | Ready):
                yield state.arrival

    def _admit(self, now: float, free_places: int, num_growing: int, num_paused: int) -> None:
        waiting = [(key, s.arrival) for key, s in self._states.items() if isinstance(s, Waiting)]
        admissible = count_admissible(
            [
                Demand(
                    num_blocks=arrival.num_blocks,
                    can_grow=arrival.can_grow,
                    overdue=_is_overdue(arrival, now),
                )
                for _, arrival in waiting
            ],
            Supply(
                num_blocks=self._rooms.num_blocks,
                free_blocks=self._rooms.free_blocks,
                free_slots=self._rooms.free_arrivals,
                free_places=free_places - self.num_arriving,
                num_growing=num_growing + self.num_growing,
                num_paused=num_paused,
            ),
        )
        for key, arrival in waiting[:admissible]:
            self._start(key, arrival, now)

    def _start(self, key: int, arrival: Arrival, now: float) -> None:
        handoff = arrival.handoff
        room = self._rooms.try_take(arrival.num_blocks, with_tail=True)
        if room is None:
            raise IntegrityError(f"admitted {handoff.request_id!r} without room for it")
        try:
            layout = self._cache.layout
            check_handoff(arrival.request, handoff, layout, self._fingerprint, self._backend.peers)
            plan = plan_copies(
                layout,
                handoff.num_tokens,
                handoff.blocks,
                handoff.slot,
                room.blocks,
                room.slot,
                None if room.tail is None else TailCopy(handoff.tail_rows, handoff.tail, room.tail),
            )
            read = self._backend.start_read(handoff.holder, plan.copies)
        except TransferError as error:
            self._rooms.give(room)
            self._drop(key, error)
            return
        self._bytes_read += plan.total_bytes
        self._move(key, Started(room, read, now))

    def _poll_read(self, key: int, state: Reading | Draining, now: float) -> None:
        if isinstance(state, Draining):
            if state.read.quiet():
                self._move(key, ReadEnded())
            return
        try:
            done = state.read.poll()
        except TransferError as error:  # a read that failed may still be writing: it drains
            self._drop(key, error)
            if state.read.quiet():
                self._move(key, ReadEnded())
            return
        if done:
            self._confirm(key, state, now)
        elif now - state.since > self._config.transfer_timeout_s:
            self._drop(key, self._late("read", state.arrival, "transfer_timeout_s"))

    def _confirm(self, key: int, state: Reading, now: float) -> None:
        nonce = next(self._numbers)
        self._move(key, ReadDone(nonce, now))
        try:
            self._holders.confirm(state.arrival.handoff, nonce)
        except PeerLostError as error:
            self._drop(key, error)

    def _answered(self, peer: str, answer: LeaseAlive | LeaseGone) -> None:
        for key, state in list(self._states.items()):
            if not isinstance(state, Confirming) or state.nonce != answer.nonce:
                continue
            handoff = state.arrival.handoff
            if (peer, answer.lease_id) != (handoff.holder, handoff.lease_id):
                continue
            if isinstance(answer, LeaseGone):
                self._drop(key, LeaseExpiredError(f"{peer} keeps it no longer: {answer.reason}"))
            else:
                self._accept(key, state)

    def _accept(self, key: int, state: Confirming) -> None:
        handoff = state.arrival.handoff
        try:
            verify(
                self._cache.layout,
                self._cache.blocks,
                state.room.blocks,
                self._cache.slots,
                state.room.slot,
                handoff.num_tokens,
                handoff.block_checksums,
                handoff.slot_checksum,
            )
            if state.room.tail is not None:
                verify_tail(
                    self._cache.layout,
                    self._cache.tails,
                    state.room.tail,
                    handoff.tail_rows,
                    handoff.tail_checksum,
                )
        except TransferError as error:
            self._drop(key, error)
            return
        self._move(key, Accepted())
        self._holders.release(handoff)

    def _drop(self, key: int, error: TransferError | None) -> None:
        """Give up an arrival, once: a second reason is not news."""
        state = self._states[key]
        if isinstance(state, Draining):
            return
        self._move(key, Dropped())
        self._holders.release(state.arrival.handoff)
        if error is not None:
            request_id = state.arrival.request.request_id
            self._failures.append(Failure(request_id=request_id, error=error))

    def _move(self, key: int, event: Event) -> None:
        before = self._states.get(key)
        if before is None:
            return
        after = advance(before, event)
        room = room_of(before)
        if room is not None and room_of(after) is None:
            self._rooms.give(room)
        if isinstance(after, Closed):
            del self._states[key]
        else:
            self._states[key] = after

    def _late(self, phase: str, arrival: Arrival, setting: str) -> PeerLostError:
        return PeerLostError(
            f"phase {phase}: no answer from {arrival.handoff.holder} within decode.{setting} = "
            f"{getattr(self._config, setting)} s"
        )


def _is_overdue(arrival: Arrival, now: float) -> bool:
    """Whether an arrival has waited for half of its lease."""
    return now - arrival.since >= arrival.handoff.lease_s / 2
