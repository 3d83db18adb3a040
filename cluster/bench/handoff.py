"""The work that ``bench transfer`` times: payloads of whole and partial blocks, and a complete tiny handoff.

The holder runs in a process of its own, answers messages, and otherwise does nothing.
"""

import ctypes
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from ...transfer.backend import Arenas
from ...transfer.checksum import block_checksums, slot_checksum, verify
from ...transfer.codec import decode, encode
from ...transfer.errors import DeadlineError, LeaseExpiredError
from ...transfer.layout import BlockSection, CacheLayout
from ...transfer.lease import Held, LeaseTable
from ...transfer.messages import ConfirmLease, Handoff, LeaseAlive, LeaseGone, ReleaseLease
from ...transfer.nixl import NixlBackend
from ...transfer.nixl_options import NixlOptions
from ...transfer.plan import Copy, plan_copies

NUM_BLOCKS = 4608  # 525 MB: far more than any processor cache holds
WAIT_S = 60.0
_TINY_TOKENS = 2
_HOLDER_SLEEP_S = 50e-6


def bench_layout() -> CacheLayout:
    """Blocks as of the released checkpoint (113,920 bytes of 8 sections), slots of 64 bytes."""
    sections: list[BlockSection] = []
    offset = 0
    for layer, tokens_per_entry in ((2, 2), (8, 2), (14, 2), (20, 1)):
        for kind, entry_bytes in (("main", 288), ("index", 68)):
            sections.append(
                BlockSection(
                    name=f"layer{layer}.{kind}",
                    offset=offset,
                    entry_bytes=entry_bytes,
                    tokens_per_entry=tokens_per_entry,
                )
            )
            offset += sections[-1].bytes_for(128)
    return CacheLayout(
        model_fingerprint="bench",
        kv_format="released",
        block_tokens=128,
        block_bytes=offset,
        sections=tuple(sections),
        slot_bytes=64,
        window=128,
        ring_rows=140,
        keep=140,
    )


def make_arenas(byte: int) -> Arenas:
    """Arenas of NUM_BLOCKS blocks, every page touched."""
    layout = bench_layout()
    return Arenas(
        layout=layout,
        blocks=torch.full((NUM_BLOCKS, layout.block_bytes), byte, dtype=torch.uint8),
        slots=torch.full((4, layout.slot_bytes), byte, dtype=torch.uint8),
    )


