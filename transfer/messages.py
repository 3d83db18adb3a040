"""What ranks tell each other: small frozen values, each with a number of its own. ``codec`` puts them on the wire.

    decode rank (reader)                                   prefill rank (holder)
          |        <-- Handoff (through the cluster) --          |   lease granted
          |   ... reads blocks and slot, checks checksums ...    |
          |        -- ConfirmLease(nonce) -->                    |
          |        <-- LeaseAlive(nonce) or LeaseGone(nonce) --  |   only LeaseAlive makes the request visible
          |        -- ReleaseLease -->                           |   blocks and slot are the holder's again

The nonce makes an answer belong to one question: the answer to an earlier attempt proves nothing about this read.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from .layout import CacheLayout

MAX_BLOCKS = 65_536  # per handoff: 8 M tokens at 128 tokens a block
MAX_ID = 2**48 - 1

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=0, le=MAX_ID)]
Checksum = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Blocks = Annotated[tuple[Count, ...], Meta(max_length=MAX_BLOCKS)]
Checksums = Annotated[tuple[Checksum, ...], Meta(max_length=MAX_BLOCKS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """The offer of a prefilled request: where its bytes lie, what they sum to, and how long they stay.

    ``num_tokens`` counts the cached tokens (prompt tokens - 1). ``lease_s`` is the whole length of the lease, counted
    on the holder's clock from the grant; the reader treats it as a hint and asks (ConfirmLease). The decoder layers
    begin at token ``tail_start``; where the reader has to run them, row ``tail`` of the holder's tails has
    ``num_tokens - tail_start`` rows for it.
    """

    request_id: Name
    generation: Count
    holder: Name
    incarnation: Name
    lease_id: Name
    lease_s: Annotated[float, Meta(gt=0, le=86_400)]
    layout_fingerprint: Name
    num_tokens: Count
    blocks: Blocks
    slot: Count
    block_checksums: Checksums
    slot_checksum: Checksum
    tail_start: Count = 0
    tail: Count = 0
    tail_checksum: Checksum = 0

    @property
    def tail_rows(self) -> int:
        """Rows from ``tail_start`` on."""
        return self.num_tokens - self.tail_start


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmLease:
    """Reader to holder, after the last byte: was this lease alive until now?"""

    lease_id: Name
    incarnation: Name
    request_id: Name
    generation: Count
    nonce: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAlive:
    """Holder to reader: alive when your question arrived."""

    lease_id: Name
    nonce: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGone:
    """Holder to reader: what you read may be anything. ``reason`` is for people."""

    lease_id: Name
    nonce: Count
    reason: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLease:
    """Reader to holder: I have what I need, or I want it no more."""

    lease_id: Name
    incarnation: Name
    request_id: Name
    generation: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """What a peer must know before it reads from us: the sizes of ``plan.ARENAS``, in their order, among it.

    ``address`` means something to ``transport`` only.
    """

    name: Name
    incarnation: Name
    transport: Name
    layout: CacheLayout
    arena_bytes: Annotated[tuple[Count, ...], Meta(min_length=3, max_length=3)]
    address: Annotated[bytes, Meta(max_length=1 << 20)]


Message = Handoff | ConfirmLease | LeaseAlive | LeaseGone | ReleaseLease | Pairing
