"""How NIXL and UCX are set up: the one place that touches their environment variables.

UCX has no other door for most of its settings, and reads them when its library is loaded. So ``apply`` must run
before the first import of nixl in a process; ``NixlBackend`` does that. A variable that the operator has set wins.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlOptions:
    """Transport settings of a rank."""

    network_devices: str = "lo"
    """Interfaces that may carry traffic (UCX_NET_DEVICES), such as `mlx5_0:1,eth0`; the default stays on this host."""
    transports: str = "all"
    """What UCX may use (UCX_TLS). Between processes of one host and user it reads the peer's memory directly (CMA),
    between hosts it prefers RDMA and falls back to TCP."""
    progress_thread: bool = False
    """A thread that spins on one core; worth it only for TCP, where the holder's processor has to serve every read."""
    read_timeout_s: float = 30.0
    """A read that takes longer counts as a lost peer."""
    close_timeout_s: float = 2.0
    """How long closing waits for reads under way."""
    log_level: str = "error"
    """Of both libraries: `error`, or more with `warn` and `info`."""

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
