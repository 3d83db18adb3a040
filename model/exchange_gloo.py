"""Expert exchange between processes over the process groups of torch: gloo here, NCCL in ``exchange_nccl``."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..transfer.errors import RankError
from .parallel import Arrival


def gloo_group(name: str, store: dist.Store, rank: int, size: int, timeout_s: float) -> Any:
    """A gloo group of its own, so that its calls may overlap with those of others. Raises RankError.

    Any, as torch's stubs do not know the collectives of a group that is made directly.
    """
    limit = timedelta(seconds=timeout_s)
    try:
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, limit)
    except RuntimeError as error:
        raise RankError(f"rank {rank} of {size} could not join its instance: {error}") from error


def wait_for(work: "dist.Work", rank: int) -> None:
    """Wait for a collective of ``rank``. Raises RankError when it fails or takes longer than its group allows."""
    try:
        work.wait()
    except RuntimeError as error:
        raise RankError(f"rank {rank}: another rank of the instance is lost: {error}") from error


class GroupExchange:
    """One rank of an instance over ``payload``, a process group that moves tensors of ``device``.

    Row counts go first, over gloo; the rows follow in ``Arrival.wait``. ``store`` is kept: the groups need it. Raises
    RankError when the ranks do not meet within ``timeout_s``, or later when one is lost.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_s: float,
        payload: Any,
        device: torch.device,
    ) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._payload = payload
        self._device = device
        self._counts, self._control = (
            gloo_group(name, store, rank, size, timeout_s) for name in ("counts", "control")
        )

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        ours = torch.tensor(values, dtype=torch.float64)
        received = torch.empty(self.size * len(values), dtype=torch.float64)
        wait_for(self._control.alltoall_base(received, ours.repeat(self.size), [], []), self.rank)
        return received.view(self.size, -1).tolist()

    def start(self, parts: Sequence[Tensor]) -> Arrival:
        counts = torch.empty(self.size, dtype=torch.int64)
        ours = torch.tensor([part.shape[0] for part in parts])
        work = self._counts.alltoall_base(counts, ours, [], [])
        return _GroupArrival(self, parts, ours.tolist(), counts, work)

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return self.start(parts).wait()

    def close(self) -> None:
        for group in (self._counts, self._control, self._payload):
            group.abort()

    def rows(self, sent: Tensor, sent_counts: list[int], received_counts: list[int]) -> Tensor:
        """``sent`` bytes [n, C] in rank order, exchanged."""
        buffer = torch.empty(
            (sum(received_counts), sent.shape[1]), dtype=sent.dtype, device=self._device
        )
        work = self._payload.alltoall_base(buffer, sent, received_counts, sent_counts)
        wait_for(work, self.rank)
        return buffer


class _GroupArrival:
    """A call whose counts are under way."""

    def __init__(
        self,
        exchange: GroupExchange,
        parts: Sequence[Tensor],
        sent: list[int],
        counts: Tensor,
        work: "dist.Work",
    ) -> None:
        self._exchange, self._parts, self._sent = exchange, parts, sent
        self._counts, self._work = counts, work

    def wait(self) -> list[Tensor]:
        wait_for(self._work, self._exchange.rank)
        received: list[int] = self._counts.tolist()
        dtype = self._parts[0].dtype
        rows = torch.cat(list(self._parts)).view(torch.uint8)
        return list(self._exchange.rows(rows, self._sent, received).view(dtype).split(received))


class GlooExchange(GroupExchange):
    """One rank of an instance over gloo, for tensors of the CPU."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        payload = gloo_group("experts", store, rank, size, timeout_s)
        super().__init__(store, rank, size, timeout_s, payload, torch.device("cpu"))
