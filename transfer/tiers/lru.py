"""Least recently used first: the plainest eviction policy; see ``store.Policy``."""

from collections import OrderedDict

from ..errors import ConfigError
from .store import Policy

POLICIES = ("lru",)


class LruPolicy:
    """See store.Policy. Cost and size make no difference."""

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


def make_policy(name: str) -> Policy:
    """The policy of this name. Raises ConfigError."""
    if name not in POLICIES:
        raise ConfigError(f"policy = {name!r} is not allowed: one of {', '.join(POLICIES)}")
    return LruPolicy()
