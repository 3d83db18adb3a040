"""NIXL between real processes. Every wait of these tests has a deadline."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.tests.transfer.layouts import SMALL, make_arenas
from headrace.tests.transfer.peer_process import NUM_BLOCKS, WAIT_S, PeerProcess
from headrace.transfer.checksum import block_checksums, slot_checksum, verify
from headrace.transfer.codec import decode, encode
from headrace.transfer.errors import (
    HeadraceError,
    IntegrityError,
    LayoutMismatchError,
    MessageError,
    PeerLostError,
    RankError,
    TransferError,
)
from headrace.transfer.layout import BlockSection, CacheLayout
from headrace.transfer.messages import ConfirmLease, LeaseAlive, LeaseGone
from headrace.transfer.nixl import NixlBackend
from headrace.transfer.nixl_errors import TRANSLATION, translated
from headrace.transfer.nixl_options import NixlOptions
from headrace.transfer.plan import Copy, plan_copies

LARGE = CacheLayout(
    model_fingerprint="large",
    kv_format="plain",
    block_tokens=2,
    block_bytes=8 << 20,
    sections=(BlockSection(name="a", offset=0, entry_bytes=4 << 20, tokens_per_entry=1),),
    slot_bytes=4,
    window=1,
    ring_rows=1,
    keep=1,
)


TRANSPORTS = ["all", "tcp,self"]


@pytest.fixture
def peers():
    """Starts peer processes and ends them after the test."""
    started: list[PeerProcess] = []

    def start(layout: CacheLayout = SMALL, *, name="prefill-0", seed=7, **options) -> PeerProcess:
        started.append(PeerProcess(layout, name=name, seed=seed, options=NixlOptions(**options)))
        return started[-1]

    yield start
    for peer in started:
        peer.stop()


@pytest.fixture(scope="module")
def small_peer():
    """A peer that many tests read from and none harms."""
    peer = PeerProcess(SMALL)
    yield peer
    peer.stop()


@pytest.fixture(scope="module", params=TRANSPORTS)
def large_peer(request):
    """As small_peer, with blocks of 8 MB, once per kind of transport."""
    peer = PeerProcess(LARGE, options=NixlOptions(transports=request.param))
    yield peer
    peer.stop()


@pytest.fixture
def reader(monkeypatch):
    """Makes readers in this process and closes them after the test."""
    made: list[NixlBackend] = []

    def make(layout: CacheLayout = SMALL, name: str = "decode-0", **kwargs) -> NixlBackend:
        options = NixlOptions(**kwargs)
        for variable, value in options.environment().items():
            monkeypatch.setenv(variable, value)
        arenas = make_arenas(layout, NUM_BLOCKS, 4, None)
        made.append(NixlBackend(name, arenas, options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def until(check: Callable[[], object], backend: NixlBackend | None = None):
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found = check()
        if found:
            return found
        if backend is not None:
            backend.receive()
    raise AssertionError("it did not happen in time")


def join(backend: NixlBackend, peer: PeerProcess) -> str:
    """Connect both ways; returns the peer's name."""
    peer.ask("connect", backend.pairing())
    return backend.connect(peer.pairing)


def echo(backend: NixlBackend, name: str, message: bytes) -> bytes:
    backend.send(name, message)
    return until(backend.receive)[0][1]


def test_reads_of_every_length_bring_the_holders_bytes(small_peer, reader):
    peer, backend = small_peer, reader()
    name, ours = join(backend, peer), backend.arenas
    for num_tokens in (0, 1, 2, 7, 8, 9, 16, 31, 32):
        needed = SMALL.num_blocks(num_tokens)
        sources, targets = [2, 3, 1, 0][:needed], [3, 1, 0, 2][:needed]
        ours.blocks.zero_()
        copies = plan_copies(SMALL, num_tokens, sources, 2, targets, 1).copies
        read = backend.start_read(name, copies)
        until(read.poll)
        assert read.quiet()
        verify(
            SMALL,
            ours.blocks,
            targets,
            ours.slots,
            1,
            num_tokens,
            block_checksums(SMALL, peer.expected.blocks, sources, num_tokens),
            slot_checksum(SMALL, peer.expected.slots, 2),
        )
        assert int((ours.blocks != 0).sum()) <= SMALL.handoff_bytes(num_tokens)


