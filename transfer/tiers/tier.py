"""One tier: a store behind threads, so that nobody who asks it waits for a disk or a network.

    rank's loop:  load(names, rows) --> [load queue]  --> load threads --> store.read  --> rows, then poll() is True
                  store(record)     --> [write queue] --> write thread --> store.write

Both queues are bounded, and a full one drops: a load that does not fit is a miss (Miss.BUSY), a record that does
not fit is not kept. Both are counted. One write thread also lets the store refresh itself, at the start and
every few seconds.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, Full, Queue

from .record import HEADER_BYTES, Miss, Record
from .store import Store, Usage

_log = logging.getLogger(__name__)
_REFRESH_SHARE = 20
"""Refreshing takes at most one part in so many of the write thread's time."""

Loaded = Callable[[bytes, bytes, memoryview], None]
"""Is told (name, header, payload) of what was loaded, in the load thread; the payload is only lent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """What a tier holds and has done since it was opened."""

    usage: Usage
    num_hits: int
    num_misses: Mapping[str, int]
    """Miss -> records that were asked for in vain."""
    num_stored: int
    num_dropped: int
    """Records that found the write queue full."""
    num_failed: int
    """Records that the store did not take."""
    loaded_bytes: int
    load_s: float
    """Sum over the load threads, for hits and misses."""
    stored_bytes: int
    store_s: float


class Load:
    """Records on their way into rows; see ``backend.Read`` for why there are two questions."""

    def __init__(self, num_records: int, num_parts: int, deadline: float) -> None:
        self._results: list[Miss | None] = [Miss.LATE] * num_records
        self._num_pending = num_parts
        self._num_running = 0
        self._deadline = deadline
        self._lock = threading.Lock()
        self._over = False
        self.started = time.monotonic()
        self.seconds = 0.0

    def poll(self) -> bool:
        """Whether the load is over, at the latest at its deadline; then ``results`` do not change any more."""
        with self._lock:
            if not self._over and (not self._num_pending or time.monotonic() > self._deadline):
                self._end()
            return self._over

    def quiet(self) -> bool:
        """Whether nobody can write into the rows any more: they may be reused. Soon True once the load is over."""
        with self._lock:
            return not self._num_running and (self._over or not self._num_pending)

    def abandon(self) -> None:
        """Nobody waits any more; parts that have not begun never do."""
        with self._lock:
            if not self._over:
                self._end()

    @property
    def results(self) -> Sequence[Miss | None]:
        """For each record None, when its row holds it, or the reason. Not to be used before ``poll`` says True."""
        return self._results

    @property
    def num_leading(self) -> int:
        """How many rows from the first on hold their records."""
        return next((i for i, miss in enumerate(self._results) if miss), len(self._results))

    def _end(self) -> None:
        self._over = True
        self.seconds = time.monotonic() - self.started

    def begin_part(self) -> bool:
        """Whether a part may still be read (by a load thread)."""
        with self._lock:
            if self._over:
                self._num_pending -= 1
                return False
            self._num_running += 1
            return True

    def end_part(self, first: int, found: Sequence[Miss | None], *, begun: bool = True) -> None:
        """A part was read, or refused (by the tier)."""
        with self._lock:
            if not self._over:
                self._results[first : first + len(found)] = found
            self._num_pending -= 1
            self._num_running -= begun
            if not self._num_pending and not self._over:
                self._end()


@dataclass(frozen=True, slots=True)
class _Part:
    load: Load
    first: int
    names: Sequence[bytes]
    rows: Sequence[memoryview]


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    misses: Counter[str] = field(default_factory=lambda: Counter[str]())
    stored: int = 0
    dropped: int = 0
    failed: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    stored_bytes: int = 0
    store_s: float = 0.0


class Tier:
    """A store with its threads. ``has``, ``load``, ``store`` and ``stats`` return at once, from any thread.

    A load is cut into parts of ``part_records`` for ``num_load_threads`` threads; ``on_loaded`` hears of every hit.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        *,
        write_queue_records: int = 256,
        load_queue_parts: int = 256,
        num_load_threads: int = 1,
        num_write_threads: int = 1,
        part_records: int = 32,
        load_timeout_s: float = 5.0,
        refresh_s: float = 5.0,
    ) -> None:
        self.name = name
        self._store = store
        self._part_records = part_records
        self._load_timeout_s = load_timeout_s
        self._refresh_s = refresh_s
        self.on_loaded: Loaded | None = None
        self._writes: Queue[Record] = Queue(write_queue_records)
        self._loads: Queue[_Part] = Queue(load_queue_parts)
        self._counts = _Counts()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run_loads, name=f"tier-{name}-load", daemon=True)
            for _ in range(num_load_threads)
        ] + [
            threading.Thread(
                target=self._run_writes, args=(not i,), name=f"tier-{name}-write", daemon=True
            )
            for i in range(num_write_threads)
        ]
        for thread in self._threads:
            thread.start()

    def has(self, name: bytes) -> bool:
        """Whether the record seems to be there."""
        return self._store.contains(name)

    def load(self, names: Sequence[bytes], rows: Sequence[memoryview]) -> Load:
        """Start to bring records into rows (uint8, each of exactly its payload's size)."""
        starts = range(0, len(names), self._part_records)
        load = Load(len(names), len(starts), time.monotonic() + self._load_timeout_s)
        for first in reversed(starts):
            end = first + self._part_records
            part = _Part(load, first, names[first:end], rows[first:end])
            self._store.hold(part.names)
            try:
                self._loads.put_nowait(part)
            except Full:
                self._store.release(part.names)
                refused = [Miss.BUSY] * len(part.names)
                self._count_load(refused, 0, 0.0)
                load.end_part(first, refused, begun=False)
        return load

    def store(self, record: Record) -> bool:
        """Put a record into the write queue; False when that is full or the tier is closing."""
        try:
            if not self._closing.is_set():
                self._writes.put_nowait(record)
                return True
        except Full:
            pass
        with self._lock:
            self._counts.dropped += 1
        return False

    def stats(self) -> TierStats:
        """See TierStats."""
        usage = self._store.usage()
        with self._lock:
            counts = self._counts
            return TierStats(
                usage=usage,
                num_hits=counts.hits,
                num_misses=dict(counts.misses),
                num_stored=counts.stored,
                num_dropped=counts.dropped,
                num_failed=counts.failed,
                loaded_bytes=counts.loaded_bytes,
                load_s=counts.load_s,
                stored_bytes=counts.stored_bytes,
                store_s=counts.store_s,
            )

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued so far is written; False when that took too long."""
        deadline = time.monotonic() + timeout_s
        while self._writes.unfinished_tasks:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, within ``timeout_s``, then end the threads. What is left then is lost. Idempotent."""
        if self._closing.is_set():
            return
        deadline = time.monotonic() + timeout_s
        if not self.flush(timeout_s):
            _log.warning(
                "tier %s: %d records not written within %g s",
                self.name,
                self._writes.qsize(),
                timeout_s,
            )
        self._closing.set()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()) + 0.5)
        if any(thread.is_alive() for thread in self._threads):
            _log.warning("tier %s is still waiting for its store; it is left behind", self.name)
        else:
            self._store.close()

    def _run_loads(self) -> None:
        while not self._closing.is_set():
            try:
                part = self._loads.get(timeout=0.2)
            except Empty:
                continue
            if part.load.begin_part():
                self._load_part(part)
            self._store.release(part.names)

    def _load_part(self, part: _Part) -> None:
        started = time.monotonic()
        found: list[Miss | None] = [Miss.UNREADABLE] * len(part.names)
        num_bytes = 0
        try:
            headers = self._store.read(part.names, part.rows)
            found = [header if isinstance(header, Miss) else None for header in headers]
            for name, header, row in zip(part.names, headers, part.rows, strict=True):
                if not isinstance(header, Miss):
                    num_bytes += HEADER_BYTES + len(row)
                    if self.on_loaded is not None:
                        self.on_loaded(name, header, row)
        except Exception:  # noqa: BLE001 - a bug in a store costs its records, never the rank
            _log.exception("tier %s: a load failed", self.name)
        self._count_load(found, num_bytes, time.monotonic() - started)
        part.load.end_part(part.first, found)

    def _run_writes(self, refreshes: bool) -> None:
        next_refresh = time.monotonic() if refreshes else math.inf
        while not self._closing.is_set():
            try:
                record = self._writes.get(timeout=0.2)
            except Empty:
                record = None
            if record is not None:
                self._write(record)
                self._writes.task_done()
            if time.monotonic() >= next_refresh:
                started = time.monotonic()
                self._refresh()
                took_s = time.monotonic() - started
                next_refresh = time.monotonic() + max(self._refresh_s, _REFRESH_SHARE * took_s)

    def _write(self, record: Record) -> None:
        started = time.monotonic()
        kept = False
        try:
            if self._store.contains(record.name):
                return
            kept = self._store.write(record)
        except Exception:  # noqa: BLE001 - as above
            _log.exception("tier %s: a record could not be written", self.name)
        with self._lock:
            self._counts.store_s += time.monotonic() - started
            self._counts.stored += kept
            self._counts.failed += not kept
            self._counts.stored_bytes += kept * record.num_bytes

    def _refresh(self) -> None:
        try:
            self._store.refresh()
        except Exception:  # noqa: BLE001 - as above
            _log.exception("tier %s could not look at its store", self.name)

    def _count_load(self, found: Sequence[Miss | None], num_bytes: int, seconds: float) -> None:
        with self._lock:
            for miss in found:
                if miss is None:
                    self._counts.hits += 1
                else:
                    self._counts.misses[miss.value] += 1
            self._counts.loaded_bytes += num_bytes
            self._counts.load_s += seconds
