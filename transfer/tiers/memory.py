"""Records in host memory: one arena of fixed rows, a record takes as many of them as it needs, not next to each other.

arena:  | row 0 | row 1 | row 2 | row 3 | ...      a block takes one row, the windows of a turn several
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..huge_pages import use_huge_pages
from .record import Miss, Record, find_fault
from .store import Headers, Policy, Usage


@dataclass(frozen=True, slots=True)
class _Held:
    header: bytes
    rows: tuple[int, ...]
    num_bytes: int


class MemoryStore:
    """See Store. The arena takes ``capacity_bytes``, rounded down to rows of ``row_bytes``."""

    def __init__(
        self, *, layout_digest: bytes, capacity_bytes: int, row_bytes: int, policy: Policy
    ) -> None:
        self._layout_digest = layout_digest
        self._row_bytes = row_bytes
        arena = torch.empty((capacity_bytes // row_bytes, row_bytes), dtype=torch.uint8)
        use_huge_pages(arena)
        self._arena: NDArray[np.uint8] = arena.numpy()
        self._free = list(range(len(self._arena)))
        self._held: dict[bytes, _Held] = {}
        self._policy = policy
        self._loading: Counter[bytes] = Counter()
        self._num_evicted = 0
        self._lock = (
            threading.Lock()
        )  # also held while bytes are copied, so no row changes under a reader

    def contains(self, name: bytes) -> bool:
        """See Store."""
        return name in self._held

    def hold(self, names: Sequence[bytes]) -> None:
        """See Store. What others bring in meanwhile must not push out what a load is about to read."""
        with self._lock:
            self._loading.update(names)

    def release(self, names: Sequence[bytes]) -> None:
        """See Store."""
        with self._lock:
            self._loading.subtract(names)
            for name in names:
                if not self._loading[name]:
                    del self._loading[name]

    def read(self, names: Sequence[bytes], rows: Sequence[memoryview]) -> Headers:
        """See Store."""
        found = [
            self._read(name, row) for name, row in zip(reversed(names), reversed(rows), strict=True)
        ]
        return found[::-1]

    def write(self, record: Record) -> bool:
        """See Store. False for a record larger than the arena, or than what loads leave free of it."""
        num_rows = -(-len(record.payload) // self._row_bytes)
        payload = np.frombuffer(record.payload, dtype=np.uint8)
        header = record.header
        with self._lock:
            if num_rows > len(self._arena) or record.name in self._held:
                return record.name in self._held
            if not self._make_room(num_rows):
                return False
            rows = tuple(self._free.pop() for _ in range(num_rows))
            for number, row in enumerate(rows):
                piece = payload[number * self._row_bytes : (number + 1) * self._row_bytes]
                self._arena[row, : len(piece)] = piece
            self._held[record.name] = _Held(header, rows, len(payload))
            self._policy.insert(record.name, record.cost, num_rows * self._row_bytes)
        return True

    def refresh(self) -> None:
        """Nobody else writes here."""

    def usage(self) -> Usage:
        """See Store."""
        capacity = self._arena.size
        return Usage(
            num_records=len(self._held),
            num_bytes=capacity - len(self._free) * self._row_bytes,
            capacity_bytes=capacity,
            num_evicted=self._num_evicted,
        )

    def close(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._held.clear()
            self._free.clear()
            self._arena = np.empty((0, self._row_bytes), dtype=np.uint8)

    def _read(self, name: bytes, row: memoryview) -> bytes | Miss:
        target = np.frombuffer(row, dtype=np.uint8)
        with self._lock:
            held = self._held.get(name)
            if held is None:
                return Miss.ABSENT
            if held.num_bytes != len(target):
                return Miss.OTHER_SIZE
            for number, source in enumerate(held.rows):
                piece = target[number * self._row_bytes : (number + 1) * self._row_bytes]
                piece[:] = self._arena[source, : len(piece)]
            self._policy.touch(name)
        fault = find_fault(held.header, row, name=name, layout_digest=self._layout_digest)
        if fault is None:
            return held.header
        with self._lock:
            if self._held.get(name) is held:
                self._drop(name)
        return fault

    def _make_room(self, num_rows: int) -> bool:
        num_tries = len(self._held)
        while len(self._free) < num_rows:
            victim = self._policy.victim() if num_tries else None
            if victim is None:
                return False
            num_tries -= 1
            if victim in self._loading:
                self._policy.touch(victim)
            else:
                self._drop(victim)
                self._num_evicted += 1
        return True

    def _drop(self, name: bytes) -> None:
        self._policy.remove(name)
        self._free.extend(self._held.pop(name).rows)