@pytest.mark.parametrize("size", [1, 17, 4096, 100_000, 3 << 20])
def test_sizes_and_many_small_copies(large_peer, reader, size):
    backend = reader(LARGE, transports=large_peer.options.transports)
    name = join(backend, large_peer)
    ours, theirs = backend.arenas.blocks.view(-1), large_peer.expected.blocks.view(-1)
    number = min(1500, len(ours) // size)
    copies = [Copy("blocks", i * size, (number - 1 - i) * size, size) for i in range(number)]
    until(backend.start_read(name, copies).poll)
    found = ours[: number * size].view(number, size).flip(0)
    assert torch.equal(found.reshape(-1), theirs[: number * size])


def test_two_readers_at_once(large_peer, reader):
    transports = large_peer.options.transports
    backends = [reader(LARGE, name=f"decode-{i}", transports=transports) for i in range(2)]
    names = [join(backend, large_peer) for backend in backends]
    copies = [Copy("blocks", i << 20, i << 20, 1 << 20) for i in range(32)]
    for _ in range(3):
        reads = [b.start_read(name, copies) for b, name in zip(backends, names, strict=True)]
        until(lambda reads=reads: all([read.poll() for read in reads]))  # noqa: C419  poll them all
    for backend in backends:
        assert torch.equal(backend.arenas.blocks, large_peer.expected.blocks)


def test_messages_go_both_ways_large_and_small(small_peer, reader):
    peer, backend = small_peer, reader()
    name = join(backend, peer)
    for message in (b"x", bytes(range(256)), b"y" * 200_000):
        assert echo(backend, name, message) == message


def test_a_lease_is_confirmed_and_a_stale_one_is_not(small_peer, reader):
    peer, backend = small_peer, reader()
    name = join(backend, peer)
    lease_id, incarnation = peer.ask("grant", 1.0)
    ask = ConfirmLease(
        lease_id=lease_id, incarnation=incarnation, request_id="r1", generation=1, nonce=1
    )
    answer = decode(echo(backend, name, encode(ask)))
    assert answer == LeaseAlive(lease_id=lease_id, nonce=1)
    foreign = decode(echo(backend, name, encode(replace(ask, request_id="r2", nonce=2))))
    assert isinstance(foreign, LeaseGone)
    time.sleep(1.0)
    stale = decode(echo(backend, name, encode(replace(ask, nonce=3))))
    assert isinstance(stale, LeaseGone)
    assert stale.nonce == 3
    assert "expired" in stale.reason


def test_blocks_that_were_reused_do_not_pass_for_ours(small_peer, reader):
    peer, backend = small_peer, reader()
    name, ours = join(backend, peer), backend.arenas
    sums = block_checksums(SMALL, peer.expected.blocks, (1,), 8)
    peer.ask("scribble")
    until(backend.start_read(name, [Copy("blocks", 80, 0, 80)]).poll)
    with pytest.raises(TransferError, match="prefilled again"):
        verify(SMALL, ours.blocks, (0,), ours.slots, 0, 8, sums, 0)
    peer.ask("scribble")


def test_a_killed_peer_is_lost_at_once_and_its_successor_serves(peers, reader):
    backend = reader()
    first = peers()
    name = join(backend, first)
    until(backend.start_read(name, [Copy("blocks", 0, 0, 80)]).poll)
    first.kill()
    started = time.monotonic()
    with pytest.raises(PeerLostError):
        read = backend.start_read(name, [Copy("blocks", 0, 0, 80)])
        until(read.poll)
    assert time.monotonic() - started < 5
    assert backend.peers == {}
    with pytest.raises(PeerLostError):
        backend.send(name, b"x")
    started = time.monotonic()
    while time.monotonic() < started + 1.5:  # tries again in vain
        backend.receive()
    assert backend.peers == {}

    second = peers(seed=8)
    assert join(backend, second) == name
    assert second.pairing != first.pairing
    until(backend.start_read(name, [Copy("blocks", 0, 0, 80)]).poll)
    assert torch.equal(backend.arenas.blocks[0], second.expected.blocks[0])
    assert echo(backend, name, b"x") == b"x"


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_a_peer_killed_in_the_middle_of_a_read_is_lost(peers, reader, transports):
    peer, backend = peers(LARGE, transports=transports), reader(LARGE, transports=transports)
    name = join(backend, peer)
    until(backend.start_read(name, [Copy("blocks", 0, 0, 1)]).poll)
    timer = threading.Timer(0.05, peer.process.kill)
    timer.start()
    copies = [Copy("blocks", i << 16, i << 16, 1 << 16) for i in range(512)]
    started = time.monotonic()
    with pytest.raises(PeerLostError):
        while True:
            until(backend.start_read(name, copies).poll)
    assert time.monotonic() - started < 10
    timer.join()
    until(lambda: not backend.draining, backend)
    assert backend.peers == {}


def test_a_peer_that_stands_still_is_lost_at_the_deadline_and_quiet_later(peers, reader):
    peer = peers(LARGE, transports="tcp,self")
    backend = reader(LARGE, transports="tcp,self", read_timeout_s=0.3)
    name = join(backend, peer)
    until(backend.start_read(name, [Copy("blocks", 0, 0, 1)]).poll)
    peer.signal(signal.SIGSTOP)
    read = backend.start_read(name, [Copy("blocks", 0, 0, 32 << 20)])
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="deadline"):
        until(read.poll)
    assert 0.2 < time.monotonic() - started < 10
    assert not read.quiet(), "the peer may still write: the target must not be reused"
    backend.disconnect(name)
    assert not read.quiet()
    peer.signal(signal.SIGCONT)
    until(read.quiet)
    with pytest.raises(PeerLostError):
        read.poll()
    until(lambda: not backend.draining, backend)
    join(backend, peer)
    assert echo(backend, name, b"x") == b"x"


