"""One rank's process, as its instance sees it: start-up in stages, then requests in and events out. Knows no Ray.

    check --> join --> load --> pair --> begin --> submit_many, cancel, collect ... --> shutdown

Everything that touches the network or the transport happens on the loop's thread. What a stage consists of is the
builder's business; ``build.NetworkBuilder`` makes real ranks.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..transfer.errors import RankError
from .config import ClusterConfig
from .rank_loop import Agreement, Event, RankLoop, SteppedRank

if TYPE_CHECKING:  # needs torch, as only a rank's process does
    from .rank_experts import RankExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankId:
    """Which rank this is: ``rank`` of ``size`` in instance ``index`` of pool ``kind``."""

    kind: str
    index: int
    rank: int
    size: int

    @property
    def instance(self) -> str:
        """Name of the instance: ``decode-0``."""
        return f"{self.kind}-{self.index}"

    @property
    def name(self) -> str:
        """Name of the rank, unique in the cluster: ``decode-0.1``."""
        return f"{self.instance}.{self.rank}"


class Peering(Protocol):
    """What pairing needs of a transport backend."""

    def pairing(self) -> bytes:
        """What a peer needs to reach us."""
        ...

    def connect(self, pairing: bytes) -> object:
        """Make a peer reachable."""
        ...

    def close(self) -> None:
        """Drop all peers."""
        ...


class Joined(Agreement, Protocol):
    """What start-up needs of an expert exchange."""

    def close(self) -> None:
        """Leave the instance."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRank:
    """A rank ready to take turns. ``context_tokens`` is the longest prompt plus answer that its model allows.

    ``experts`` is None for ranks without a model.
    """

    rank: SteppedRank
    peering: Peering
    context_tokens: int
    experts: "RankExperts | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a rank tells when it has loaded: ``pairing`` is for its peers of the other pool.

    ``expert_pairing`` is for the ranks of its own instance; empty for a rank that does not move experts.
    """

    pairing: bytes
    expert_pairing: bytes
    context_tokens: int


class RankBuilder(Protocol):
    """Makes the parts of a rank; it travels to the rank's process by value, so it holds little."""

    def check(self, who: RankId, config: ClusterConfig) -> None:
        """Look at the checkpoint without loading it. Raises CheckpointError."""
        ...

    def join(self, who: RankId, config: ClusterConfig, address: str) -> Joined:
        """Meet the other ranks of the instance at ``address`` (host:port on rank 0's node)."""
        ...

    def load(self, who: RankId, config: ClusterConfig, exchange: Joined) -> BuiltRank:
        """The rank and its transport."""
        ...