def payload(num_bytes: int, turn: int) -> list[Copy]:
    """Copies of one block or less that sum to ``num_bytes``; neighbours in the source are none in the target.

    Consecutive turns use other parts of the arenas, so that nothing is read from a cache.
    """
    block_bytes = bench_layout().block_bytes
    number = -(-num_bytes // block_bytes)
    first = turn * 1151 % (NUM_BLOCKS - number + 1)
    sizes = [block_bytes] * (number - 1) + [num_bytes - (number - 1) * block_bytes]
    return [
        Copy("blocks", (first + i) * block_bytes, (first + number - 1 - i) * block_bytes, size)
        for i, size in enumerate(sizes)
    ]


def memory_copy(source: torch.Tensor, target: torch.Tensor, copies: Sequence[Copy]) -> float:
    """Seconds that the same copies take inside one process."""
    from_base, to_base = source.data_ptr(), target.data_ptr()
    started = time.perf_counter()
    for copy in copies:
        ctypes.memmove(to_base + copy.target_offset, from_base + copy.source_offset, copy.num_bytes)
    return time.perf_counter() - started


def serve(pipe: Connection, options: NixlOptions) -> None:
    """Body of the holder: grants a lease per request over the pipe, answers messages until the pipe says stop."""
    torch.set_num_threads(1)
    arenas = make_arenas(0xA5)
    backend = NixlBackend("holder", arenas, options)
    leases = LeaseTable(backend.incarnation)
    pipe.send(backend.pairing())
    backend.connect(pipe.recv())
    pipe.send("ready")
    while True:
        if pipe.poll():
            generation = pipe.recv()
            if generation is None:
                backend.close()
                return
            pipe.send(encode(_offer(backend, leases, arenas, generation)))
        for peer, data in backend.receive():
            answer = _answer(leases, data)
            if answer is not None:
                backend.send(peer, answer)
        time.sleep(_HOLDER_SLEEP_S)


def _offer(backend: NixlBackend, leases: LeaseTable, arenas: Arenas, generation: int) -> Handoff:
    held = leases.grant("tiny", generation, (1,), 1, time.monotonic(), WAIT_S)
    layout = arenas.layout
    return Handoff(
        request_id="tiny",
        generation=generation,
        holder=backend.name,
        incarnation=backend.incarnation,
        lease_id=held.lease_id,
        lease_s=WAIT_S,
        layout_fingerprint=layout.fingerprint(),
        num_tokens=_TINY_TOKENS,
        blocks=held.blocks,
        slot=held.slot,
        block_checksums=tuple(block_checksums(layout, arenas.blocks, held.blocks, _TINY_TOKENS)),
        slot_checksum=slot_checksum(layout, arenas.slots, held.slot),
    )


def _answer(leases: LeaseTable, data: bytes) -> bytes | None:
    message = decode(data)
    if isinstance(message, ReleaseLease):
        leases.release(
            message.lease_id, message.incarnation, message.request_id, message.generation
        )
        return None
    assert isinstance(message, ConfirmLease), f"the reader asks nothing else: {message}"
    state = leases.confirm(
        message.lease_id,
        message.incarnation,
        message.request_id,
        message.generation,
        time.monotonic(),
    )
    if isinstance(state, Held):
        return encode(LeaseAlive(lease_id=message.lease_id, nonce=message.nonce))
    return encode(LeaseGone(lease_id=message.lease_id, nonce=message.nonce, reason=state.reason))


@dataclass(slots=True)
class Reader:
    """The reader's end, with its holder in another process. Raises DeadlineError when the holder falls silent."""

    backend: NixlBackend
    arenas: Arenas
    pipe: Connection
    process: BaseProcess
    generation: int = 0

    @classmethod
    def start(cls, options: NixlOptions) -> "Reader":
        """Start the holder and pair with it."""
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, options), daemon=True)
        process.start()
        theirs.close()
        arenas = make_arenas(0)
        reader = cls(NixlBackend("reader", arenas, options), arenas, pipe, process)
        pairing = reader._said("start of the holder")
        pipe.send(reader.backend.pairing())
        reader.backend.connect(pairing)
        reader._said("pairing")
        return reader

    def read(self, copies: Sequence[Copy]) -> float:
        """Seconds from the plan to the last byte."""
        started = time.perf_counter()
        read = self.backend.start_read("holder", copies)
        while not read.poll():
            pass
        return time.perf_counter() - started

    def tiny_handoff(self) -> float:
        """Seconds of a whole handoff of two tokens: decode, plan, read, verify, confirm, release."""
        self.generation += 1
        self.pipe.send(self.generation)
        offer = self._said("offer of a tiny handoff")
        started = time.perf_counter()
        handoff = decode(offer)
        assert isinstance(handoff, Handoff)
        layout = self.arenas.layout
        plan = plan_copies(layout, handoff.num_tokens, handoff.blocks, handoff.slot, (2,), 2)
        self.read(plan.copies)
        verify(
            layout,
            self.arenas.blocks,
            (2,),
            self.arenas.slots,
            2,
            handoff.num_tokens,
            handoff.block_checksums,
            handoff.slot_checksum,
        )
        claim: dict[str, Any] = {
            "lease_id": handoff.lease_id,
            "incarnation": handoff.incarnation,
            "request_id": handoff.request_id,
            "generation": handoff.generation,
        }
        self.backend.send("holder", encode(ConfirmLease(**claim, nonce=self.generation)))
        while not (answers := self.backend.receive()):
            if time.perf_counter() - started > WAIT_S:
                raise DeadlineError(f"confirm of a tiny handoff: no answer after {WAIT_S} s")
        if not isinstance(decode(answers[0][1]), LeaseAlive):
            raise LeaseExpiredError(f"{handoff.lease_id} is gone")
        self.backend.send("holder", encode(ReleaseLease(**claim)))
        return time.perf_counter() - started

    def close(self) -> None:
        """End the holder and give the arenas back."""
        if self.process.is_alive():
            self.pipe.send(None)
            self.process.join(5)
        self.process.kill()
        self.process.join(5)
        self.backend.close()

    def _said(self, phase: str) -> bytes:
        if not self.pipe.poll(WAIT_S):
            raise DeadlineError(f"{phase}: nothing heard for {WAIT_S} s")
        return self.pipe.recv()
