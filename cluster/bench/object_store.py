"""The same bytes through Ray's object store: put by an actor, got and copied by this process."""

import logging
import time
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError

from ...transfer.errors import DeadlineError

_WAIT_S = 60.0


class _Holder:
    """Holds a source and puts slices of it."""

    def __init__(self, num_bytes: int) -> None:
        self.source = np.full(num_bytes, 0xA5, dtype=np.uint8)

    def put(self, first: int, num_bytes: int) -> tuple[list[Any], float]:
        """A reference in a list (so that Ray does not resolve it) and the seconds that the put took."""
        started = time.perf_counter()
        reference = ray.put(self.source[first : first + num_bytes])
        return [reference], time.perf_counter() - started


class ObjectStore:
    """A Ray of this host only, with one holder actor, started here and shut down by ``close``."""

    def __init__(self, largest_bytes: int) -> None:
        self._span = 2 * largest_bytes
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=max(4 * largest_bytes, 256 << 20),
            log_to_driver=False,
            logging_level=logging.WARNING,
            _node_ip_address="127.0.0.1",
        )
        self._holder: Any = ray.remote(num_cpus=1)(_Holder).remote(self._span)
        self._target = np.zeros(self._span, dtype=np.uint8)

    def copy(self, num_bytes: int, turn: int) -> float:
        """Seconds of put, get and copy; the calls of the actor are not counted."""
        first = turn * 997 * 4096 % (self._span - num_bytes + 1)
        try:
            references, put_s = ray.get(self._holder.put.remote(first, num_bytes), timeout=_WAIT_S)
            started = time.perf_counter()
            data = ray.get(references[0], timeout=_WAIT_S)
        except GetTimeoutError as error:
            raise DeadlineError(f"object store copy: not over after {_WAIT_S} s") from error
        self._target[first : first + num_bytes] = data
        return put_s + time.perf_counter() - started

    def close(self) -> None:
        """Shut this Ray down."""
        ray.shutdown()
