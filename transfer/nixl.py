"""The transport between processes and hosts: one NIXL agent per rank, UCX underneath, one-sided reads.

    our loop:  start_read --post--> [UCX: CMA on one host, RDMA or TCP between hosts] --poll--> done
    the peer:  takes no part, except that its loop (``receive``) answers connection set-up, and TCP reads

An incarnation of a rank is an agent of its own, named ``name#incarnation``: what a dead one leaves behind (addresses,
keys, late messages) can never be taken for its successor's. NIXL can neither call back a transfer under way nor be
made to forget its peer safely (released and removed, UCX goes on writing), so a peer with unfinished reads is first
*retired*: unknown to callers, dropped from NIXL when its last read has ended.

Descriptor lists are built per read from one numpy array. Measured, that costs 0.05 ms for one copy and 0.3 ms for a
thousand, so nothing is prepared in advance.
"""

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np

from .backend import Arenas
from .codec import decode, encode
from .errors import HeadraceError, MessageError, PeerLostError, RankError, TransferError
from .huge_pages import use_huge_pages
from .messages import Pairing
from .nixl_options import NixlOptions
from .plan import Arena, Copy
from .ranges import copy_table, descriptors, require_copies_fit, table_fits

TRANSLATION: dict[str, type[HeadraceError]] = {
    "nixlBackendError": PeerLostError,
    "nixlCancelledError": PeerLostError,
    "nixlInvalidParamError": TransferError,
    "nixlMismatchError": TransferError,
    "nixlNoTelemetryError": TransferError,
    "nixlNotAllowedError": TransferError,
    "nixlNotFoundError": PeerLostError,
    "nixlNotPostedError": TransferError,
    "nixlNotSupportedError": TransferError,
    "nixlRemoteDisconnectError": PeerLostError,
    "nixlRepostActiveError": TransferError,
    "nixlUnknownError": TransferError,
}


