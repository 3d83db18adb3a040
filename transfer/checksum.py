"""Checksums of what a handoff moves: XXH3-64 over the valid bytes of a block, or over a whole slot.

Valid bytes are the entries that the cached tokens complete; what an earlier owner left behind them is neither copied
nor summed. XXH3 runs at memory speed (CRC-32 of the standard library at a fifth of it), so both ends can afford to
look at every byte. The sums guard against accidents (torn reads, stale ids, lost pages), not against an attacker.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from xxhash import xxh3_64, xxh3_64_intdigest

from .errors import CorruptBlockError
from .layout import CacheLayout

_MASK = 2**63 - 1  # 63 bits: fits every signed 64-bit integer on the way


def block_checksums(
    layout: CacheLayout, blocks: Tensor, block_ids: Sequence[int], num_tokens: int
) -> list[int]:
    """One sum per block of a request with ``num_tokens`` cached tokens.

    ``blocks`` is the arena, uint8 [num_blocks, block_bytes] on the CPU; ``block_ids`` are in token order.
    """
    arena = _bytes_of(blocks)
    sums: list[int] = []
    for index, block in enumerate(block_ids[: layout.num_blocks(num_tokens)]):
        start = block * layout.block_bytes
        digest = xxh3_64()
        for offset, num_bytes in layout.valid_ranges(layout.tokens_in_block(index, num_tokens)):
            digest.update(arena[start + offset : start + offset + num_bytes])
        sums.append(digest.intdigest() & _MASK)
    return sums


def slot_checksum(layout: CacheLayout, slots: Tensor, slot: int) -> int:
    """The sum of what travels of one slot; ``slots`` is the arena, uint8 [num_slots, slot_bytes] on the CPU."""
    start = slot * layout.slot_bytes
    return xxh3_64_intdigest(_bytes_of(slots)[start : start + layout.handed_bytes]) & _MASK


def tail_checksum(layout: CacheLayout, tails: Tensor, tail: int, num_rows: int) -> int:
    """The sum of the first ``num_rows`` rows of one tail; ``tails`` is the arena. 0 for none."""
    if num_rows == 0:
        return 0
    start = tail * layout.keep * layout.tail_row_bytes
    rows = _bytes_of(tails)[start : start + num_rows * layout.tail_row_bytes]
    return xxh3_64_intdigest(rows) & _MASK


def row_checksum(arena: Tensor, row: int) -> int:
    """The sum of all bytes of one row; ``arena`` is uint8 [rows, row_bytes] on the CPU."""
    return xxh3_64_intdigest(_bytes_of(arena[row])) & _MASK


def verify(
    layout: CacheLayout,
    blocks: Tensor,
    block_ids: Sequence[int],
    slots: Tensor,
    slot: int,
    num_tokens: int,
    expected_blocks: Sequence[int],
    expected_slot: int,
) -> None:
    """Compare what arrived with what the holder promised.

    Raises CorruptBlockError naming the first differing block (or the slot), what was found and what was expected.
    """
    found_blocks = block_checksums(layout, blocks, block_ids, num_tokens)
    if len(found_blocks) != len(expected_blocks):
        raise CorruptBlockError(
            f"the holder promised {len(expected_blocks)} block checksums for {num_tokens} tokens; "
            f"{len(found_blocks)} are needed"
        )
    for index, (found, expected) in enumerate(zip(found_blocks, expected_blocks, strict=True)):
        if found != expected:
            raise CorruptBlockError(
                f"block {index} (our id {block_ids[index]}): checksum {found:#x}, "
                f"expected {expected:#x}; the request must be prefilled again"
            )
    found_slot = slot_checksum(layout, slots, slot)
    if found_slot != expected_slot:
        raise CorruptBlockError(
            f"slot (our id {slot}): checksum {found_slot:#x}, expected {expected_slot:#x}; "
            "the request must be prefilled again"
        )


def verify_tail(
    layout: CacheLayout, tails: Tensor, tail: int, num_rows: int, expected: int
) -> None:
    """Compare the first ``num_rows`` rows of our ``tail`` with what the holder promised. Raises CorruptBlockError."""
    found = tail_checksum(layout, tails, tail, num_rows)
    if found != expected:
        raise CorruptBlockError(
            f"tail (our id {tail}, {num_rows} rows): checksum {found:#x}, expected {expected:#x}; "
            "the request must be prefilled again"
        )


def _bytes_of(arena: Tensor) -> memoryview:
    array: Any = arena.view(-1).numpy()
    return memoryview(array)
