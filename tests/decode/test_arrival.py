"""The states of an arrival: every move of the picture, and no other."""

import pytest

from headrace.decode.arrival import (
    Accepted,
    Arrival,
    Closed,
    Confirming,
    Draining,
    Dropped,
    Event,
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
from headrace.decode.rooms import Room
from headrace.transfer.errors import IntegrityError
from headrace.transfer.messages import Handoff
from headrace.transfer.request import Request


class Finished:
    """A read that is done."""

    def poll(self) -> bool:
        return True


HANDOFF = Handoff(
    request_id="a",
    generation=1,
    holder="p",
    incarnation="i",
    lease_id="i/1",
    lease_s=5.0,
    layout_fingerprint="f",
    num_tokens=1,
    blocks=(1,),
    slot=1,
    block_checksums=(1,),
    slot_checksum=1,
)
ARRIVAL = Arrival(
    request=Request(request_id="a", prompt_ids=(5, 6)),
    handoff=HANDOFF,
    num_blocks=2,
    can_grow=True,
    since=1.0,
)
ROOM, READ = Room(blocks=(3, 4), slot=2), Finished()
WAITING = Waiting(ARRIVAL)
READING = Reading(ARRIVAL, ROOM, READ, 2.0)
CONFIRMING = Confirming(ARRIVAL, ROOM, 9, 3.0)
READY = Ready(ARRIVAL, ROOM)
DRAINING = Draining(ARRIVAL, ROOM, READ)
CLOSED = Closed(ARRIVAL)

STARTED, READ_DONE = Started(ROOM, READ, 2.0), ReadDone(9, 3.0)
EVENTS: list[Event] = [STARTED, READ_DONE, Accepted(), Dropped(), ReadEnded()]

MOVES: dict[State, dict[Event, State]] = {
    WAITING: {STARTED: READING, Dropped(): CLOSED},
    READING: {READ_DONE: CONFIRMING, Dropped(): DRAINING, ReadEnded(): CLOSED},
    CONFIRMING: {Accepted(): READY, Dropped(): CLOSED},
    READY: {Dropped(): CLOSED},
    DRAINING: {ReadEnded(): CLOSED, Dropped(): DRAINING},
    CLOSED: dict.fromkeys(EVENTS, CLOSED),
}


@pytest.mark.parametrize("state", MOVES, ids=lambda state: type(state).__name__)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_move(state: State, event: Event) -> None:
    if event in MOVES[state]:
        assert advance(state, event) == MOVES[state][event]
    else:
        with pytest.raises(IntegrityError, match=f"{type(event).__name__} cannot happen"):
            advance(state, event)


def test_a_room_is_lent_from_the_read_to_the_end() -> None:
    assert [room_of(state) for state in MOVES] == [None, ROOM, ROOM, ROOM, ROOM, None]
