import pytest

from headrace.tests.transfer.layouts import SMALL, make_arenas
from headrace.transfer.checksum import block_checksums, slot_checksum, verify
from headrace.transfer.errors import CorruptBlockError


@pytest.fixture
def arenas():
    return make_arenas(SMALL, 6, 3, seed=4)


def check(arenas, sums, slot_sum, num_tokens=19):
    verify(SMALL, arenas.blocks, (5, 0, 3), arenas.slots, 1, num_tokens, sums, slot_sum)


def test_what_did_not_change_passes(arenas):
    sums = block_checksums(SMALL, arenas.blocks, (5, 0, 3), 19)
    assert len(sums) == 3
    assert all(0 <= found < 2**63 for found in sums)
    check(arenas, sums, slot_checksum(SMALL, arenas.slots, 1))


@pytest.mark.parametrize("byte", [0, 8, 24, 33, 64, 69])
def test_any_valid_byte_of_the_partial_block_counts(arenas, byte):
    sums = block_checksums(SMALL, arenas.blocks, (5, 0, 3), 19)
    arenas.blocks[3, byte] ^= 1
    with pytest.raises(CorruptBlockError, match=rf"block 2 \(our id 3\).*expected {sums[2]:#x}"):
        check(arenas, sums, slot_checksum(SMALL, arenas.slots, 1))


@pytest.mark.parametrize("byte", [9, 23, 34, 63, 70, 79])
def test_bytes_beyond_the_cached_tokens_do_not_count(arenas, byte):
    sums = block_checksums(SMALL, arenas.blocks, (5, 0, 3), 19)
    arenas.blocks[3, byte] ^= 1
    check(arenas, sums, slot_checksum(SMALL, arenas.slots, 1))


def test_swapped_blocks_are_found(arenas):
    sums = block_checksums(SMALL, arenas.blocks, (5, 0, 3), 24)
    sums[0], sums[1] = sums[1], sums[0]
    with pytest.raises(CorruptBlockError, match="block 0"):
        check(arenas, sums, 0, num_tokens=24)


def test_a_changed_slot_is_found(arenas):
    sums = block_checksums(SMALL, arenas.blocks, (5, 0, 3), 19)
    slot_sum = slot_checksum(SMALL, arenas.slots, 1)
    arenas.slots[1, 36] ^= 128
    with pytest.raises(CorruptBlockError, match=rf"slot \(our id 1\).*expected {slot_sum:#x}"):
        check(arenas, sums, slot_sum)


def test_missing_checksums_are_corruption_not_success(arenas):
    with pytest.raises(CorruptBlockError, match="promised 0 block checksums"):
        check(arenas, [], slot_checksum(SMALL, arenas.slots, 1))
