"""An instance of real decode ranks whose experts move, on threads of the test's process; loopback transports."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.cluster.rank_loop import RankLoop
from headrace.decode.config import DecodeConfig
from headrace.decode.rank import DecodeRank
from headrace.model.expert_flip import ExpertNetwork
from headrace.model.expert_plan import ExpertPlan
from headrace.model.expert_reads import SLOT_BYTES, expert_layout
from headrace.model.experts_config import ExpertsConfig
from headrace.model.network import Network, load_network
from headrace.model.network_options import NetworkOptions
from headrace.model.parallel import ThreadExchange, ThreadHub
from headrace.model.rebalance import ExpertMover
from headrace.tests.model.moving import random_placement
from headrace.tests.pools import CHECKPOINT, Pool
from headrace.transfer.backend import Arenas
from headrace.transfer.loopback import LoopbackBackend, LoopbackHub

WAIT_S = 60.0
REDUNDANT = 4


@dataclass(frozen=True, kw_only=True)
class Breakage:
    """What replaces a part of rank 1."""

    network: Callable[[Network], ExpertNetwork] = lambda network: network
    backend: type[LoopbackBackend] = LoopbackBackend


@dataclass
class Instance:
    """``experts`` is the hub that experts move over; ``sums`` are asked for with the first plan."""

    pool: Pool = field(default_factory=lambda: Pool([], []))
    movers: list[ExpertMover] = field(default_factory=list[ExpertMover])
    networks: list[Network] = field(default_factory=list[Network])
    experts: LoopbackHub = field(default_factory=LoopbackHub)
    sums: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def ask(self, rank: int, question: Callable[[ExpertMover], Any]) -> Any:
        """Use the mover of a rank where its loop does."""
        return self.pool.loops[rank].call(partial(question, self.movers[rank]), WAIT_S, "asking")

    def states(self) -> list[dict[str, Any]]:
        return [self.ask(rank, ExpertMover.state) for rank in range(len(self.movers))]

    def plan(self, epoch: int) -> ExpertPlan:
        """A random placement with replicas and empty slots, and the sums that the ranks tell."""
        now = self.networks[0].placement
        placement = random_placement(
            random.Random(epoch),
            layers=now.layers,
            num_experts=now.num_experts,
            ranks=now.ranks,
            slots=now.slots_per_rank,
        )
        if not self.sums.size:
            self.sums = np.stack([state["checksums"] for state in self.states()]).max(axis=0)
        return ExpertPlan(epoch=epoch, placement=placement, checksums=self.sums)

    def offer(self, plan: ExpertPlan) -> None:
        data = plan.to_bytes()
        for rank in range(len(self.movers)):
            self.ask(rank, lambda mover: mover.offer(ExpertPlan.from_bytes(data)))

    def wait_for(self, condition: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, Any]]:
        """The states of all ranks, once ``condition`` holds for each of them."""
        deadline = time.monotonic() + WAIT_S
        states = self.states()
        while not all(map(condition, states)):
            assert time.monotonic() < deadline, [state["reason"] for state in states]
            time.sleep(0.002)
            states = self.states()
        return states


def start_instance(
    size: int, caches: LoopbackHub, *, overlap: bool, breakage: Breakage | None = None
) -> Instance:
    """Ranks with replicas of some experts. Those of the prefill pool on ``caches`` have to be connected."""
    hub, instance = ThreadHub(size, timeout_s=WAIT_S), Instance()
    names = [f"decode.{rank}.experts" for rank in range(size)]
    peerings: list[LoopbackBackend] = []
    begin: list[Callable[[], None]] = []
    for rank in range(size):
        changed = breakage if breakage is not None and rank == 1 else Breakage()
        name, exchange = f"decode.{rank}", ThreadExchange(hub, rank)
        options = NetworkOptions(
            num_blocks=40, num_slots=9, experts=ExpertsConfig(redundant=REDUNDANT)
        )
        network = load_network(CHECKPOINT, options=options, exchange=exchange)
        cache, store = network.cache, network.expert_store
        arenas = Arenas(layout=cache.layout, blocks=cache.blocks, slots=cache.slots)
        backend = LoopbackBackend(caches, name, arenas)
        layout = expert_layout(cache.layout.model_fingerprint, store.expert_bytes)
        slots = torch.zeros((1, SLOT_BYTES), dtype=torch.uint8)
        arenas = Arenas(layout=layout, blocks=store.arena, slots=slots)
        peering = changed.backend(instance.experts, names[rank], arenas)
        mover = ExpertMover(
            changed.network(network), peering, names, rank, bandwidth=1e12, deadline_s=WAIT_S / 2
        )
        worker = DecodeRank(
            name, network, backend, DecodeConfig(max_batch=8, overlap=overlap), rank=rank
        )
        loop = RankLoop(name)
        for close in (exchange.close, backend.close, peering.close, worker.close):
            loop.on_close(close)
        begin.append(partial(loop.begin, worker, exchange, mover))
        peerings.append(peering)
        instance.pool.loops.append(loop)
        instance.pool.backends.append(backend)
        instance.movers.append(mover)
        instance.networks.append(network)
    for one, other in permutations(peerings, 2):
        one.connect(other.pairing())
    for start in begin:
        start()
    return instance
