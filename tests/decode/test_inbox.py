"""Arrivals: who enters when memory is short, and who is waited for."""

from dataclasses import dataclass, field

import pytest

from headrace.decode.config import DecodeConfig
from headrace.decode.inbox import Inbox
from headrace.decode.rooms import Room, Rooms
from headrace.tests.fake_network import FakeNetwork
from headrace.transfer.checksum import block_checksums, slot_checksum
from headrace.transfer.codec import decode, encode
from headrace.transfer.errors import LeaseExpiredError
from headrace.transfer.loopback import LoopbackBackend, LoopbackHub
from headrace.transfer.messages import ConfirmLease, Handoff, LeaseAlive
from headrace.transfer.request import Request

LEASE_S = 60.0


@dataclass
class Desk:
    """An inbox of 12 blocks of 4 tokens and 4 slots, and a holder that keeps everything."""

    rooms: Rooms = field(init=False)

    def __post_init__(self) -> None:
        hub, self.network, self.source = LoopbackHub(), FakeNetwork(), FakeNetwork()
        self.here, self.holder = (
            LoopbackBackend(hub, name, network.cache.arenas)
            for name, network in (("decode", self.network), ("prefill", self.source))
        )
        self.here.connect(self.holder.pairing())
        self.holder.connect(self.here.pairing())
        self.rooms = Rooms(self.network.cache)
        self.inbox = Inbox(self.here, self.network.cache, self.rooms, DecodeConfig())
        self.joined: dict[str, Room] = {}

    def arrive(
        self, name: str, num_prompt: int, num_blocks: int, now: float, can_grow: bool = True
    ) -> None:
        cache, num_tokens = self.source.cache, num_prompt - 1
        blocks = tuple(range(1, 1 + cache.layout.num_blocks(num_tokens)))
        handoff = Handoff(
            request_id=name,
            generation=1,
            holder="prefill",
            incarnation=self.here.peers["prefill"],
            lease_id=name,
            lease_s=LEASE_S,
            layout_fingerprint=cache.layout.fingerprint(),
            num_tokens=num_tokens,
            blocks=blocks,
            slot=1,
            block_checksums=tuple(block_checksums(cache.layout, cache.blocks, blocks, num_tokens)),
            slot_checksum=slot_checksum(cache.layout, cache.slots, 1),
        )
        request = Request(request_id=name, prompt_ids=(7,) * num_prompt)
        self.inbox.add(request, handoff, num_blocks, can_grow, now)

    def poll(self, now: float, num_growing: int = 0, num_paused: int = 0) -> list[str]:
        """Who joins now."""
        for _ in range(4):
            self.inbox.poll(now, 4 - len(self.joined), num_growing, num_paused)
            for peer, data in self.holder.receive():
                if isinstance(question := decode(data), ConfirmLease):
                    alive = LeaseAlive(lease_id=question.lease_id, nonce=question.nonce)
                    self.holder.send(peer, encode(alive))
        ready = {state.arrival.request.request_id: state.room for state in self.inbox.take_ready()}
        self.joined |= ready
        self.rooms.check_integrity(list(self.joined.values()))
        return list(ready)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_newcomers_leave_headroom_for_everyone(desk: Desk) -> None:
    for name in "abc":
        desk.arrive(name, 12, 4, 0.0)
    assert desk.poll(0.0) == ["a", "b"]  # 12 - 8 blocks: not another 4 and one each for three
    assert desk.poll(1.0, num_growing=2) == []
    assert desk.poll(1.0, num_growing=0) == []
    desk.rooms.give(desk.joined.pop("a"))
    assert desk.poll(2.0, num_growing=1) == ["c"]


def test_arrivals_on_their_way_count_like_those_inside(desk: Desk) -> None:
    desk.arrive("a", 12, 4, 0.0)
    desk.arrive("b", 12, 4, 0.0, can_grow=False)
    desk.inbox.poll(0.0, 4)
    assert (desk.inbox.num_arriving, desk.inbox.num_growing) == (2, 1)
    assert desk.poll(0.0) == ["a", "b"]
    assert (desk.inbox.num_arriving, desk.inbox.num_growing) == (0, 0)


def test_nobody_enters_while_somebody_is_paused_until_half_of_the_lease_is_over(desk: Desk) -> None:
    desk.arrive("a", 12, 4, 0.0)
    assert desk.poll(LEASE_S / 2 - 1, num_paused=1) == []
    assert desk.inbox.wanted_blocks(LEASE_S / 2 - 1) == 0
    assert desk.inbox.wanted_blocks(LEASE_S / 2) == 4
    assert desk.poll(LEASE_S / 2, num_growing=9, num_paused=1) == ["a"]
    assert desk.inbox.wanted_blocks(LEASE_S / 2) == 0


def test_an_overdue_arrival_waits_for_its_blocks_to_the_end_of_its_lease(desk: Desk) -> None:
    taken = desk.rooms.try_take(10)
    assert taken is not None
    desk.joined["x"] = taken
    desk.arrive("a", 12, 4, 0.0)
    assert desk.poll(LEASE_S - 1) == []
    assert desk.inbox.wanted_blocks(LEASE_S - 1) == 4
    assert desk.poll(LEASE_S) == []
    (failure,) = desk.inbox.take_failures()
    assert isinstance(failure.error, LeaseExpiredError)
    assert desk.inbox.wanted_blocks(LEASE_S) == 0
