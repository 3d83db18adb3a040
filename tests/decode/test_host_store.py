"""Caches of paused requests in host memory: every byte comes back, and the budget adds up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.decode.host_store import HostStore
from headrace.decode.rooms import Room
from headrace.model.cache import Cache
from headrace.tests.fake_network import FakeNetwork
from headrace.transfer.errors import CorruptBlockError, IntegrityError

HERE, THERE = Room(blocks=(5, 2, 9), slot=1), Room(blocks=(3, 12, 4, 7), slot=4)


def cache_of() -> Cache:
    cache = FakeNetwork().cache
    random = torch.Generator().manual_seed(7)
    for arena in (cache.blocks, cache.slots):
        arena.copy_(torch.randint(0, 256, arena.shape, generator=random, dtype=torch.uint8))
    return cache


def test_a_room_comes_back_elsewhere_and_nothing_else_changes() -> None:
    cache = cache_of()
    before = cache.blocks.clone(), cache.slots.clone()
    store = HostStore(cache.layout, 1 << 30)
    parcel = store.open("a", 3)
    parcel.save(cache, HERE)
    cache.blocks[list(HERE.blocks)] = 0  # others move in
    cache.slots[HERE.slot] = 0
    parcel.load(cache, THERE)
    assert torch.equal(cache.blocks[[3, 12, 4]], before[0][[5, 2, 9]])
    assert torch.equal(cache.slots[4], before[1][1])
    untouched = [1, 6, 7, 8, 10, 11]
    assert torch.equal(cache.blocks[untouched], before[0][untouched])
    assert torch.equal(cache.slots[[0, 2, 3]], before[1][[0, 2, 3]])


def test_the_budget_is_charged_from_open_to_drop() -> None:
    layout = cache_of().layout
    size = 3 * layout.block_bytes + layout.slot_bytes
    store = HostStore(layout, 2 * size + 1)
    assert store.open("a", 3).num_bytes == size
    store.open("b", 3)
    assert (store.used_bytes, store.free_bytes, len(store)) == (2 * size, 1, 2)
    with pytest.raises(IntegrityError, match="1 bytes are free"):
        store.open("c", 0)
    store.check_integrity({"a", "b"})
    store.drop("a")
    store.drop("a")
    with pytest.raises(IntegrityError, match="has one already"):
        store.open("b", 1)
    store.check_integrity({"b"})
    with pytest.raises(IntegrityError, match="host store"):
        store.check_integrity({"a", "b"})
    store.drop("b")
    assert (store.used_bytes, len(store)) == (0, 0)


def test_a_parcel_of_other_bytes_is_refused() -> None:
    cache = cache_of()
    parcel = HostStore(cache.layout, 1 << 30).open("a", 3)
    parcel.save(cache, HERE)
    assert parcel._saved is not None
    parcel._saved[0][1, 0] ^= 1
    with pytest.raises(CorruptBlockError, match=r"block 1 \(our id 12\)"):
        parcel.load(cache, THERE)
    parcel._saved[0][1, 0] ^= 1
    parcel._saved[1][0, -1] ^= 1
    with pytest.raises(CorruptBlockError, match=r"slot \(our id 4\)"):
        parcel.load(cache, THERE)


def test_a_room_that_does_not_fit_is_a_bug() -> None:
    cache = cache_of()
    parcel = HostStore(cache.layout, 1 << 30).open("a", 3)
    with pytest.raises(IntegrityError, match="saved: False"):
        parcel.load(cache, THERE)
    with pytest.raises(IntegrityError, match="for 3 blocks, its room has 4"):
        parcel.save(cache, THERE)
    parcel.save(cache, HERE)
    with pytest.raises(IntegrityError, match="cannot go into 2 blocks"):
        parcel.load(cache, Room(blocks=(1, 2), slot=1))


@settings(max_examples=50, deadline=None)
@given(actions=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 5)), max_size=40))
def test_charges_equal_parcels(actions: list[tuple[str, int]]) -> None:
    layout = cache_of().layout
    store = HostStore(layout, 8 * layout.block_bytes + 3 * layout.slot_bytes)
    held: dict[str, int] = {}
    for name, count in actions:
        size = count * layout.block_bytes + layout.slot_bytes
        if name in held:
            store.drop(name)
            del held[name]
        elif size <= store.budget_bytes - sum(held.values()):
            store.open(name, count)
            held[name] = size
        else:
            with pytest.raises(IntegrityError):
                store.open(name, count)
        assert store.used_bytes == sum(held.values()) <= store.budget_bytes
        store.check_integrity(set(held))
