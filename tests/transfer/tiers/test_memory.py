import threading

import pytest

from headrace.tests.transfer.layouts import SMALL
from headrace.tests.transfer.tiers.stored import DIGEST, payload_of, read, record_of
from headrace.transfer.tiers.eviction import make_policy
from headrace.transfer.tiers.memory import MemoryStore
from headrace.transfer.tiers.record import Kind, Miss


def make_store(rows: int) -> MemoryStore:
    return MemoryStore(
        layout_digest=DIGEST,
        capacity_bytes=rows * SMALL.block_bytes + 5,
        row_bytes=SMALL.block_bytes,
        policy=make_policy("lru"),
    )


def test_what_goes_in_comes_out() -> None:
    store = make_store(4)
    assert all(store.write(record_of(n)) for n in range(3))
    assert read(store, [2, 0, 9]) == [payload_of(2), payload_of(0), Miss.ABSENT]
    assert store.usage().num_bytes == 3 * SMALL.block_bytes


def test_bytes_are_bounded_and_the_least_recently_used_goes_first() -> None:
    store = make_store(3)
    for n in range(3):
        store.write(record_of(n))
    read(store, [0])
    store.write(record_of(3))
    assert [store.contains(record_of(n).name) for n in range(4)] == [True, False, True, True]
    usage = store.usage()
    assert usage.num_bytes == usage.capacity_bytes == 3 * SMALL.block_bytes
    assert usage.num_evicted == 1


@pytest.mark.parametrize("num_bytes", [1, SMALL.block_bytes, SMALL.block_bytes + 1, 190])
def test_a_record_takes_the_rows_that_it_needs(num_bytes: int) -> None:
    store = make_store(3)
    assert store.write(record_of(7, kind=Kind.WINDOWS, num_bytes=num_bytes))
    row = bytearray(num_bytes)
    name = record_of(7, kind=Kind.WINDOWS).name
    assert not isinstance(store.read([name], [memoryview(row)])[0], Miss)
    assert row == payload_of(7, num_bytes)
    assert store.read([name], [memoryview(bytearray(num_bytes + 1))]) == [Miss.OTHER_SIZE]


def test_a_record_larger_than_the_arena_is_refused() -> None:
    store = make_store(2)
    store.write(record_of(0))
    assert not store.write(record_of(1, num_bytes=3 * SMALL.block_bytes))
    assert read(store, [0]) == [payload_of(0)]


def test_readers_never_see_a_row_that_changes() -> None:
    store = make_store(2)
    stop = threading.Event()
    seen: list[bytes | Miss] = []

    def look() -> None:
        while not stop.is_set():
            for number, found in enumerate(read(store, range(6))):
                if found not in (Miss.ABSENT, payload_of(number)):
                    seen.append(found)

    reader = threading.Thread(target=look)
    reader.start()
    for turn in range(600):
        store.write(record_of(turn % 6))
    stop.set()
    reader.join()
    assert not seen
    assert store.usage().num_evicted >= 500


def test_of_a_prompt_the_head_stays_longest() -> None:
    store = make_store(4)
    for n in range(4):
        store.write(record_of(n))
    read(store, range(4))
    for n in (10, 11, 12):
        store.write(record_of(n))
    assert [store.contains(record_of(n).name) for n in range(4)] == [True, False, False, False]


def test_what_a_load_is_about_to_read_is_not_evicted() -> None:
    store = make_store(3)
    for n in range(3):
        store.write(record_of(n))
    held = [record_of(n).name for n in (0, 2)]
    store.hold(held)
    assert store.write(record_of(3)) and store.write(record_of(4))
    assert [store.contains(record_of(n).name) for n in range(5)] == [True, False, True, False, True]
    store.hold([record_of(4).name])
    assert not store.write(record_of(5))
    store.release(held)
    assert store.write(record_of(5)) and store.write(record_of(6))
    assert [store.contains(record_of(n).name) for n in (0, 2, 4)] == [False, False, True]
