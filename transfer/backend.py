"""What a rank needs from a transport: read a peer's arenas, pass small messages, notice that a peer is gone.

Every rank exposes its byte arenas, those of ``plan.ARENAS``, for reading. Nobody writes into a peer's memory. All
methods are called from one thread, the rank's loop. ``LoopbackBackend`` serves ranks of one process,
``NixlBackend`` ranks of different processes and hosts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .layout import CacheLayout
from .plan import Arena, Copy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arenas:
    """The memory of one rank: contiguous uint8 tensors [num_blocks, block_bytes] and [num_slots, slot_bytes].

    ``tails``, where there are any: [num_tails, keep * tail_row_bytes].
    """

    layout: CacheLayout
    blocks: Tensor
    slots: Tensor
    tails: Tensor | None = None

    @property
    def tensors(self) -> dict[Arena, Tensor]:
        """Arena -> its bytes; a rank without tails has none."""
        tails = torch.empty(0, dtype=torch.uint8) if self.tails is None else self.tails
        return {"blocks": self.blocks, "slots": self.slots, "tails": tails}


class Read(Protocol):
    """A read under way. Two questions, because a failed read may still be writing.

    No page may be reused while a writer can reach it, and a transport cannot call a transfer back. So there is no
    cancel: whoever loses interest, and whoever got an error from ``poll``, keeps the target blocks and slot aside
    and frees them when ``quiet`` says True. That is at once, unless the peer stands still without having died.
    """

    def poll(self) -> bool:
        """True when every byte is in place (for ever after, too). Raises TransferError, the same one each time.

        PeerLostError comes at the latest when the backend's read deadline is over.
        """
        ...

    def quiet(self) -> bool:
        """True when no writer can reach the target any more: it may be freed. Call it now and then until it does."""
        ...


class TransferBackend(Protocol):
    """One rank's end of the transport."""

    @property
    def name(self) -> str:
        """Name of this rank, unique in the cluster."""
        ...

    @property
    def incarnation(self) -> str:
        """Random id of this life of the rank; a restarted rank has another one."""
        ...

    @property
    def peers(self) -> Mapping[str, str]:
        """Connected peers: name to incarnation."""
        ...

    def pairing(self) -> bytes:
        """An encoded Pairing: what a peer's ``connect`` needs."""
        ...

    def connect(self, pairing: bytes) -> str:
        """Make a peer reachable and return its name.

        Idempotent; a new incarnation under a known name drops the old one first. Both sides must connect before
        messages flow both ways. Raises MessageError, LayoutMismatchError, PeerLostError.
        """
        ...

    def start_read(self, peer: str, copies: Sequence[Copy]) -> Read:
        """Start to copy from the peer's arenas into ours.

        Raises PeerLostError for a peer that is not connected, TransferError for ranges outside the peer's arenas,
        IntegrityError for ranges outside ours.
        """
        ...

    def send(self, peer: str, message: bytes) -> None:
        """Send a message, at most once and unordered against others. Raises PeerLostError when the peer is gone."""
        ...

    def receive(self) -> list[tuple[str, bytes]]:
        """Messages that have come in, as (peer name, bytes). Those of strangers and dead incarnations are dropped."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Reads from it fail with PeerLostError. Unknown names are fine."""
        ...

    def close(self) -> None:
        """Drop all peers and give the arenas back. Idempotent."""
        ...
