"""Which transport the expert exchange of an instance takes, and how its ranks meet."""

import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ..transfer.errors import ConfigError, RankError
from .exchange_gloo import GlooExchange
from .exchange_nccl import NcclExchange
from .exchange_shared import SharedMemoryExchange
from .parallel import ExpertExchange, LocalExchange

KINDS = ("auto", "shared_memory", "gloo", "nccl")


def host_identity() -> str:
    """Equal for processes that can share memory: same boot of the same host, and one can see the other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"


def join_exchange(
    kind: str, address: str, rank: int, size: int, timeout_s: float, host: str | None = None
) -> ExpertExchange:
    """Meet the other ranks of an instance at ``address``, ``host:port`` of rank 0; all of them call this alike.

    ``kind`` is one of KINDS; "auto" takes shared memory if all ranks are on one host and gloo if not. NCCL is never
    taken unasked, as the networks compute on the CPU. ``timeout_s`` limits the meeting and every later call. An
    instance of one rank meets nobody. ``host`` is what ``host_identity`` says. Raises ConfigError where ``kind`` is
    unknown or impossible here, RankError when the ranks do not meet in time.
    """
    if kind not in KINDS:
        raise ConfigError(f"exchange = {kind!r} is not allowed: one of {', '.join(KINDS)}")
    if size == 1:
        return LocalExchange()
    try:
        store = _meet(address, rank, size, timeout_s)
        if kind in ("auto", "shared_memory"):
            hosts = _hosts(store, rank, size, host or host_identity())
            other = next((r for r in range(size) if hosts[r] != hosts[0]), None)
            if other is None:
                return SharedMemoryExchange(store, rank, size, timeout_s)
            if kind == "shared_memory":
                raise ConfigError(
                    f"exchange 'shared_memory' needs all ranks of an instance on one host: rank 0 is on "
                    f"{hosts[0]!r}, rank {other} on {hosts[other]!r} (host name, boot, process namespace); "
                    "take 'auto' or 'gloo'"
                )
        if kind == "nccl":
            return NcclExchange(store, rank, size, timeout_s)
        return GlooExchange(store, rank, size, timeout_s)
    except (RuntimeError, dist.DistError) as error:
        raise RankError(
            f"rank {rank} of {size} could not join its instance at {address}: {error}"
        ) from error


def _meet(address: str, rank: int, size: int, timeout_s: float) -> dist.Store:
    host, port = address.rsplit(":", 1)
    limit = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, int(port), size, is_master=rank == 0, timeout=limit)


def _hosts(store: dist.Store, rank: int, size: int, ours: str) -> list[str]:
    """What each rank says of its host. Rank 0, which keeps the store, stays until all have read it."""
    store.set(f"host/{rank}", ours)
    hosts = [store.get(f"host/{r}").decode() for r in range(size)]
    store.set(f"read/{rank}", "")
    if rank == 0:
        store.wait([f"read/{r}" for r in range(size)])
    return hosts
