"""How one rank lays out its cache: the contract that two ranks must share before one reads from the other.

A rank owns three byte arenas. ``blocks`` holds the global KV, ``block_tokens`` tokens a block; ``slots`` holds the
fixed-size state of one request each; ``tails`` holds what rows of the decoder layers start from, where the network is
cut between the pools, and is empty otherwise. Inside a block the sections tile the bytes without gaps, so that the
bytes we speak of are the bytes that travel:

    block:  | section 0: entry 0, 1, ... | section 1: entry 0, 1, ... | ... |
            0                            sections[1].offset                 block_bytes
"""

import hashlib
from dataclasses import dataclass, fields
from fractions import Fraction

from .errors import LayoutMismatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSection:
    """One array of entries inside a block; an entry of ``entry_bytes`` covers ``tokens_per_entry`` tokens."""

    name: str
    offset: int
    entry_bytes: int
    tokens_per_entry: int

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of the entries that the first ``num_tokens`` tokens complete (a half-full entry is not there)."""
        return num_tokens // self.tokens_per_entry * self.entry_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Geometry and meaning of a rank's cache.

    ``kv_format`` is ``released`` or ``plain``; ``window``, ``ring_rows`` and ``keep`` count tokens and say what a slot
    means. The last ``private_bytes`` of a slot never travel. A tail has ``keep`` rows of ``tail_row_bytes``. Raises
    ValueError when the sections do not tile the block.
    """

    model_fingerprint: str
    kv_format: str
    block_tokens: int
    block_bytes: int
    sections: tuple[BlockSection, ...]
    slot_bytes: int
    window: int
    ring_rows: int
    keep: int
    private_bytes: int = 0
    tail_row_bytes: int = 0

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.slot_bytes < 0:
            raise ValueError(
                f"block_tokens = {self.block_tokens} must be at least 1 and "
                f"slot_bytes = {self.slot_bytes} at least 0"
            )
        if not 0 <= self.private_bytes <= self.slot_bytes or self.tail_row_bytes < 0:
            raise ValueError(
                f"private_bytes = {self.private_bytes} must be 0 to slot_bytes = {self.slot_bytes}, and "
                f"tail_row_bytes = {self.tail_row_bytes} at least 0"
            )
        end = 0
        for section in self.sections:
            if section.entry_bytes < 1 or section.tokens_per_entry < 1:
                raise ValueError(f"section {section.name}: sizes must be at least 1: {section}")
            if self.block_tokens % section.tokens_per_entry:
                raise ValueError(
                    f"section {section.name}: block_tokens = {self.block_tokens} must be a multiple "
                    f"of tokens_per_entry = {section.tokens_per_entry}"
                )
            if section.offset != end:
                raise ValueError(f"section {section.name}: offset {section.offset} must be {end}")
            end += section.bytes_for(self.block_tokens)
        if end != self.block_bytes:
            raise ValueError(f"block_bytes = {self.block_bytes}, but the sections take {end}")

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes of global KV per token of a full block."""
        return Fraction(self.block_bytes, self.block_tokens)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_tokens)

    def valid_ranges(self, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of what a block that holds its first ``num_tokens`` tokens has to say.

        One range for a full block, one per non-empty section for a partial one.
        """
        if num_tokens == self.block_tokens:
            return ((0, self.block_bytes),)
        found = ((section.offset, section.bytes_for(num_tokens)) for section in self.sections)
        return tuple((offset, num_bytes) for offset, num_bytes in found if num_bytes)

    def tokens_in_block(self, index: int, num_tokens: int) -> int:
        """Tokens in block number ``index`` of a request with ``num_tokens`` cached tokens."""
        return max(0, min(self.block_tokens, num_tokens - index * self.block_tokens))

    @property
    def handed_bytes(self) -> int:
        """Leading bytes of a slot that travel."""
        return self.slot_bytes - self.private_bytes

    def handoff_bytes(self, num_tokens: int) -> int:
        """Bytes that a handoff of ``num_tokens`` tokens moves: complete entries, what travels of a slot, and a tail."""
        tail = min(num_tokens, self.keep) * self.tail_row_bytes
        return sum(s.bytes_for(num_tokens) for s in self.sections) + self.handed_bytes + tail

    def fingerprint(self) -> str:
        """64 hex digits; equal exactly when the layouts are equal."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def require_same(self, other: "CacheLayout", peer_name: str) -> None:
        """Raise LayoutMismatchError that names every field in which ``other``, the layout of ``peer_name``, differs."""
        differing = [
            f"{field.name}: ours {getattr(self, field.name)!r}, theirs {getattr(other, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]
        if differing:
            raise LayoutMismatchError(
                f"cache layout of {peer_name} differs from ours: {'; '.join(differing)}. "
                "Serve the same checkpoint with the same numerics, block_tokens, keep and split on both sides."
            )
