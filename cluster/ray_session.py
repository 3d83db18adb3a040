"""The connection to Ray: joins the cluster that is named, or starts one on this host and ends it again."""

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from ..transfer.errors import ConfigError
from .config import ClusterConfig
from .placement import local_resources

_log = logging.getLogger(__name__)
_GONE_S = 5.0
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySession:
    """``connected_here``: this session called ray.init. ``started_here``: that also started the Ray cluster."""

    connected_here: bool
    started_here: bool

    def close(self, rank_pids: Iterable[int] = ()) -> None:
        """Leave Ray if we came; end the cluster if we started it, then see to it that its ranks' processes are gone."""
        if self.connected_here:
            ray.shutdown()
        if self.started_here:
            end_processes(rank_pids)


def open_ray(config: ClusterConfig) -> RaySession:
    """Connect as the configuration says. Raises ConfigError when the named cluster cannot be joined."""
    if ray.is_initialized():
        return RaySession(connected_here=False, started_here=False)
    address = config.ray.address or os.environ.get("RAY_ADDRESS") or "local"
    on_sigterm = signal.getsignal(signal.SIGTERM)
    if address == "local":
        _start(config)
    else:
        _join(address, config)
    if callable(on_sigterm) and threading.current_thread() is threading.main_thread():
        signal.signal(
            signal.SIGTERM, on_sigterm
        )  # ray.init has put a handler of its own over the caller's
    return RaySession(connected_here=True, started_here=address == "local")


def _join(address: str, config: ClusterConfig) -> None:
    try:
        ray.init(address=address, namespace=config.ray.namespace, **_QUIET)
    except (RayError, ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ConfigError(
            f"no Ray cluster can be joined at {address!r}: {error}. Start one with `ray start --head`, set "
            "RAY_AUTH_MODE and the token as that cluster has them, or use ray.address = local"
        ) from error


def _start(config: ClusterConfig) -> None:
    """A cluster of one node that offers exactly what the ranks ask for; Ray itself finds the GPUs."""
    wanted = local_resources(config)
    cpus = math.ceil(wanted.pop("CPU", 0.0))
    wanted.pop("GPU", None)
    ray.init(
        address="local",
        num_cpus=math.ceil(config.ray.local.num_cpus or cpus),
        resources=wanted,
        object_store_memory=config.ray.local.object_store_mib * 2**20,
        include_dashboard=False,
        namespace=config.ray.namespace,
        _system_config={
            "worker_niceness": 0
        },  # Ray's 15 would put the ranks behind everything else of this host
        **_QUIET,
    )


def end_processes(pids: Iterable[int]) -> None:
    """Wait a little for processes of this host to end, then kill those that have not."""
    deadline = time.monotonic() + _GONE_S
    for pid in pids:
        while _alive(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        if _alive(pid):
            _log.warning("process %d outlived its cluster and is killed", pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
