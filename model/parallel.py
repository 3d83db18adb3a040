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
    """Collectives of one instance. ``rank`` is ours, 0 .. ``size`` - 1."""

    rank: int
    size: int

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank."""
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

    def any(self, flag: bool) -> bool:
        return flag

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts)

    def close(self) -> None:
        """Nothing to leave."""


class ThreadHub:
    """Meeting point of the ranks of one instance that live as threads of one process."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._sent: list[object] = [None] * size

    def gather(self, rank: int, value: object) -> list[object]:
        """Every rank's ``value``, in rank order. Raises RankError when a rank does not come in time."""
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
        """Make every waiting and later call fail."""
        self._barrier.abort()


class ThreadExchange:
    """One rank of a ``ThreadHub``."""

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self._hub = hub
        self.rank = rank
        self.size = hub.size

    def any(self, flag: bool) -> bool:
        return any(self._hub.gather(self.rank, flag))

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        everything = self._hub.gather(self.rank, list(parts))
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
            prefixed = dist.PrefixStore("experts", store)
            # torch's stubs do not know the collectives of a group that is made directly
            self._group: Any = cast(Any, dist.ProcessGroupGloo(prefixed, rank, size, limit))
            self._store = store
        except (RuntimeError, dist.DistError) as error:
            raise RankError(
                f"rank {rank} of {size} could not join its instance at {address}: {error}"
            ) from error

    def any(self, flag: bool) -> bool:
        shared = torch.tensor([int(flag)])
        options = dist.AllreduceOptions()
        options.reduceOp = cast(Any, dist.ReduceOp.MAX)
        self._wait(self._group.allreduce([shared], options))
        return bool(shared.item())

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        sent = [part.shape[0] for part in parts]
        counts = torch.empty(self.size, dtype=torch.int64)
        self._wait(self._group.alltoall_base(counts, torch.tensor(sent), [], []))
        received: list[int] = counts.tolist()
        buffer = torch.empty((sum(received), parts[0].shape[1]))
        self._wait(self._group.alltoall_base(buffer, torch.cat(list(parts)), received, sent))
        return list(buffer.split(received))

    def close(self) -> None:
        self._group.abort()

    def _wait(self, work: "dist.Work") -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank}: another rank of the instance is lost: {error}"
            ) from error
