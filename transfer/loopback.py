"""The transport between ranks of one process, and the fake for tests: same promises as NIXL, plus faults on demand.

All ranks share one ``LoopbackHub``. A read copies when it is polled for the first time, so that a test can put
events between its start and its end. Thread-safe: ranks may run in different threads.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from torch import Tensor

from .backend import Arenas
from .codec import decode, encode
from .errors import MessageError, PeerLostError, TransferError
from .messages import Pairing
from .plan import ARENAS, Arena, Copy
from .ranges import require_copies_fit


@dataclass(slots=True)
class Faults:
    """What goes wrong on purpose, from now on. ``polls_before_copy`` polls of a read answer False before it copies."""

    polls_before_copy: int = 0
    corrupt_next_copies: int = 0
    lose_next_messages: int = 0


@dataclass(slots=True)
class _Endpoint:
    incarnation: str
    arenas: Mapping[Arena, Tensor]
    mailbox: list[tuple[str, str, bytes]] = field(default_factory=list)


class LoopbackHub:
    """The place where the ranks of one process meet."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.endpoints: dict[str, _Endpoint] = {}
        self.faults = Faults()

    def drop(self, name: str) -> None:
        """The rank dies at once, as by SIGKILL: its memory and its messages are gone."""
        with self.lock:
            self.endpoints.pop(name, None)

    def find(self, name: str, incarnation: str | None) -> _Endpoint:
        """The endpoint of exactly this incarnation. Raises PeerLostError."""
        endpoint = self.endpoints.get(name)
        if endpoint is None or endpoint.incarnation != incarnation:
            raise PeerLostError(f"peer {name} incarnation {incarnation} is gone")
        return endpoint


class LoopbackRead:
    """A read that copies on its first poll after the configured delay."""

    def __init__(self, backend: "LoopbackBackend", peer: str, copies: Sequence[Copy]) -> None:
        self._backend = backend
        self._peer = peer
        self._incarnation = backend.peers[peer]
        self._copies = copies
        self._polls_left = backend.hub.faults.polls_before_copy
        self._outcome: TransferError | bool = False

    def poll(self) -> bool:
        """See ``Read.poll``."""
        if isinstance(self._outcome, TransferError):
            raise self._outcome
        if not self._outcome:
            if self._polls_left > 0:
                self._polls_left -= 1
                return False
            try:
                self._backend.copy(self._peer, self._incarnation, self._copies)
            except TransferError as error:
                self._outcome = error
                raise
            self._outcome = True
        return True

    def quiet(self) -> bool:
        """Always: this read writes inside ``poll`` only."""
        return True


class LoopbackBackend:
    """One rank's end of a hub. A backend made under a known name replaces the rank of that name: a restart."""

    def __init__(self, hub: LoopbackHub, name: str, arenas: Arenas) -> None:
        self.hub = hub
        self.name = name
        self.incarnation = uuid4().hex
        self._layout = arenas.layout
        self._arenas: Mapping[Arena, Tensor] = {
            arena: tensor.view(-1) for arena, tensor in arenas.tensors.items()
        }
        self._peers: dict[str, Pairing] = {}
        with hub.lock:
            hub.endpoints[name] = _Endpoint(self.incarnation, self._arenas)

    @property
    def peers(self) -> Mapping[str, str]:
        """Connected peers: name to incarnation."""
        return {name: pairing.incarnation for name, pairing in self._peers.items()}

    def pairing(self) -> bytes:
        """What a peer's ``connect`` needs; valid inside this process only."""
        return encode(
            Pairing(
                name=self.name,
                incarnation=self.incarnation,
                transport="loopback",
                layout=self._layout,
                arena_bytes=tuple(self._arenas[arena].numel() for arena in ARENAS),
                address=b"",
            )
        )

    def connect(self, pairing: bytes) -> str:
        """Make a peer of the same hub reachable; see ``TransferBackend.connect``."""
        message = decode(pairing)
        if not isinstance(message, Pairing) or message.transport != "loopback":
            raise MessageError(f"a loopback pairing was expected, not {type(message).__name__}")
        self._layout.require_same(message.layout, message.name)
        with self.hub.lock:
            self.hub.find(message.name, message.incarnation)
        self._peers[message.name] = message
        return message.name

    def start_read(self, peer: str, copies: Sequence[Copy]) -> LoopbackRead:
        """Check the ranges; the copying itself is left to ``poll``."""
        pairing = self._require_peer(peer)
        ours: dict[Arena, int] = {arena: tensor.numel() for arena, tensor in self._arenas.items()}
        theirs = dict(zip(ARENAS, pairing.arena_bytes, strict=True))
        require_copies_fit(peer, copies, theirs, ours)
        return LoopbackRead(self, peer, copies)

    def copy(self, peer: str, incarnation: str, copies: Sequence[Copy]) -> None:
        """Do the copies now. Raises PeerLostError unless exactly this incarnation is alive and connected."""
        if self.peers.get(peer) != incarnation:
            raise PeerLostError(f"peer {peer} incarnation {incarnation} was disconnected")
        with self.hub.lock:
            sources = self.hub.find(peer, incarnation).arenas
            for copy in copies:
                target = self._arenas[copy.arena][copy.target_offset :][: copy.num_bytes]
                target.copy_(sources[copy.arena][copy.source_offset :][: copy.num_bytes])
                if self.hub.faults.corrupt_next_copies > 0:
                    self.hub.faults.corrupt_next_copies -= 1
                    target[copy.num_bytes // 2] ^= 0x10

    def send(self, peer: str, message: bytes) -> None:
        """Put a message into the peer's mailbox."""
        pairing = self._require_peer(peer)
        with self.hub.lock:
            endpoint = self.hub.find(peer, pairing.incarnation)
            if self.hub.faults.lose_next_messages > 0:
                self.hub.faults.lose_next_messages -= 1
                return
            endpoint.mailbox.append((self.name, self.incarnation, message))

    def receive(self) -> list[tuple[str, bytes]]:
        """Empty our mailbox."""
        with self.hub.lock:
            endpoint = self.hub.endpoints.get(self.name)
            if endpoint is None or endpoint.incarnation != self.incarnation:
                return []
            mail, endpoint.mailbox = endpoint.mailbox, []
        peers = self.peers
        return [(name, data) for name, incarnation, data in mail if peers.get(name) == incarnation]

    def disconnect(self, peer: str) -> None:
        """Forget a peer."""
        self._peers.pop(peer, None)

    def close(self) -> None:
        """Leave the hub."""
        self._peers.clear()
        with self.hub.lock:
            endpoint = self.hub.endpoints.get(self.name)
            if endpoint is not None and endpoint.incarnation == self.incarnation:
                self.hub.drop(self.name)

    def _require_peer(self, peer: str) -> Pairing:
        if peer not in self._peers:
            raise PeerLostError(
                f"peer {peer} is not connected; connected are {sorted(self._peers)}"
            )
        return self._peers[peer]
