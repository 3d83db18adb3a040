from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.tests.transfer.layouts import SMALL, make_arenas, released_layout
from headrace.transfer.checksum import block_checksums, slot_checksum
from headrace.transfer.errors import IntegrityError, TransferError
from headrace.transfer.plan import Copy, TailCopy, plan_copies


def test_full_blocks_partial_block_and_slot():
    plan = plan_copies(SMALL, 19, (7, 8, 3), 2, (0, 1, 9, 4), 5)
    assert plan.copies == (
        Copy("blocks", 560, 0, 160),
        Copy("blocks", 240, 720, 9),
        Copy("blocks", 264, 744, 10),
        Copy("blocks", 304, 784, 6),
        Copy("slots", 74, 185, 37),
    )
    assert plan.total_bytes == 222 == SMALL.handoff_bytes(19)


def test_where_the_network_is_cut_a_slot_travels_in_part_and_a_tail_with_it():
    layout = replace(SMALL, private_bytes=7, tail_row_bytes=12, keep=5)
    plan = plan_copies(layout, 19, (7, 8, 3), 2, (0, 1, 9), 5, TailCopy(4, 3, 1))
    assert plan.copies[-2:] == (Copy("slots", 74, 185, 30), Copy("tails", 180, 60, 48))
    assert plan_copies(layout, 3, (7,), 2, (0,), 5, TailCopy(0, 3, 1)).copies[-1].arena == "slots"
    assert layout.handoff_bytes(19) == SMALL.handoff_bytes(19) - 7 + 60
    for wrong in (TailCopy(6, 3, 1), TailCopy(-1, 3, 1), TailCopy(4, -3, 1)):
        with pytest.raises(TransferError, match="a tail has 5 rows"):
            plan_copies(layout, 19, (7, 8, 3), 2, (0, 1, 9), 5, wrong)
    with pytest.raises(ValueError, match="private_bytes = 38 must be 0 to slot_bytes = 37"):
        replace(SMALL, private_bytes=38)


def test_only_neighbours_on_both_sides_become_one_copy():
    copies = plan_copies(SMALL, 32, (1, 2, 3, 9), 0, (4, 5, 7, 8), 0).copies
    assert copies == (
        Copy("blocks", 80, 320, 160),
        Copy("blocks", 240, 560, 80),
        Copy("blocks", 720, 640, 80),
        Copy("slots", 0, 0, 37),
    )


def test_nothing_cached_moves_the_slot_only():
    assert plan_copies(SMALL, 0, (), 1, (3,), 2).copies == (Copy("slots", 37, 74, 37),)


def test_a_fresh_pool_moves_a_long_prompt_in_two_copies():
    layout = released_layout()
    plan = plan_copies(layout, 131_072, range(1024), 0, range(1024), 0)
    assert len(plan.copies) == 2
    assert plan.total_bytes == 119_918_656


@pytest.mark.parametrize(
    ("num_tokens", "blocks", "slot"), [(9, (1,), 0), (8, (1, 2), 0), (8, (-1,), 0), (8, (1,), -1)]
)
def test_a_handoff_that_cannot_be_meant_is_a_transfer_error(num_tokens, blocks, slot):
    with pytest.raises(TransferError):
        plan_copies(SMALL, num_tokens, blocks, slot, (0, 1, 2), 0)


@pytest.mark.parametrize(("targets", "slot"), [((1,), 0), ((1, 1), 0), ((1, -2), 0), ((1, 2), -1)])
def test_bad_targets_are_a_bug_of_ours(targets, slot):
    with pytest.raises(IntegrityError):
        plan_copies(SMALL, 16, (1, 2), 0, targets, slot)


@given(st.integers(0, 60), st.randoms(use_true_random=False))
def test_the_copies_move_exactly_the_valid_bytes(num_tokens, random):
    needed = SMALL.num_blocks(num_tokens)
    sources, targets = random.sample(range(12), needed), random.sample(range(12), needed)
    theirs, ours = make_arenas(SMALL, 12, 3, seed=1), make_arenas(SMALL, 12, 3, seed=9)
    before = ours.blocks.clone()

    plan = plan_copies(SMALL, num_tokens, sources, 2, targets, 1)
    written = torch.zeros(12 * SMALL.block_bytes, dtype=torch.int32)
    for copy in plan.copies:
        source, target = (
            (theirs.blocks, ours.blocks) if copy.arena == "blocks" else (theirs.slots, ours.slots)
        )
        part = slice(copy.target_offset, copy.target_offset + copy.num_bytes)
        target.view(-1)[part] = source.view(-1)[copy.source_offset :][: copy.num_bytes]
        if copy.arena == "blocks":
            written[part] += 1

    assert written.max() <= 1
    assert plan.total_bytes == SMALL.handoff_bytes(num_tokens)
    untouched = written.view(12, -1) == 0
    assert torch.equal(ours.blocks[untouched], before[untouched])
    assert block_checksums(SMALL, ours.blocks, targets, num_tokens) == block_checksums(
        SMALL, theirs.blocks, sources, num_tokens
    )
    assert slot_checksum(SMALL, ours.slots, 1) == slot_checksum(SMALL, theirs.slots, 2)
