"""Expert exchange: how rows reach the ranks that hold their experts, and come back.

All ranks of an instance make the same calls in the same order; a rank without rows sends empty parts.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..transfer.errors import RankError


class ExpertExchange(Protocol):
    """Collectives of one instance. ``rank`` is ours, 0 .. ``size`` - 1.

    ``gather`` has a channel of its own: one thread may gather while another is in ``all_to_all``.
    """

    rank: int
    size: int

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's ``values`` (equally many everywhere), in rank order."""
        ...

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send ``parts[r]`` float32 [n_r, C] to rank r; return what each rank sent to us, in rank order."""
        ...

    def close(self) -> None:
        """Leave the instance."""
        ...


def owner_of_expert(expert: int, num_experts: int, size: int) -> int:
    """Rank that holds an expert: experts in order, as evenly as can be."""
    return expert * size // num_experts


class LocalExchange:
    """An instance of one rank."""

    rank = 0
    size = 1

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values)]

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

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        everything = self._hub.experts.gather(self.rank, list(parts))
        return [sent[self.rank] for sent in everything]  # type: ignore[index]

    def close(self) -> None:
        self._hub.abort()


class GlooExchange:
    """One rank of an instance whose ranks are processes, over gloo.

    ``address`` is ``host:port`` of rank 0's store. Raises RankError when the ranks do not meet within ``timeout_s``,
    or later when one is lost.
    """

    def __init__(self, address: str, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        host, port = address.rsplit(":", 1)
        limit = timedelta(seconds=timeout_s)
        try:
            store = dist.TCPStore(host, int(port), size, is_master=rank == 0, timeout=limit)
            self._experts, self._control = (
                # torch's stubs do not know the collectives of a group that is made directly
                cast(Any, dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, limit))
                for name in ("experts", "control")
            )
            self._store = store
        except (RuntimeError, dist.DistError) as error:
            raise RankError(
                f"rank {rank} of {size} could not join its instance at {address}: {error}"
            ) from error

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        ours = torch.tensor(values, dtype=torch.float64)
        received = torch.empty(self.size * len(values), dtype=torch.float64)
        self._wait(self._control.alltoall_base(received, ours.repeat(self.size), [], []))
        return received.view(self.size, -1).tolist()

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        sent = [part.shape[0] for part in parts]
        counts = torch.empty(self.size, dtype=torch.int64)
        self._wait(self._experts.alltoall_base(counts, torch.tensor(sent), [], []))
        received: list[int] = counts.tolist()
        buffer = torch.empty((sum(received), parts[0].shape[1]))
        self._wait(self._experts.alltoall_base(buffer, torch.cat(list(parts)), received, sent))
        return list(buffer.split(received))

    def close(self) -> None:
        self._experts.abort()
        self._control.abort()

    def _wait(self, work: "dist.Work") -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank}: another rank of the instance is lost: {error}"
            ) from error
