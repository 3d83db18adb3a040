"""Requests that joined a rank: what pausing and resuming does to their memory."""

from dataclasses import dataclass, field

import torch

from headrace.decode.host_store import HostStore
from headrace.decode.lane import Lane
from headrace.decode.pause_meter import PauseMeter
from headrace.decode.pressure import Decision, Means, Pause
from headrace.decode.residents import Resident, Residents
from headrace.decode.rooms import Rooms
from headrace.decode.stops import StopChecker
from headrace.tests.fake_network import FakeNetwork

from .conftest import make_request


@dataclass
class Shelf:
    """One resident with three blocks of random bytes, on a rank of 12 blocks and 4 slots."""

    meter: PauseMeter = field(default_factory=PauseMeter)

    def __post_init__(self) -> None:
        self.cache = FakeNetwork().cache
        self.cache.blocks.random_(0, 256)
        self.cache.slots.random_(0, 256)
        self.rooms = Rooms(self.cache)
        self.store = HostStore(self.cache.layout, 1 << 20)
        self.residents = Residents(self.cache, self.rooms, self.store)
        request = make_request("a", 9)
        room = self.rooms.try_take(3)
        assert room is not None
        self.one = Resident(
            lane=Lane(request=request, slot=room.slot, tail_start=0),
            age=1,
            limit=5,
            stops=StopChecker(request.sampling, 1, 5),
            admitted=0.0,
            room=room,
        )
        self.residents.join(self.one)

    def pause(self, means: Means) -> None:
        pauses = (Pause(request_id="a", means=means),)
        self.residents.apply(Decision(pauses=pauses), self.meter)
        self.residents.check_integrity([])
        assert (self.rooms.free_blocks, self.rooms.free_slots) == (12, 4)

    def resume(self) -> torch.Tensor:
        """The bytes of its slot afterwards."""
        assert self.rooms.try_take(2) is not None  # so that it comes back elsewhere
        self.residents.apply(Decision(resumptions={"a": 4}), self.meter)
        room = self.one.room
        assert room is not None and len(room.blocks) == 4
        assert self.one.lane.slot == room.slot
        assert (self.store.used_bytes, self.one.parcel) == (0, None)
        return self.cache.slots[room.slot]


def test_a_moved_cache_comes_back_whole() -> None:
    shelf = Shelf()
    room = shelf.one.room
    assert room is not None
    before = shelf.cache.blocks[list(room.blocks)], shelf.cache.slots[room.slot].clone()
    shelf.pause("move")
    shelf.cache.blocks.zero_()
    shelf.cache.slots.zero_()
    slot = shelf.resume()
    assert torch.equal(slot, before[1])
    assert shelf.one.room is not None
    assert torch.equal(shelf.cache.blocks[list(shelf.one.room.blocks[:3])], before[0])
    assert shelf.one.num_replayed is None
    assert shelf.meter.costs.byte_s != PauseMeter().costs.byte_s


def test_a_dropped_cache_is_computed_again_in_a_clean_slot() -> None:
    shelf = Shelf()
    shelf.pause("recompute")
    assert not shelf.resume().any()
    assert shelf.one.num_replayed == 0


def test_a_cache_that_host_memory_spoiled_is_computed_again() -> None:
    shelf = Shelf()
    shelf.pause("move")
    parcel = shelf.one.parcel
    assert parcel is not None and parcel._saved is not None
    parcel._saved[0][2, 5] ^= 1
    assert not shelf.resume().any()
    assert shelf.one.num_replayed == 0


def test_who_ends_while_paused_leaves_nothing() -> None:
    shelf = Shelf()
    shelf.pause("move")
    shelf.residents.end("a", 0)
    assert shelf.store.used_bytes == 0
    shelf.residents.check_integrity([])
