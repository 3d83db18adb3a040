import threading
from dataclasses import replace

import pytest
import torch

from headrace.tests.transfer.layouts import SMALL, make_arenas
from headrace.transfer.checksum import block_checksums, slot_checksum, verify
from headrace.transfer.codec import encode
from headrace.transfer.errors import (
    CorruptBlockError,
    IntegrityError,
    LayoutMismatchError,
    MessageError,
    PeerLostError,
    TransferError,
)
from headrace.transfer.loopback import LoopbackBackend, LoopbackHub
from headrace.transfer.messages import LeaseAlive
from headrace.transfer.plan import Copy, plan_copies


class Pair:
    def __init__(self) -> None:
        self.hub = LoopbackHub()
        self.theirs, self.ours = make_arenas(SMALL, 8, 3, 1), make_arenas(SMALL, 8, 3, None)
        self.holder = LoopbackBackend(self.hub, "prefill-0", self.theirs)
        self.reader = LoopbackBackend(self.hub, "decode-0", self.ours)
        self.reader.connect(self.holder.pairing())
        self.holder.connect(self.reader.pairing())
        self.plan = plan_copies(SMALL, 19, (7, 2, 3), 2, (0, 5, 1), 1)

    def read(self) -> None:
        read = self.reader.start_read("prefill-0", self.plan.copies)
        while not read.poll():
            pass
        assert read.quiet()

    def verify(self) -> None:
        sums = block_checksums(SMALL, self.theirs.blocks, (7, 2, 3), 19)
        slot_sum = slot_checksum(SMALL, self.theirs.slots, 2)
        verify(SMALL, self.ours.blocks, (0, 5, 1), self.ours.slots, 1, 19, sums, slot_sum)


@pytest.fixture
def pair():
    return Pair()


def test_a_read_brings_the_holders_bytes(pair):
    pair.read()
    pair.verify()
    assert torch.equal(pair.ours.slots[1], pair.theirs.slots[2])
    assert not pair.ours.blocks[2].any()


def test_a_delayed_read_sees_what_the_holder_has_then(pair):
    pair.hub.faults.polls_before_copy = 2
    read = pair.reader.start_read("prefill-0", pair.plan.copies)
    assert [read.poll(), read.poll()] == [False, False]
    pair.theirs.blocks.add_(1)
    assert read.poll()
    assert torch.equal(pair.ours.blocks[0], pair.theirs.blocks[7])


def test_a_corrupt_copy_is_found_by_the_checksum(pair):
    pair.hub.faults.corrupt_next_copies = 1
    pair.read()
    with pytest.raises(CorruptBlockError, match="block 0"):
        pair.verify()


def test_a_dead_peer_fails_reads_and_messages_for_good(pair):
    read = pair.reader.start_read("prefill-0", pair.plan.copies)
    pair.hub.drop("prefill-0")
    for _ in range(2):
        with pytest.raises(PeerLostError):
            read.poll()
    assert read.quiet()
    with pytest.raises(PeerLostError):
        pair.reader.send("prefill-0", b"x")
    assert pair.holder.receive() == []


def test_a_restarted_peer_is_another_peer(pair):
    old_pairing = pair.holder.pairing()
    read = pair.reader.start_read("prefill-0", pair.plan.copies)
    again = LoopbackBackend(pair.hub, "prefill-0", make_arenas(SMALL, 8, 3, 2))
    assert again.incarnation != pair.holder.incarnation
    with pytest.raises(PeerLostError):
        read.poll()
    with pytest.raises(PeerLostError):
        pair.reader.connect(old_pairing)
    pair.reader.connect(again.pairing())
    assert pair.reader.peers == {"prefill-0": again.incarnation}
    pair.read()


def test_messages_arrive_with_the_name_of_their_sender(pair):
    pair.reader.send("prefill-0", b"one")
    pair.reader.send("prefill-0", b"two")
    assert pair.holder.receive() == [("decode-0", b"one"), ("decode-0", b"two")]
    assert pair.holder.receive() == []
    pair.hub.faults.lose_next_messages = 1
    pair.reader.send("prefill-0", b"lost")
    pair.reader.send("prefill-0", b"kept")
    assert pair.holder.receive() == [("decode-0", b"kept")]


def test_messages_of_strangers_are_dropped(pair):
    stranger = LoopbackBackend(pair.hub, "decode-9", make_arenas(SMALL, 1, 1, None))
    stranger.connect(pair.holder.pairing())
    stranger.send("prefill-0", b"x")
    assert pair.holder.receive() == []


def test_ranges_outside_an_arena_are_refused_before_anything_moves(pair):
    with pytest.raises(TransferError, match="prefill-0"):
        pair.reader.start_read("prefill-0", [Copy("blocks", 8 * 80 - 1, 0, 2)])
    with pytest.raises(TransferError):
        pair.reader.start_read("prefill-0", [Copy("slots", -1, 0, 2)])
    with pytest.raises(IntegrityError):
        pair.reader.start_read("prefill-0", [Copy("slots", 0, 3 * 37 - 1, 2)])
    with pytest.raises(PeerLostError, match="decode-7 is not connected"):
        pair.reader.start_read("decode-7", [])


def test_what_is_no_fitting_pairing_is_refused(pair):
    with pytest.raises(MessageError):
        pair.reader.connect(b"nonsense")
    with pytest.raises(MessageError, match="LeaseAlive"):
        pair.reader.connect(encode(LeaseAlive(lease_id="a", nonce=1)))
    arenas = make_arenas(SMALL, 1, 1, None)
    other = LoopbackBackend(pair.hub, "other", replace(arenas, layout=replace(SMALL, keep=7)))
    with pytest.raises(LayoutMismatchError, match="keep: ours 6, theirs 7"):
        pair.reader.connect(other.pairing())
    assert "other" not in pair.reader.peers


def test_disconnect_and_close_are_final_and_may_be_repeated(pair):
    read = pair.reader.start_read("prefill-0", pair.plan.copies)
    pair.reader.disconnect("prefill-0")
    pair.reader.disconnect("prefill-0")
    with pytest.raises(PeerLostError):
        read.poll()
    pair.holder.close()
    pair.holder.close()
    with pytest.raises(PeerLostError):
        pair.reader.connect(pair.holder.pairing())


def test_ranks_of_different_threads_share_a_hub(pair):
    def chat() -> None:
        for _ in range(200):
            pair.holder.send("decode-0", b"x")
            pair.holder.receive()

    thread = threading.Thread(target=chat)
    thread.start()
    got = 0
    for _ in range(200):
        pair.read()
        got += len(pair.reader.receive())
    thread.join()
    assert got + len(pair.reader.receive()) == 200