class _Address(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Pairing.address: where the peer's arenas begin in its memory, and what its agent tells about itself."""

    blocks_base: int
    slots_base: int
    metadata: bytes


@dataclass(slots=True, eq=False)
class _Peer:
    name: str
    incarnation: str
    agent_name: str
    base: Mapping[Arena, int]
    num_bytes: Mapping[Arena, int]
    reads: "set[NixlRead]" = field(default_factory=set)


class NixlRead:
    """One posted transfer; see ``backend.Read``."""

    def __init__(self, backend: "NixlBackend", peer: _Peer, handle: Any, deadline: float) -> None:
        self._backend = backend
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
                if self._backend.agent.check_xfer_state(self._handle) == "PROC":
                    return
        except TransferError as error:
            self._error = self._error or error
        self.end()

    def end(self) -> None:
        """Give the handle back to NIXL."""
        with translated(f"end of a read from {self._peer.name}"):
            handle, self._handle = self._handle, None
            if handle is not None:
                handle.release()
        self._backend.read_ended(self._peer, self, lost=isinstance(self._error, PeerLostError))


class NixlBackend:
    """One rank's NIXL agent. Not thread-safe: the rank's loop thread owns it.

    Raises RankError when NIXL cannot be set up on this host.
    """

    def __init__(self, name: str, arenas: Arenas, options: NixlOptions | None = None) -> None:
        self.name = name
        self.incarnation = uuid4().hex
        self._options = options or NixlOptions()
        self._layout = arenas.layout
        self.arenas = arenas  # registered memory must outlive its registration
        tensors = {"blocks": arenas.blocks, "slots": arenas.slots}
        self._base: dict[Arena, int] = {"blocks": arenas.blocks.data_ptr()}
        self._base["slots"] = arenas.slots.data_ptr()
        self._num_bytes: dict[Arena, int] = {"blocks": arenas.blocks.numel()}
        self._num_bytes["slots"] = arenas.slots.numel()
        if not all(tensor.is_contiguous() for tensor in tensors.values()):
            raise RankError("cache arenas must be contiguous to be registered with NIXL")
        for tensor in tensors.values():
            use_huge_pages(tensor)
        self._peers: dict[str, _Peer] = {}
        self._retired: dict[str, _Peer] = {}
        with translated(f"set-up of rank {name}", otherwise=RankError):
            self.agent: Any = _new_agent(f"{name}#{self.incarnation}", self._options)
            self._registered: Any = self.agent.register_memory(
                np.array(
                    [(self._base[arena], self._num_bytes[arena], 0) for arena in self._base],
                    dtype=np.uint64,
                ),
                "DRAM",
            )

    @property
    def peers(self) -> Mapping[str, str]:
        """Connected peers: name to incarnation."""
        return {name: peer.incarnation for name, peer in self._peers.items()}

    @property
    def draining(self) -> tuple[str, ...]:
        """Agents of disconnected peers that reads of ours have not ended with yet."""
        return tuple(self._retired)

    def pairing(self) -> bytes:
        """What a peer's ``connect`` needs."""
        with translated("pairing"):
            address = _Address(
                blocks_base=self._base["blocks"],
                slots_base=self._base["slots"],
                metadata=self.agent.get_agent_metadata(),
            )
        return encode(
            Pairing(
                name=self.name,
                incarnation=self.incarnation,
                transport="nixl",
                layout=self._layout,
                blocks_bytes=self._num_bytes["blocks"],
                slots_bytes=self._num_bytes["slots"],
                address=msgspec.msgpack.encode(address),
            )
        )

    def connect(self, pairing: bytes) -> str:
        """Make a peer reachable; see ``TransferBackend.connect``."""
        message = decode(pairing)
        if not isinstance(message, Pairing) or message.transport != "nixl":
            raise MessageError(f"a pairing for nixl was expected, not {message}")
        try:
            address = msgspec.msgpack.decode(message.address, type=_Address)
        except msgspec.MsgspecError as error:
            raise MessageError(f"pairing of {message.name} has a malformed address") from error
        self._layout.require_same(message.layout, message.name)
        known = self._peers.get(message.name)
        if known is not None and known.incarnation == message.incarnation:
            return message.name
        self.disconnect(message.name)
        agent_name = f"{message.name}#{message.incarnation}"
        if agent_name in self._retired:
            raise PeerLostError(
                f"{agent_name} still has reads that have not ended; try again later"
            )
        with translated(f"connect to {agent_name}"):
            found = self.agent.add_remote_agent(address.metadata)
            found = found.decode() if isinstance(found, bytes) else found
            if found != agent_name:
                self.agent.remove_remote_agent(found)
                raise MessageError(f"pairing of {agent_name} carries the address of {found}")
            self.agent.make_connection(agent_name)
        self._peers[message.name] = _Peer(
            name=message.name,
            incarnation=message.incarnation,
            agent_name=agent_name,
            base={"blocks": address.blocks_base, "slots": address.slots_base},
            num_bytes={"blocks": message.blocks_bytes, "slots": message.slots_bytes},
        )
        return message.name

    def start_read(self, peer: str, copies: Sequence[Copy]) -> NixlRead:
        """Post the copies as one transfer; see ``TransferBackend.start_read``.

        Where UCX copies through the kernel (CMA) the bytes are in place when this returns.
        """
        source = self._require(peer)
        deadline = time.monotonic() + self._options.read_timeout_s
        if not copies:
            return NixlRead(self, source, None, deadline)
        table = copy_table(copies)
        if not table_fits(table, source.num_bytes, self._num_bytes):
            require_copies_fit(peer, copies, source.num_bytes, self._num_bytes)
        local, remote = descriptors(table, source.base, self._base)
        with self._losing(source), translated(f"read from {peer}"):
            handle = self.agent.initialize_xfer(
                "READ",
                self.agent.get_xfer_descs(local, "DRAM"),
                self.agent.get_xfer_descs(remote, "DRAM"),
                source.agent_name,
            )
            try:
                self.agent.transfer(handle)
            except Exception:
                handle.release()
                raise
        read = NixlRead(self, source, handle, deadline)
        source.reads.add(read)
        return read

    def send(self, peer: str, message: bytes) -> None:
        """Send as a NIXL notification."""
        target = self._require(peer)
        with self._losing(target), translated(f"message to {peer}"):
            self.agent.send_notif(target.agent_name, message)

    def receive(self) -> list[tuple[str, bytes]]:
        """Notifications of connected incarnations. Also what drives UCX: call it every loop turn."""
        if self.agent is None:
            return []
        with translated("receive"):
            notes: Mapping[str, list[bytes]] = self.agent.get_new_notifs()
        for peer in list(self._retired.values()):
            for read in list(peer.reads):
                read.advance()
        names = {peer.agent_name: peer.name for peer in self._peers.values()}
        return [
            (names[agent_name], data)
            for agent_name, messages in notes.items()
            if agent_name in names
            for data in messages
        ]

    def disconnect(self, peer: str) -> None:
        """Retire a peer; its reads fail with PeerLostError."""
        gone = self._peers.pop(peer, None)
        if gone is None:
            return
        for read in gone.reads:
            read.fail(f"peer {gone.agent_name} was disconnected")
        self._retired[gone.agent_name] = gone
        self._drop_if_idle(gone)

    def close(self) -> None:
        """Drop all peers, wait ``close_timeout_s`` for reads to end, deregister the arenas, destroy the agent."""
        if self.agent is None:
            return
        for peer in list(self._peers):
            self.disconnect(peer)
        deadline = time.monotonic() + self._options.close_timeout_s
        while self._retired and time.monotonic() < deadline:
            self.receive()
            time.sleep(0.001)
        for peer in list(self._retired.values()):
            for read in list(peer.reads):
                read.end()  # what still writes is stopped by the end of the agent
        with translated(f"close of rank {self.name}", otherwise=RankError):
            self.agent.deregister_memory(self._registered)
            self._registered = None
            self.agent = None  # the last reference: NIXL stops here

    def read_ended(self, peer: _Peer, read: NixlRead, *, lost: bool) -> None:
        """Called by a read that no longer writes."""
        peer.reads.discard(read)
        if lost and self._peers.get(peer.name) is peer:
            self.disconnect(peer.name)
        self._drop_if_idle(peer)

    def _drop_if_idle(self, peer: _Peer) -> None:
        if not peer.reads and self._retired.pop(peer.agent_name, None) is not None:
            with translated(f"disconnect of {peer.name}"):
                self.agent.remove_remote_agent(peer.agent_name)

    def _require(self, peer: str) -> _Peer:
        if peer not in self._peers:
            raise PeerLostError(
                f"peer {peer} is not connected; connected are {sorted(self._peers)}"
            )
        return self._peers[peer]

    @contextmanager
    def _losing(self, peer: _Peer) -> Generator[None]:
        """A peer that NIXL calls lost is disconnected here, so that a fresh pairing can bring it back."""
        try:
            yield
        except PeerLostError:
            if self._peers.get(peer.name) is peer:
                self.disconnect(peer.name)
            raise


@contextmanager
def translated(doing: str, otherwise: type[HeadraceError] | None = None) -> Generator[None]:
    """The border: errors of NIXL become ours, as ``TRANSLATION`` says or all as ``otherwise``."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        known = TRANSLATION.get(type(error).__name__)
        if known is None and otherwise is None:
            raise
        raise (otherwise or known or RankError)(f"{doing}: NIXL says {error}") from error


def _new_agent(agent_name: str, options: NixlOptions) -> Any:
    options.apply()
    from nixl._api import nixl_agent, nixl_agent_config

    agent: Any = nixl_agent(
        agent_name,
        nixl_agent_config(enable_prog_thread=options.progress_thread, backends=["UCX"]),
    )
    if "UCX" not in agent.backends:
        raise RankError(
            "NIXL has no UCX plugin here; install nixl-cu12 or nixl-cu13 with its libraries"
        )
    return agent
