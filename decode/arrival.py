"""A handoff on its way into a decode rank: its states, what each owns, and the only moves between them.

    Waiting --Started--> Reading --ReadDone--> Confirming --Accepted--> Ready ---> the batch owns the room
       |                    |                      |                      |
       | Dropped            | Dropped              | Dropped              | Dropped
       v                    v                      v                      v
     Closed <---ReadEnded- Draining              Closed                 Closed

Reading and Draining lend their room to the transport: bytes may still be written there. So a Reading that is given up
keeps its room, as Draining, until the read has ended; a room that has no writer goes back at once. Closed is for ever:
it may be told anything and stays what it is.
"""

from dataclasses import dataclass
from typing import assert_never

from ..transfer.backend import Read
from ..transfer.errors import HeadraceError, IntegrityError
from ..transfer.messages import Handoff
from ..transfer.request import Request
from .rooms import Room


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What is arriving.

    It enters with ``num_blocks`` blocks, and ``can_grow`` beyond them; ``since`` is when it came (rank's timer).
    """

    request: Request
    handoff: Handoff
    num_blocks: int
    can_grow: bool
    since: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """In the queue; owns nothing."""

    arrival: Arrival


@dataclass(frozen=True, slots=True)
class Reading:
    """The transport writes into ``room``."""

    arrival: Arrival
    room: Room
    read: Read
    since: float


@dataclass(frozen=True, slots=True)
class Confirming:
    """All bytes are here; the holder was asked whether its lease still lives."""

    arrival: Arrival
    room: Room
    nonce: int
    since: float


@dataclass(frozen=True, slots=True)
class Ready:
    """Checked and confirmed; may join the batch."""

    arrival: Arrival
    room: Room


@dataclass(frozen=True, slots=True)
class Draining:
    """Given up, but the transport may still write into ``room``."""

    arrival: Arrival
    room: Room
    read: Read


@dataclass(frozen=True, slots=True)
class Closed:
    """Given up; owns nothing."""

    arrival: Arrival


State = Waiting | Reading | Confirming | Ready | Draining | Closed


@dataclass(frozen=True, slots=True)
class Started:
    """Room is reserved and the read is under way."""

    room: Room
    read: Read
    now: float


@dataclass(frozen=True, slots=True)
class ReadDone:
    """Every byte is in place, and the holder is asked with ``nonce``."""

    nonce: int
    now: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """The holder says alive and every checksum is right."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Failed or cancelled."""


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """The transport writes no more, whether it got everything or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A request that was given up; its room is free, or will be when the transport lets go."""

    request_id: str
    error: HeadraceError


Event = Started | ReadDone | Accepted | Dropped | ReadEnded


def advance(state: State, event: Event) -> State:
    """The state after ``event``. Raises IntegrityError for a move that the picture above does not have."""
    match state, event:
        case Waiting(arrival), Started(room, read, now):
            return Reading(arrival, room, read, now)
        case Reading(arrival, room), ReadDone(nonce, now):
            return Confirming(arrival, room, nonce, now)
        case Confirming(arrival, room), Accepted():
            return Ready(arrival, room)
        case Reading(arrival, room, read), Dropped():
            return Draining(arrival, room, read)
        case ((Reading(arrival) | Draining(arrival)), ReadEnded()):
            return Closed(arrival)
        case Draining(), Dropped():
            return state
        case ((Waiting(arrival) | Confirming(arrival) | Ready(arrival)), Dropped()):
            return Closed(arrival)
        case Closed(), _:
            return state
        case _:
            raise IntegrityError(f"{type(event).__name__} cannot happen to {state}")


def room_of(state: State) -> Room | None:
    """The memory that a state owns."""
    match state:
        case Reading() | Confirming() | Ready() | Draining():
            return state.room
        case Waiting() | Closed():
            return None
        case _:
            assert_never(state)
