"""Which bytes a handoff copies from where to where. Pure: plain numbers in, plain numbers out.

source blocks  | 7 | 8 | 3 (partly full) |      target blocks  | 0 | 1 | 9 |
copies         [ 7..8 -> 0..1 in one ] [ 3.section0 -> 9.section0 ] [ 3.section1 -> 9.section1 ] [ slot -> slot ]
               and, where the network is cut between the pools, [ rows of a tail -> rows of a tail ]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .errors import IntegrityError, TransferError
from .layout import CacheLayout

Arena = Literal["blocks", "slots", "tails"]
ARENAS: tuple[Arena, ...] = get_args(Arena)


@dataclass(frozen=True, slots=True)
class Copy:
    """``num_bytes`` bytes of one arena, from the holder's ``source_offset`` to our ``target_offset``."""

    arena: Arena
    source_offset: int
    target_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TailCopy:
    """The first ``num_rows`` rows of a tail, from the holder's ``source`` to our ``target``."""

    num_rows: int
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """The copies of one handoff; they do not overlap in the target."""

    copies: tuple[Copy, ...]
    total_bytes: int


def plan_copies(
    layout: CacheLayout,
    num_tokens: int,
    source_blocks: Sequence[int],
    source_slot: int,
    target_blocks: Sequence[int],
    target_slot: int,
    tail: TailCopy | None = None,
) -> CopyPlan:
    """Plan the read of ``num_tokens`` cached tokens, what travels of one slot, and of a tail if there is one.

    ``source_blocks`` are exactly the holder's blocks in token order; ``target_blocks`` may be longer (room for the
    answer). Full blocks that are neighbours on both sides become one copy; a partial last block becomes one copy per
    section. Raises TransferError for ids the holder cannot mean, IntegrityError for target ids of our own that are
    too few, negative or given twice.
    """
    needed = layout.num_blocks(num_tokens)
    if num_tokens < 0 or len(source_blocks) != needed:
        raise TransferError(
            f"handoff names {len(source_blocks)} blocks for {num_tokens} tokens; {needed} are needed"
        )
    if source_slot < 0 or any(block < 0 for block in source_blocks):
        raise TransferError(f"handoff names a negative id: {source_slot=}, {source_blocks=}")
    targets = target_blocks[:needed]
    if len(targets) < needed or len(set(targets)) < needed:
        raise IntegrityError(f"target blocks {targets} must be {needed} different ids")
    if target_slot < 0 or any(block < 0 for block in targets):
        raise IntegrityError(f"target ids must not be negative: {target_slot=}, {targets=}")

    full = num_tokens // layout.block_tokens
    copies = _full_blocks(layout.block_bytes, source_blocks[:full], targets[:full])
    if full < needed:
        source, target = (ids[full] * layout.block_bytes for ids in (source_blocks, targets))
        copies += [
            Copy("blocks", source + offset, target + offset, num_bytes)
            for offset, num_bytes in layout.valid_ranges(num_tokens % layout.block_tokens)
        ]
    size = layout.slot_bytes
    if layout.handed_bytes:
        copies.append(Copy("slots", source_slot * size, target_slot * size, layout.handed_bytes))
    if tail is not None and tail.num_rows:
        copies.append(_tail(layout, tail))
    return CopyPlan(copies=tuple(copies), total_bytes=sum(copy.num_bytes for copy in copies))


def _tail(layout: CacheLayout, tail: TailCopy) -> Copy:
    if not 0 < tail.num_rows <= layout.keep or tail.source < 0:
        raise TransferError(
            f"handoff names {tail.num_rows} rows of tail {tail.source}; a tail has {layout.keep} rows"
        )
    size = layout.keep * layout.tail_row_bytes
    num_bytes = tail.num_rows * layout.tail_row_bytes
    return Copy("tails", tail.source * size, tail.target * size, num_bytes)


def _full_blocks(block_bytes: int, sources: Sequence[int], targets: Sequence[int]) -> list[Copy]:
    runs: list[tuple[int, int, int]] = []
    source, target, length = 0, 0, 0
    for next_source, next_target in zip(sources, targets, strict=True):
        if length and next_source == source + length and next_target == target + length:
            length += 1
            continue
        if length:
            runs.append((source, target, length))
        source, target, length = next_source, next_target, 1
    if length:
        runs.append((source, target, length))
    return [Copy("blocks", s * block_bytes, t * block_bytes, n * block_bytes) for s, t, n in runs]
