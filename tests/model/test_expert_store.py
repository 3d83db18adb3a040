"""The arena of experts, flips within it, and the ring of counts."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.moe import ExpertShape
from headrace.model.expert_counts import ExpertCounts
from headrace.model.expert_store import ExpertStore

SHAPE = ExpertShape(32, 16)


def store_of(layers: int, slots: int) -> ExpertStore:
    store = ExpertStore(layers=layers, slots_per_rank=slots, shape=SHAPE)
    store.arena.zero_()
    return store


def test_a_row_holds_all_of_an_expert() -> None:
    store = store_of(3, 2)
    assert store.arena.shape == (8, store.expert_bytes)
    assert store.expert_bytes == 2 * SHAPE.size == 2 * 3 * 32 * 16
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(32, 32, generator=generator).bfloat16().float()
    down = torch.randn(32, 16, generator=generator).bfloat16().float()
    store.load(1, 1, gate_up, down)
    row = store.row_of(1, 1)
    assert row == 3
    assert torch.equal(
        torch.from_numpy(store.panels(1)[1]).view(torch.bfloat16), SHAPE.pack(gate_up, down)
    )
    assert store.arena[:row].sum() == store.arena[row + 1 :].sum() == 0
    store.copy(row, store.staging_row(0))
    assert store.checksum(6) == store.checksum(row) != store.checksum(0)
    store.arena[6, -1] ^= 1
    assert store.checksum(6) != store.checksum(row)
    with pytest.raises(ValueError, match="layer 0, slot 1: bfloat16"):
        store.load(0, 1, gate_up / 3, down)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_after_a_flip_every_slot_has_its_expert(seed: int, slots: int) -> None:
    draw = np.random.default_rng(seed)
    store = store_of(2, slots)

    def some() -> np.ndarray:
        experts = draw.permutation(slots + 3)[:slots].astype(np.int32)
        return np.where(draw.random(slots) < 0.2, np.int32(-1), experts)

    before, after = some(), some()
    for slot, expert in enumerate(before):
        store.arena[store.row_of(1, slot)] = int(expert) + 1
    staged: dict[int, int] = {}
    for slot, expert in enumerate(after):
        if expert >= 0 and (expert not in before or draw.random() < 0.2):
            staged[slot] = len(staged)
            store.arena[store.staging_row(staged[slot])] = int(expert) + 1
    store.flip(1, before, after, staged)
    for slot, expert in enumerate(after):
        if expert >= 0:
            assert (store.arena[store.row_of(1, slot)] == int(expert) + 1).all()
    assert store.arena[:slots].sum() == 0


def test_the_ring_keeps_the_last_passes() -> None:
    counts = ExpertCounts(layers=2, experts=3, window=4)
    for step in range(7):
        for part in (1, 2):
            rows = counts.new_part()
            rows[1, 2] = part * step
            counts.add(rows)
        counts.end_step(step)
    steps, rows = counts.series()
    assert steps.tolist() == [3, 4, 5, 6]
    assert rows[:, 1, 2].tolist() == [9, 12, 15, 18]
    assert rows.sum() == 54
    assert counts.series(6)[0].tolist() == [6]
    assert counts.series(7)[1].shape == (0, 2, 3)
    counts.clear()
    assert counts.series()[0].tolist() == []


def test_a_reader_never_sees_a_row_that_is_being_written() -> None:
    counts = ExpertCounts(layers=4, experts=500, window=3)
    stop = threading.Event()

    def write() -> None:
        step = 0
        while not stop.is_set():
            part = counts.new_part()
            part[:] = step
            counts.add(part)
            counts.end_step(step)
            step += 1

    writer = threading.Thread(target=write)
    writer.start()
    seen = 0
    try:
        while seen < 2000:
            steps, rows = counts.series()
            assert (np.diff(steps) > 0).all()
            assert (rows == steps[:, None, None]).all()
            seen += max(1, len(steps))
    finally:
        stop.set()
        writer.join()