class RankHost:
    """Holds a rank's loop and takes it through its stages."""

    def __init__(
        self, who: RankId, config: ClusterConfig, builder: RankBuilder | None = None
    ) -> None:
        self._who = who
        self._config = config
        self._builder = builder or _network_builder()
        self._loop = RankLoop(who.name)
        self._exchange: Joined | None = None
        self._built: BuiltRank | None = None

    def check(self) -> None:
        """Stage: the checkpoint looks servable. Raises CheckpointError."""
        limit = self._config.timeouts.load_s
        self._loop.call(
            lambda: self._builder.check(self._who, self._config), limit, "checkpoint check"
        )

    def take_port(self, port: int) -> int:
        """A free TCP port of this host: ``port`` itself, or any if it is 0. Raises RankError if ``port`` is in use."""
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError as error:
                key = f"{self._who.kind}.rendezvous_port"
                raise RankError(
                    f"port {port} of host {socket.gethostname()} cannot be used ({error.strerror}): "
                    f"give {key} another value, or 0 for any free port"
                ) from error
            return int(probe.getsockname()[1])

    def join(self, address: str) -> None:
        """Stage: meet the other ranks of the instance."""

        def run() -> None:
            self._exchange = self._builder.join(self._who, self._config, address)
            self._loop.on_close(self._exchange.close)

        self._loop.call(run, self._config.timeouts.join_s, "joining the instance")

    def load(self) -> Loaded:
        """Stage: load the weights and expose the caches to peers."""

        def run() -> Loaded:
            if self._exchange is None:
                raise RankError(f"{self._who.name} must join its instance before it loads")
            built = self._builder.load(self._who, self._config, self._exchange)
            self._built = built
            self._loop.on_close(built.peering.close)
            experts = None if built.experts is None else built.experts.peering
            if experts is not None:
                self._loop.on_close(experts.close)
            self._loop.on_close(built.rank.close)
            return Loaded(
                pairing=built.peering.pairing(),
                expert_pairing=b"" if experts is None else experts.pairing(),
                context_tokens=built.context_tokens,
            )

        return self._loop.call(run, self._config.timeouts.load_s, "loading")

    def pair(self, pairings: Sequence[bytes], expert_pairings: Sequence[bytes] = ()) -> None:
        """Stage: make every peer reachable; also used when a peer comes back as another incarnation.

        ``expert_pairings`` are those of the other ranks of our instance.
        """

        def run() -> None:
            for pairing in pairings:
                self._loaded().peering.connect(pairing)
            if expert_pairings:
                experts = self._experts().peering
                assert experts is not None, "all ranks of an instance move experts, or none does"
                for pairing in expert_pairings:
                    experts.connect(pairing)

        self._loop.call(run, self._config.timeouts.pair_s, "pairing")

    def begin(self) -> None:
        """Stage: take turns. Every rank of the instance must be told."""
        if self._exchange is None:
            raise RankError(f"{self._who.name} must join its instance before it begins")
        built = self._loaded()
        mover = None if built.experts is None else built.experts.mover
        self._loop.begin(built.rank, self._exchange, mover)

    def submit_many(self, items: Sequence[tuple[Any, ...]]) -> None:
        """Requests in order: (request) for prefill, (request, handoff) for decode. A refusal becomes an event."""
        self._loop.submit_many(items)

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Forget requests, whatever their state."""
        self._loop.cancel(request_ids)

    def collect(self, timeout_s: float) -> list[Event]:
        """All events since the last call, as soon as there is one. Raises RankError if the rank is dead."""
        return self._loop.collect(timeout_s)

    def stats(self) -> dict[str, Any]:
        """The rank's counters and gauges."""
        counters = self._loop.stats(self._config.timeouts.step_s)
        experts = self._loaded().experts
        return counters if experts is None else {**counters, **experts.stats()}

    def expert_series(self, since: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Passes [n] from ``since`` on, and the rows [n, layers, experts] that we routed; never waits for a turn."""
        return self._experts().series(since)

    def expert_state(self) -> dict[str, Any]:
        """Where our experts lie and what is moving; see ``RankExperts.state``."""
        limit = self._config.timeouts.step_s
        return self._loop.call(lambda: self._experts().state(), limit, "expert_state")

    def offer_experts(self, plan: bytes) -> None:
        """Accept an ExpertPlan. Raises StalePlanError, PlacementError or MessageError; nothing is changed then."""
        from ..model.expert_plan import ExpertPlan  # here, because only a rank's process needs it

        limit, decoded = self._config.timeouts.step_s, ExpertPlan.from_bytes(plan)
        self._loop.call(lambda: self._experts().offer(decoded), limit, "offer_experts")

    def check_integrity(self) -> None:
        """Raises IntegrityError if the rank's books do not balance."""
        self._loop.check_integrity(self._config.timeouts.step_s)

    def shutdown(self) -> bool:
        """Close everything. False if the present turn does not end in time; the process then has to be killed."""
        return self._loop.stop(self._config.timeouts.shutdown_s / 2)

    def _experts(self) -> "RankExperts":
        experts = self._loaded().experts
        if experts is None:
            raise RankError(f"{self._who.name} has no model, and so no experts")
        return experts

    def _loaded(self) -> BuiltRank:
        if self._built is None:
            raise RankError(f"{self._who.name} has not loaded its checkpoint yet")
        return self._built


def _network_builder() -> RankBuilder:
    from .build import NetworkBuilder  # here, because only a rank's process needs torch and nixl

    return NetworkBuilder()
