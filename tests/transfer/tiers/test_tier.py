import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from headrace.tests.transfer.layouts import SMALL
from headrace.tests.transfer.tiers.stored import DIGEST, payload_of, record_of, until
from headrace.transfer.tiers.eviction import make_policy
from headrace.transfer.tiers.memory import MemoryStore
from headrace.transfer.tiers.record import Miss, Record
from headrace.transfer.tiers.store import Headers
from headrace.transfer.tiers.tier import Load, Tier


class GatedStore(MemoryStore):
    """A store that stands still, or fails, when it is told to."""

    def __init__(self) -> None:
        super().__init__(
            layout_digest=DIGEST,
            capacity_bytes=64 * SMALL.block_bytes,
            row_bytes=SMALL.block_bytes,
            policy=make_policy("lru"),
        )
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False
        self.waiting = 0

    def read(self, names: Sequence[bytes], rows: Sequence[memoryview]) -> Headers:
        self._pass()
        return super().read(names, rows)

    def write(self, record: Record) -> bool:
        self._pass()
        return super().write(record)

    def _pass(self) -> None:
        self.waiting += 1
        self.gate.wait()
        self.waiting -= 1
        if self.broken:
            raise RuntimeError("a bug")


@contextmanager
def opened(store: GatedStore, **options: object) -> Generator[Tier]:
    tier = Tier("memory", store, **options)  # pyright: ignore[reportArgumentType]
    try:
        yield tier
    finally:
        store.gate.set()
        tier.close()


def load(tier: Tier, numbers: Sequence[int]) -> tuple[Load, list[bytearray]]:
    rows = [bytearray(SMALL.block_bytes) for _ in numbers]
    names = [record_of(number).name for number in numbers]
    return tier.load(names, [memoryview(row) for row in rows]), rows


def test_a_load_brings_the_leading_records() -> None:
    with opened(GatedStore(), part_records=2, num_load_threads=3) as tier:
        for number in (0, 1, 2, 4):
            assert tier.store(record_of(number))
        assert tier.flush(10)
        found, rows = load(tier, range(6))
        until(found.poll)
        assert found.num_leading == 3
        assert list(found.results) == [None, None, None, Miss.ABSENT, None, Miss.ABSENT]
        assert [bytes(row) for row in rows[:3]] == [payload_of(n) for n in range(3)]
        assert found.quiet()
        stats = tier.stats()
        assert (stats.num_hits, stats.num_misses, stats.num_stored) == (4, {"absent": 2}, 4)
        assert stats.loaded_bytes == 4 * record_of(0).num_bytes == stats.stored_bytes


def test_a_full_write_queue_drops_and_counts() -> None:
    store = GatedStore()
    with opened(store, write_queue_records=2) as tier:
        store.gate.clear()
        assert tier.store(record_of(0))
        until(lambda: store.waiting)
        assert [tier.store(record_of(n)) for n in (1, 2, 3, 4)] == [True, True, False, False]
        store.gate.set()
        assert tier.flush(10)
        assert [tier.has(record_of(n).name) for n in range(5)] == [True, True, True, False, False]
        assert tier.stats().num_dropped == 2


def test_a_full_load_queue_is_a_miss_at_once() -> None:
    store = GatedStore()
    with opened(store, load_queue_parts=1, part_records=1) as tier:
        store.gate.clear()
        first, _ = load(tier, [0])
        until(lambda: store.waiting)
        second, _ = load(tier, [1])
        third, _ = load(tier, [2])
        assert third.poll() and third.quiet()
        assert list(third.results) == [Miss.BUSY]
        assert not first.poll() and not second.poll()


def test_a_store_that_stands_still_is_a_miss_at_the_deadline_and_its_rows_stay_aside() -> None:
    store = GatedStore()
    with opened(store, load_timeout_s=0.05, part_records=1) as tier:
        tier.store(record_of(0))
        assert tier.flush(10)
        store.gate.clear()
        found, rows = load(tier, [0, 0])
        until(lambda: store.waiting)
        until(found.poll)
        assert list(found.results) == [Miss.LATE] * 2
        assert not found.quiet()
        store.gate.set()
        until(found.quiet)
        assert list(found.results) == [Miss.LATE] * 2  # what came late changes nothing
        assert bytes(rows[0]) == bytes(SMALL.block_bytes)  # the second part never began


def test_an_abandoned_load_becomes_quiet() -> None:
    store = GatedStore()
    with opened(store) as tier:
        store.gate.clear()
        found, _ = load(tier, [0])
        until(lambda: store.waiting)
        found.abandon()
        assert found.poll() and not found.quiet()
        store.gate.set()
        until(found.quiet)


def test_a_bug_in_a_store_costs_records_not_the_tier() -> None:
    store = GatedStore()
    with opened(store) as tier:
        tier.store(record_of(0))
        assert tier.flush(10)
        store.broken = True
        found, _ = load(tier, [0])
        until(found.poll)
        assert list(found.results) == [Miss.UNREADABLE]
        tier.store(record_of(1))
        assert tier.flush(10)
        assert tier.stats().num_failed == 1
        store.broken = False
        found, _ = load(tier, [0])
        until(found.poll)
        assert found.num_leading == 1


def test_closing_writes_what_is_queued_and_ends_the_threads() -> None:
    store = GatedStore()
    before = threading.active_count()
    tier = Tier("memory", store)
    assert threading.active_count() == before + 2
    for number in range(20):
        tier.store(record_of(number))
    tier.close()
    tier.close()
    assert tier.stats().num_stored == 20
    assert threading.active_count() == before
    assert not tier.store(record_of(21))


def test_closing_a_tier_whose_store_stands_still_is_bounded() -> None:
    store = GatedStore()
    tier = Tier("memory", store)
    store.gate.clear()
    tier.store(record_of(0))
    tier.close(timeout_s=0.1)
    store.gate.set()
    assert tier.stats().num_dropped == 0


def test_a_load_is_not_over_before_all_its_parts_were_queued() -> None:
    with opened(GatedStore(), part_records=1, num_load_threads=4) as tier:
        for number in range(8):
            tier.store(record_of(number))
        assert tier.flush(10)
        for _ in range(200):
            found, rows = load(tier, range(8))
            until(found.poll)
            assert found.num_leading == 8
            assert [bytes(row) for row in rows] == [payload_of(n) for n in range(8)]