def test_a_connection_that_broke_is_made_again(small_peer, reader):
    backend = reader(name="unlucky")
    name = join(backend, small_peer)
    assert echo(backend, name, b"x") == b"x"
    with pytest.raises(PeerLostError), backend._losing(backend._require(name)):
        raise PeerLostError("the cable was pulled")
    assert backend.peers == {}
    until(lambda: backend.peers, backend)
    assert echo(backend, name, b"y") == b"y"


def test_a_read_that_was_only_slow_does_not_cost_the_connection(peers, reader):
    peer = peers(LARGE, transports="tcp,self")
    backend = reader(LARGE, transports="tcp,self", read_timeout_s=0.2)
    name = join(backend, peer)
    until(backend.start_read(name, [Copy("blocks", 0, 0, 1)]).poll)
    peer.signal(signal.SIGSTOP)
    read = backend.start_read(name, [Copy("blocks", 0, 0, 4 << 20)])
    with pytest.raises(PeerLostError, match="deadline"):
        until(read.poll)
    peer.signal(signal.SIGCONT)
    until(read.quiet)
    assert list(backend.peers) == [name]
    assert echo(backend, name, b"x") == b"x"


def test_a_read_that_nobody_polls_any_more_ends_by_itself(peers, reader):
    peer, backend = peers(LARGE, transports="tcp,self"), reader(LARGE, transports="tcp,self")
    name = join(backend, peer)
    backend.start_read(name, [Copy("blocks", 0, 0, 16 << 20)])
    backend.disconnect(name)
    assert backend.peers == {}
    until(lambda: not backend.draining, backend)
    join(backend, peer)
    assert echo(backend, name, b"x") == b"x"


def test_a_holder_outlives_readers_that_are_killed_while_reading(peers, reader):
    holder, backend = peers(LARGE, transports="tcp,self"), reader(LARGE, transports="tcp,self")
    name = join(backend, holder)
    for _ in range(2):
        victim = peers(LARGE, name="decode-1", transports="tcp,self")
        holder.ask("connect", victim.pairing)
        victim.ask("connect", holder.pairing)
        victim.ask("read for ever", name)
        time.sleep(0.2)
        victim.kill()
        assert echo(backend, name, b"alive?") == b"alive?"


