"""How NIXL and UCX are set up: the one place that touches their environment variables.

UCX has no other door for most of its settings, and reads them when its library is loaded. So ``apply`` must run
before the first import of nixl in a process; ``NixlBackend`` does that. A variable that the operator has set wins.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlOptions:
    """Transport settings of a rank.

    ``network_devices`` (UCX_NET_DEVICES) names the interfaces that may carry traffic, such as ``mlx5_0:1,eth0``; the
    default stays on this host. ``transports`` (UCX_TLS): between processes of one host and user UCX reads the peer's
    memory directly (CMA), between hosts it prefers RDMA and falls back to TCP. ``progress_thread`` spins on one core
    and is worth it only for TCP, where the holder's processor has to serve every read. A read that takes longer than
    ``read_timeout_s`` counts as a lost peer. ``log_level``: of both libraries, ``error`` or more (``warn``, ``info``).
    """

    network_devices: str = "lo"
    transports: str = "all"
    progress_thread: bool = False
    read_timeout_s: float = 30.0
    close_timeout_s: float = 2.0
    log_level: str = "error"

    def environment(self) -> dict[str, str]:
        """The variables that these options stand for."""
        return {
            "UCX_NET_DEVICES": self.network_devices,
            "UCX_TLS": self.transports,
            "UCX_LOG_LEVEL": self.log_level,
            "NIXL_LOG_LEVEL": self.log_level.upper(),
        }

    def apply(self) -> None:
        """Set those variables that are not set yet."""
        for name, value in self.environment().items():
            os.environ.setdefault(name, value)
