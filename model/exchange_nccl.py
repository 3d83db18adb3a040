"""Expert exchange between GPUs: rows over NCCL, row counts and gathers over gloo."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..transfer.errors import ConfigError, RankError
from .exchange_gloo import GroupExchange


class NcclExchange(GroupExchange):
    """One rank of an instance whose rows are CUDA tensors, on the process's current CUDA device.

    ``Arrival.wait`` orders the arrival before later work of the current stream and does not block the host, so a lost
    rank shows at the next gather or row count. Raises ConfigError where there is no CUDA device or no NCCL.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        group: Any = getattr(dist, "ProcessGroupNCCL", None)
        if group is None or not torch.cuda.is_available():
            raise ConfigError(
                f"exchange 'nccl' is not possible for rank {rank}: it needs a CUDA device and a torch that is built "
                "with NCCL; take 'gloo', or 'auto'"
            )
        try:
            payload = group(
                dist.PrefixStore("experts", store), rank, size, timedelta(seconds=timeout_s)
            )
        except RuntimeError as error:
            raise RankError(
                f"rank {rank} of {size} could not join its instance: {error}"
            ) from error
        device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(store, rank, size, timeout_s, payload, device)