def test_connect_is_idempotent_and_refuses_what_does_not_fit(small_peer, reader):
    peer, backend = small_peer, reader()
    name = join(backend, peer)
    assert backend.connect(peer.pairing) == name
    assert list(backend.peers) == [name]
    with pytest.raises(MessageError):
        backend.connect(b"nonsense")
    pairing = decode(peer.pairing)
    damaged = pairing.address.replace(b"prefill", b"Prefill")
    assert damaged != pairing.address
    for change in (
        {"transport": "loopback"},
        {"address": b"\xc0"},
        {"address": damaged},
        {"incarnation": "forged"},
    ):
        with pytest.raises(MessageError):
            backend.connect(encode(replace(pairing, **change)))
    with pytest.raises(LayoutMismatchError, match="window: ours 4, theirs 5"):
        backend.connect(encode(replace(pairing, layout=replace(SMALL, window=5))))


def test_ranges_outside_an_arena_never_reach_nixl(small_peer, reader):
    peer, backend = small_peer, reader()
    name = join(backend, peer)
    with pytest.raises(TransferError):
        backend.start_read(name, [Copy("blocks", 8 * 80, 0, 1)])
    with pytest.raises(IntegrityError):
        backend.start_read(name, [Copy("blocks", 0, 8 * 80, 1)])
    with pytest.raises(PeerLostError):
        backend.start_read("nobody", [])
    assert backend.start_read(name, []).poll()


def test_messages_of_strangers_are_dropped(small_peer, reader):
    backend = reader(name="stranger")
    backend.connect(small_peer.pairing)
    backend.send("prefill-0", b"x")
    started = time.monotonic()
    while time.monotonic() < started + 0.3:
        assert backend.receive() == []
    small_peer.ask("connect", backend.pairing())
    assert echo(backend, "prefill-0", b"y") == b"y"


def test_close_gives_everything_back():
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def once() -> None:
        backend = NixlBackend("decode-0", make_arenas(SMALL, 2, 2, None))
        other = NixlBackend("prefill-0", make_arenas(SMALL, 2, 2, 3))
        backend.connect(other.pairing())
        read = backend.start_read("prefill-0", [Copy("blocks", 0, 0, 80)])
        until(read.poll, other)
        backend.close()
        other.close()
        backend.close()
        assert backend.receive() == []

    once()
    gc.collect()
    before = open_files(), threads()
    for _ in range(3):
        once()
    gc.collect()
    assert (open_files(), threads()) == before


def test_every_error_of_nixl_has_a_translation():
    from nixl import _bindings

    theirs = {name for name in dir(_bindings) if name.startswith("nixl") and name.endswith("Error")}
    assert theirs == set(TRANSLATION)
    for name, ours in TRANSLATION.items():
        with pytest.raises(ours, match="reading: NIXL says why"), translated("reading"):
            raise getattr(_bindings, name)("why")
    with pytest.raises(RankError), translated("set-up", otherwise=RankError):
        raise _bindings.nixlBackendError("why")
    with pytest.raises(ZeroDivisionError), translated("reading"):
        raise ZeroDivisionError


def test_arenas_must_be_contiguous():
    arenas = make_arenas(SMALL, 4, 4, None)
    with pytest.raises(HeadraceError, match="contiguous"):
        NixlBackend("p", replace(arenas, blocks=arenas.blocks[:, ::2]))


def test_the_operators_environment_wins(monkeypatch):
    options = NixlOptions(network_devices="eth7", log_level="warn")
    monkeypatch.setenv("UCX_TLS", "tcp")
    for name in options.environment():
        if name != "UCX_TLS":
            monkeypatch.delenv(name, raising=False)
    with suppress(KeyError):
        options.apply()
    assert os.environ["UCX_TLS"] == "tcp"
    assert os.environ["UCX_NET_DEVICES"] == "eth7"
    assert os.environ["NIXL_LOG_LEVEL"] == "WARN"
