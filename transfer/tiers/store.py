"""What a tier needs from the place where its records lie, and from a policy that says which of them goes first.

Worker threads of the tier make all calls but ``contains``, ``hold`` and ``usage``, so a store may block, and it is
thread-safe. Failures of disk or network are Misses and False, with one line in the log; they never come out as
exceptions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .record import Miss, Record

Headers = list[bytes | Miss]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a store holds, as far as it knows: other processes may have added and removed."""

    num_records: int
    num_bytes: int
    capacity_bytes: int
    num_evicted: int = 0
    """By this process."""


class Store(Protocol):
    """MemoryStore, DiskStore or ObjectStore."""

    def contains(self, name: bytes) -> bool:
        """Whether the record seems to be there. At once, from memory; only ``read`` knows."""
        ...

    def hold(self, names: Sequence[bytes]) -> None:
        """Evict none of these before ``release``; at once. A store that can read what it evicted need do nothing."""
        ...

    def release(self, names: Sequence[bytes]) -> None:
        """The end of as many ``hold``."""
        ...

    def read(self, names: Sequence[bytes], rows: Sequence[memoryview]) -> Headers:
        """Bring payloads into rows of exactly their size; for each its header, verified, or why it is a miss.

        A row that is a miss may hold anything. For eviction the last is used first: of a prompt the head stays longest.
        """
        ...

    def write(self, record: Record) -> bool:
        """Keep a record, evicting others for it. False when that is not possible."""
        ...

    def refresh(self) -> None:
        """Look what others did to a shared store; called every few seconds."""
        ...

    def usage(self) -> Usage:
        """What is there, at once."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Policy(Protocol):
    """Which record goes first; see ``eviction``."""

    def insert(self, key: bytes, cost: float, size: int) -> None:
        """A new record."""
        ...

    def touch(self, key: bytes) -> None:
        """It was used."""
        ...

    def remove(self, key: bytes) -> None:
        """It is gone."""
        ...

    def victim(self) -> bytes | None:
        """The one to remove next; it stays until ``remove``."""
        ...
