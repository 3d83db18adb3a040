"""Rooms: taken, grown and given back whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.decode.rooms import Room, Rooms
from headrace.tests.fake_network import FakeNetwork
from headrace.transfer.errors import IntegrityError


def rooms_of() -> Rooms:
    return Rooms(FakeNetwork().cache)  # 12 blocks and 4 slots, and those that belong to nobody


def test_growth_keeps_what_there_is_and_adds_behind_it() -> None:
    rooms = rooms_of()
    room = rooms.try_take(3)
    assert room is not None
    grown = rooms.grow(room, 2)
    assert grown is not None
    assert (grown.blocks[:3], grown.slot, len(set(grown.blocks))) == (room.blocks, room.slot, 5)
    assert (rooms.free_blocks, rooms.free_slots) == (7, 3)
    rooms.check_integrity([grown])
    with pytest.raises(IntegrityError):
        rooms.check_integrity([room])
    rooms.give(grown)
    assert (rooms.free_blocks, rooms.free_slots) == (12, 4)


def test_too_much_changes_nothing() -> None:
    rooms = rooms_of()
    room = rooms.try_take(10)
    assert room is not None
    assert rooms.grow(room, 3) is None
    assert rooms.try_take(3) is None
    rooms.check_integrity([room])
    assert rooms.grow(room, 0) == room


def test_a_room_cannot_be_given_twice() -> None:
    rooms = rooms_of()
    room = rooms.try_take(1)
    assert room is not None
    rooms.give(room)
    with pytest.raises(IntegrityError, match="not in use"):
        rooms.give(room)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_block_is_free_or_in_one_room(data: st.DataObject) -> None:
    rooms = rooms_of()
    held: list[Room] = []
    for _ in range(30):
        count = data.draw(st.integers(0, 6))
        action = data.draw(st.sampled_from(["take", "grow", "give"]))
        if action == "take":
            possible = count <= rooms.free_blocks and rooms.free_slots > 0
            room = rooms.try_take(count)
            assert (room is not None) == possible
            held += [room] if room else []
        elif held:
            old = held.pop(data.draw(st.integers(0, len(held) - 1)))
            grown = rooms.grow(old, count) if action == "grow" else None
            if action == "give":
                rooms.give(old)
            else:
                held.append(grown or old)
        rooms.check_integrity(held)
