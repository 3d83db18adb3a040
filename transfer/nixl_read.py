"""A NIXL transfer under way, and the peer that it reads from."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from .errors import PeerLostError, TransferError
from .nixl_errors import translated
from .plan import Arena


class ReadOwner(Protocol):
    """The backend, as its reads see it."""

    agent: Any

    def read_ended(self, peer: "NixlPeer", read: "NixlRead", *, lost: bool) -> None:
        """No writer can reach the read's target any more; ``lost``: its peer is gone."""
        ...


@dataclass(slots=True, eq=False)
class NixlPeer:
    """A connected incarnation: where its arenas begin, how long they are, and the reads that have not ended."""

    name: str
    incarnation: str
    agent_name: str
    base: Mapping[Arena, int]
    num_bytes: Mapping[Arena, int]
    pairing: bytes
    num_warm_ups: int = 0
    warm_up: "NixlRead | None" = None
    reads: "set[NixlRead]" = field(default_factory=set)


class NixlRead:
    """One posted transfer; see ``backend.Read``."""

    def __init__(self, owner: ReadOwner, peer: NixlPeer, handle: Any, deadline: float) -> None:
        self._owner = owner
        self._peer = peer
        self._handle = handle
        self._deadline = deadline
        self._error: TransferError | None = None

    def poll(self) -> bool:
        """See ``Read.poll``."""
        self.advance()
        if self._handle is not None and time.monotonic() > self._deadline:
            self.fail(f"read from {self._peer.name} is not over at its deadline")
        if self._error is not None:
            raise self._error
        return self._handle is None

    def quiet(self) -> bool:
        """See ``Read.quiet``."""
        self.advance()
        return self._handle is None

    def fail(self, why: str) -> None:
        """Nobody may use these bytes any more, whatever NIXL says later."""
        if self._error is None:
            self._error = PeerLostError(f"{why}; the request must be prefilled again")

    def advance(self) -> None:
        """Let UCX work; when the transfer has ended, well or badly, give its handle back."""
        if self._handle is None:
            return
        try:
            with translated(f"read from {self._peer.name}"):
                state = self._owner.agent.check_xfer_state(self._handle)
        except TransferError as error:
            self._error = self._error or error
            self.end(lost=isinstance(error, PeerLostError))
            return
        if state == "PROC":
            return
        if state != "DONE":
            self.fail(f"read from {self._peer.name} ended as {state}")
        self.end(lost=state != "DONE")

    def end(self, *, lost: bool) -> None:
        """Give the handle back to NIXL. ``lost``: NIXL says that the peer is gone."""
        with translated(f"end of a read from {self._peer.name}"):
            handle, self._handle = self._handle, None
            if handle is not None:
                handle.release()
        self._owner.read_ended(self._peer, self, lost=lost)
