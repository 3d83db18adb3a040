"""A prefill rank and a decode rank that share a hub and a clock; books of both are checked every turn."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from headrace.decode.config import DecodeConfig
from headrace.decode.events import DecodeEvent, DecodeFailed, Tokens
from headrace.decode.executor import Network as NetworkLike
from headrace.decode.rank import DecodeRank
from headrace.decode.sampler import SampledRows, sample
from headrace.decode.stops import StopChecker
from headrace.model.batch import Logits, Span
from headrace.prefill.config import PrefillConfig
from headrace.prefill.rank import Offered, PrefillRank
from headrace.tests.fake_network import FakeNetwork
from headrace.transfer.loopback import LoopbackBackend, LoopbackHub
from headrace.transfer.messages import Handoff
from headrace.transfer.request import Request, SamplingParams


def make_request(name: str, length: int, **sampling: object) -> Request:
    """A prompt of ``length`` ids that depend on its name."""
    first = 10 + sum(name.encode()) % 100
    params = SamplingParams(**({"max_tokens": 5, "ignore_eos": True} | sampling))  # type: ignore[arg-type]
    ids = tuple((first + 7 * i) % 500 + 3 for i in range(length))
    return Request(request_id=name, prompt_ids=ids, sampling=params)


def plain_loop(
    network: NetworkLike, request: Request, chunk: int = 10**6, pieces: Sequence[bytes] = ()
) -> tuple[int, ...]:
    """What one process gives: prefill in chunks, then one row a step, no ranks, no transfer. Uses slot 1."""
    ids, layout = request.prompt_ids, network.cache.layout
    blocks = tuple(range(1, network.cache.blocks.shape[0]))
    common = {"slot": 1, "blocks": blocks, "tail_start": request.tail_start(layout.keep)}
    network.cache.clear_slot(1)
    for start in range(0, len(ids) - 1, chunk):
        rows = ids[start : min(start + chunk, len(ids) - 1)]
        history = ids[max(0, start - 3) : start]
        network.forward([Span(token_ids=rows, start=start, history=history, **common)])
    eos = network.config.eos_token_id
    params, output = request.sampling, list[int]()
    stops = StopChecker(params, eos, params.max_tokens, pieces)
    while True:
        known = (*ids, *output)
        span = Span(
            token_ids=known[-1:],
            start=len(known) - 1,
            history=known[-4:-1],
            logits=Logits.LAST,
            **common,
        )
        wanted = SampledRows(params=params, prompt_ids=ids, output_ids=output)
        output.append(int(sample(network.forward([span]), [wanted], eos)[0]))
        if stops.push(output[-1:])[1]:
            return tuple(output)


@dataclass
class Pair:
    """Both ranks. ``tokens`` gathers what decode delivers, by request."""

    make_network: Callable[[], NetworkLike] = FakeNetwork
    prefill_config: PrefillConfig = field(default_factory=lambda: PrefillConfig(chunk_tokens=8))
    decode_config: DecodeConfig = field(default_factory=lambda: DecodeConfig(max_batch=3))
    now: float = 1000.0
    make_prefill_network: Callable[[], NetworkLike] | None = None
    """Where it shall differ from decode's."""
    pieces: Sequence[bytes] = ()

    def __post_init__(self) -> None:
        self.hub = LoopbackHub()
        clock = lambda: self.now  # noqa: E731
        self.prefill_network = (self.make_prefill_network or self.make_network)()
        self.decode_network = self.make_network()
        self.prefill_backend = self.join("prefill", self.prefill_network)
        self.decode_backend = self.join("decode", self.decode_network)
        self.prefill = PrefillRank(
            "prefill", self.prefill_network, self.prefill_backend, self.prefill_config, clock, clock
        )
        self.decode = DecodeRank(
            "decode",
            self.decode_network,
            self.decode_backend,
            self.decode_config,
            clock,
            clock,
            pieces=self.pieces,
        )
        self.connect()
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.last: dict[str, Tokens] = {}
        self.failures: dict[str, DecodeFailed] = {}

    def join(self, name: str, network: NetworkLike) -> LoopbackBackend:
        """Put a network's cache on the hub."""
        return LoopbackBackend(self.hub, name, network.cache.arenas)

    def connect(self) -> None:
        """Pair the two backends."""
        self.decode_backend.connect(self.prefill_backend.pairing())
        self.prefill_backend.connect(self.decode_backend.pairing())

    def offer(self, request: Request) -> Handoff:
        """Prefill one request to its handoff."""
        self.prefill.submit(request)
        while True:
            self.prefill.pump()
            for event in self.prefill.step():
                assert isinstance(event, Offered) and event.request_id == request.request_id
                return event.handoff

    def start(self, request: Request, **changed: object) -> Handoff:
        """Prefill a request and hand it to decode."""
        handoff = replace(self.offer(request), **changed)
        self.decode.submit(request, handoff)
        return handoff

    def turn(self) -> list[DecodeEvent]:
        """One turn of decode's loop, then prefill's answers."""
        self.decode.pump()
        self.decode.check_integrity()
        events = self.decode.step() if self.decode.outlook[0] else []
        for event in events:
            if isinstance(event, Tokens):
                before = self.tokens.get(event.request_id, ())
                self.tokens[event.request_id] = before + event.ids
                self.last[event.request_id] = event
            else:
                self.failures[event.request_id] = event
        self.prefill.pump()
        self.decode.check_integrity()
        self.prefill.check_integrity()
        return events

    def run(self, turns: int = 200) -> None:
        """Turns until decode has nothing at all."""
        for _ in range(turns):
            self.turn()
            stats = self.decode.stats()
            if not any(
                stats[k] for k in ("waiting", "transferring", "draining", "running", "paused")
            ):
                return
        raise AssertionError(f"decode does not come to rest: {self.decode.stats()}")

    def assert_decode_empty(self) -> None:
        """Decode owns nothing."""
        stats = self.decode.stats()
        assert not any(stats[k] for k in ("waiting", "transferring", "running", "paused"))
        assert stats["free_blocks"] == self.decode_network.cache.blocks.shape[0] - 1
        assert stats["free_slots"] == self.decode_network.cache.slots.shape[0] - 1

    def assert_empty(self) -> None:
        """Neither owns anything; no lease had to expire for it."""
        self.assert_decode_empty()
        stats = self.prefill.stats()
        assert stats["offered"] == stats["leases_expired"] == 0
        assert stats["free_blocks"] == self.prefill_network.cache.blocks.shape[0] - 1
        assert stats["free_slots"] == self.prefill_network.cache.slots.shape[0] - 1


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Ranks of 12 blocks of 4 tokens and 4 slots; nothing may be left when the test ends."""
    made = Pair()
    yield made
    made.run()
    made.assert_empty()
    made.decode.close()
