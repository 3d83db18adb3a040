"""Which record goes first when a tier is full; see ``store.Policy``. `headrace bench cache` compares them.

lru      the one that was longest unused
lfu      the one least used, where what was used long ago counts less and less
s3fifo   newcomers pass a short queue first: what nobody asks for there never displaces what was asked for twice
cost     as lfu, with uses weighted by what a record costs to compute again, for its size
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from itertools import count

from ..errors import ConfigError
from .store import Policy

DEFAULT_POLICY = "lru"


class Lru:
    """Cost and size make no difference."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def insert(self, key: bytes, cost: float, size: int) -> None:
        """See Policy."""
        del cost, size
        self._order[key] = None

    def touch(self, key: bytes) -> None:
        """See Policy."""
        self._order.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """See Policy."""
        self._order.pop(key, None)

    def victim(self) -> bytes | None:
        """See Policy."""
        return next(iter(self._order), None)


class Lfu:
    """The least of (age + uses) goes first; the age is that of the last victim, so old uses fade."""

    def __init__(self) -> None:
        self._age = 0
        self._numbers = count()
        self._uses: dict[bytes, int] = {}
        self._valid: dict[bytes, int] = {}
        self._heap: list[tuple[int, int, bytes]] = []

    def insert(self, key: bytes, cost: float, size: int) -> None:
        """See Policy."""
        del cost, size
        self._uses[key] = 0
        self.touch(key)

    def touch(self, key: bytes) -> None:
        """See Policy."""
        self._uses[key] += 1
        number = self._valid[key] = next(self._numbers)
        heapq.heappush(self._heap, (self._age + self._uses[key], number, key))
        if len(self._heap) > 4 * len(self._uses) + 64:
            self._heap = [entry for entry in self._heap if self._valid.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def remove(self, key: bytes) -> None:
        """See Policy."""
        if self._heap and self._heap[0][2] == key:
            self._age = self._heap[0][0]
        self._uses.pop(key, None)
        self._valid.pop(key, None)

    def victim(self) -> bytes | None:
        """See Policy."""
        while self._heap and self._valid.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None


_MAKERS: dict[str, Callable[[], Policy]] = {"lru": Lru, "lfu": Lfu}
POLICIES = tuple(_MAKERS)


def make_policy(name: str) -> Policy:
    """The policy of this name. Raises ConfigError."""
    if name not in _MAKERS:
        raise ConfigError(f"policy = {name!r} is not allowed: one of {', '.join(POLICIES)}")
    return _MAKERS[name]()
