"""A NIXL agent for files (plugin POSIX) or objects (plugin OBJ), used by the tiers.

Not thread-safe. What NIXL reports of a storage transfer is that it ended, not how much came: a short file ends well
too. So callers verify what they got.
"""

import time
from collections.abc import Sequence
from typing import Any, Literal
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError, HeadraceError, RankError
from .nixl_errors import translated
from .nixl_options import NixlOptions

Plugin = Literal["POSIX", "OBJ"]
Target = tuple[int, int, int, str]
"""Offset, bytes, file descriptor (POSIX) or a number of the caller's (OBJ), nothing or the object's key."""
_KIND = {"POSIX": "FILE", "OBJ": "OBJ"}


class NixlStorage:
    """One agent with one storage plugin. Raises ConfigError when this build of NIXL cannot load the plugin."""

    def __init__(self, plugin: Plugin, options: dict[str, str]) -> None:
        NixlOptions().apply()
        from nixl._api import nixl_agent, nixl_agent_config

        self._plugin: Plugin = plugin
        self.agent: Any = nixl_agent(f"storage-{uuid4().hex}", nixl_agent_config(backends=[]))
        try:
            with translated(f"plugin {plugin}", otherwise=RankError):
                self.agent.create_backend(plugin, options)
        except RankError as error:
            raise ConfigError(
                f"this build of NIXL cannot use its plugin {plugin}: {error}; use the tier without NIXL"
            ) from error

    def transfer(
        self,
        operation: Literal["READ", "WRITE"],
        memory: NDArray[np.uint64],
        targets: Sequence[Target],
        *,
        poll_s: float = 0.0,
    ) -> bool:
        """Move between ``memory`` (address, bytes, 0) and the target of the same place; False on an error of NIXL's.

        Returns when NIXL has ended, since there is no calling a transfer back: who waits must be a thread that may.
        """
        kind = _KIND[self._plugin]
        registered: list[Any] = []
        try:
            with translated(f"{operation} by {self._plugin}"):
                registered.append(self.agent.register_memory(memory, "DRAM"))
                registered.append(self.agent.register_memory(list(targets), kind))
                places = np.array([target[:3] for target in targets], dtype=np.uint64)
                handle = self.agent.initialize_xfer(
                    operation,
                    self.agent.get_xfer_descs(memory, "DRAM"),
                    self.agent.get_xfer_descs(places, kind),
                    self.agent.name,
                )
                state = self.agent.transfer(handle)
                while state == "PROC":
                    time.sleep(poll_s)
                    state = self.agent.check_xfer_state(handle)
                handle.release()
                return state == "DONE"
        except HeadraceError:
            return False
        finally:
            for region in registered:
                self.agent.deregister_memory(region)
