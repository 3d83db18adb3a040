"""Expert exchange: how rows reach the ranks that hold their experts, and come back.

All ranks of an instance make the same calls in the same order; a rank without rows sends empty parts.
"""

import threading
from collections.abc import Sequence
from typing import Protocol, cast

from torch import Tensor

from ..transfer.errors import RankError


class Arrival(Protocol):
    """Rows that are under way to us."""

    def wait(self) -> list[Tensor]:
        """What each rank sent to us, in rank order: [n, C] of the dtype that we sent. To be called once.

        Our own part may be the very tensor that we sent.
        """
        ...


class ExpertExchange(Protocol):
    """Collectives of one instance. ``rank`` is ours, 0 .. ``size`` - 1.

    ``gather`` has a channel of its own: one thread may gather while another exchanges rows.
    """

    rank: int
    size: int

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's ``values`` (equally many everywhere), in rank order."""
        ...

    def start(self, parts: Sequence[Tensor]) -> Arrival:
        """Send ``parts[r]`` [n_r, C] to rank r, all of one dtype and one C on all ranks, without waiting for anybody.

        The parts must not change before the arrival was waited for, and then only is the next start allowed.
        """
        ...

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Start, and wait for the arrival."""
        ...

    def close(self) -> None:
        """Leave the instance."""
        ...


class _Arrived:
    """Rows that need no waiting."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = parts

    def wait(self) -> list[Tensor]:
        return list(self._parts)


class LocalExchange:
    """An instance of one rank."""

    rank = 0
    size = 1

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values)]

    def start(self, parts: Sequence[Tensor]) -> Arrival:
        return _Arrived(parts)

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts)

    def close(self) -> None:
        """Nothing to leave."""


class _Meeting:
    """Where threads exchange one value each, over and over."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._sent: list[object] = [None] * size

    def gather(self, rank: int, value: object) -> list[object]:
        try:
            self._sent[rank] = value
            self._barrier.wait()
            everything = list(self._sent)
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankError(
                f"rank {rank}: another rank of the instance left or did not come in time"
            ) from error
        return everything

    def abort(self) -> None:
        self._barrier.abort()


class ThreadHub:
    """Meeting point of the ranks of one instance that live as threads of one process."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.control = _Meeting(size, timeout_s)
        self.experts = _Meeting(size, timeout_s)

    def abort(self) -> None:
        """Make every waiting and later call fail."""
        self.control.abort()
        self.experts.abort()


class ThreadExchange:
    """One rank of a ``ThreadHub``. Raises RankError when another rank left or does not come in time."""

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self._hub = hub
        self.rank = rank
        self.size = hub.size

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return cast(list[list[float]], self._hub.control.gather(self.rank, list(values)))

    def start(self, parts: Sequence[Tensor]) -> Arrival:
        return _ThreadArrival(self._hub, self.rank, list(parts))

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return self.start(parts).wait()

    def close(self) -> None:
        self._hub.abort()


class _ThreadArrival:
    """Parts that are handed over when all ranks wait."""

    def __init__(self, hub: ThreadHub, rank: int, parts: list[Tensor]) -> None:
        self._hub, self._rank, self._parts = hub, rank, parts

    def wait(self) -> list[Tensor]:
        everything = cast(list[list[Tensor]], self._hub.experts.gather(self._rank, self._parts))
        return [sent[self._rank] for sent in everything]
