"""A prefill rank with a reader that speaks the protocol by hand; books are checked after every test."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from headrace.prefill.config import PrefillConfig
from headrace.prefill.rank import Offered, PrefillEvent, PrefillRank
from headrace.tests.fake_network import FakeNetwork
from headrace.transfer.codec import decode, encode
from headrace.transfer.loopback import LoopbackBackend, LoopbackHub
from headrace.transfer.messages import ConfirmLease, Handoff, Message, ReleaseLease
from headrace.transfer.request import Request


def prompt(name: str, length: int) -> Request:
    """A prompt of ``length`` ids that depend on its name."""
    first = 10 + sum(name.encode()) % 100
    return Request(request_id=name, prompt_ids=tuple(first + i for i in range(length)))


@dataclass
class Bench:
    """A rank on a clock that the test moves."""

    config: PrefillConfig = field(default_factory=lambda: PrefillConfig(chunk_tokens=8))
    network: FakeNetwork = field(default_factory=FakeNetwork)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.events: list[PrefillEvent] = []
        self.hub = LoopbackHub()
        self.backend = self._join("prefill", self.network)
        self.reader = self._join("reader", FakeNetwork())
        self.reader.connect(self.backend.pairing())
        self.backend.connect(self.reader.pairing())
        self.rank = PrefillRank(
            "prefill", self.network, self.backend, self.config, lambda: self.now, lambda: self.now
        )

    def _join(self, name: str, network: FakeNetwork) -> LoopbackBackend:
        return LoopbackBackend(self.hub, name, network.cache.arenas)

    def turn(self) -> list[PrefillEvent]:
        """One turn of the loop."""
        self.rank.pump()
        events = self.rank.step() if self.rank.has_work else []
        self.rank.check_integrity()
        self.events += events
        return events

    def run(self, turns: int = 100) -> list[PrefillEvent]:
        """Turns until there is no work."""
        events = list[PrefillEvent]()
        for _ in range(turns):
            events += self.turn()
            if not self.rank.has_work:
                return events
        raise AssertionError("the rank does not come to rest")

    def offer(self, request: Request) -> Handoff:
        """Prefill one request to its handoff."""
        self.rank.submit(request)
        (event,) = self.run()
        assert isinstance(event, Offered)
        return event.handoff

    def confirm(self, handoff: Handoff, nonce: int = 7, **changed: object) -> Message:
        """What the rank answers to ConfirmLease."""
        names = ("lease_id", "incarnation", "request_id", "generation")
        values = {name: getattr(handoff, name) for name in names} | {"nonce": nonce} | changed
        self.reader.send("prefill", encode(ConfirmLease(**values)))
        self.turn()
        ((peer, data),) = self.reader.receive()
        assert peer == "prefill"
        return decode(data)

    def release(self, handoff: Handoff) -> None:
        """Tell the rank that the reader is done."""
        names = ("lease_id", "incarnation", "request_id", "generation")
        message = ReleaseLease(**{name: getattr(handoff, name) for name in names})
        self.reader.send("prefill", encode(message))
        self.turn()

    def assert_empty(self) -> None:
        """Nothing is left, once every lease is over."""
        self.now += 1e6
        self.run()
        self.rank.check_integrity()
        stats = self.rank.stats()
        assert stats["queued"] == stats["running"] == stats["offered"] == 0
        assert stats["free_blocks"] == self.network.cache.blocks.shape[0] - 1
        assert stats["free_slots"] == self.network.cache.slots.shape[0] - 1


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A rank of 12 blocks of 4 tokens and 4 slots."""
    made = Bench()
    yield made
    made.assert_empty()
