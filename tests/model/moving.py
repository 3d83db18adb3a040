"""Ranks that move experts, without networks: real movers, stores and loopback transports, streams run by hand."""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.kernels.moe import ExpertShape
from headrace.model.expert_flip import Flip
from headrace.model.expert_plan import UNKNOWN, ExpertPlan
from headrace.model.expert_reads import SLOT_BYTES, expert_layout
from headrace.model.expert_store import ExpertStore
from headrace.model.flip_agreement import NUM_TOLD
from headrace.model.placement import EMPTY, ExpertPlacement
from headrace.model.rebalance import ExpertMover
from headrace.transfer.backend import Arenas
from headrace.transfer.checksum import row_checksum
from headrace.transfer.loopback import LoopbackBackend, LoopbackHub, LoopbackRead
from headrace.transfer.plan import Copy

SHAPE = ExpertShape(8, 8)


@cache
def weights_of(layer: int, expert: int, num_bytes: int) -> torch.Tensor:
    """Different bytes for every expert of every layer."""
    generator = torch.Generator().manual_seed(1000 * layer + expert)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


class StoreNetwork:
    """The part of a network that experts lie in; ``run_pass`` looks at every byte and remembers the placement."""

    def __init__(self, placement: ExpertPlacement, rank: int) -> None:
        self.placement = placement
        self.rank = rank
        self.step = 0
        self.seen: list[bytes] = []
        self.expert_store = ExpertStore(
            layers=placement.layers, slots_per_rank=placement.slots_per_rank, shape=SHAPE
        )
        for layer, slot, expert in self._held():
            row = self.expert_store.row_of(layer, slot)
            self.expert_store.arena[row] = weights_of(layer, expert, self.expert_store.expert_bytes)

    def set_layer_placement(
        self, layer: int, slots: NDArray[np.int32], staged: Mapping[int, int]
    ) -> None:
        before = self.placement.slots[layer, self.rank]
        self.expert_store.flip(layer, before, slots[self.rank], staged)
        self.placement = self.placement.with_layer(layer, slots)

    def run_pass(self) -> None:
        store = self.expert_store
        for layer, slot, expert in self._held():
            found = store.arena[store.row_of(layer, slot)]
            assert torch.equal(found, weights_of(layer, expert, store.expert_bytes))
        self.seen.append(self.placement.slots.tobytes())
        self.step += 1

    def _held(self) -> list[tuple[int, int, int]]:
        own = self.placement.slots[:, self.rank]
        return [
            (layer, slot, int(own[layer, slot]))
            for layer, slot in np.argwhere(own != EMPTY).tolist()
        ]


def random_placement(
    rng: random.Random, *, layers: int, num_experts: int, ranks: int, slots: int
) -> ExpertPlacement:
    """Every expert somewhere, replicas and empty slots anywhere."""
    table = np.full((layers, ranks, slots), EMPTY, np.int32)
    for layer in range(layers):
        places = [(rank, slot) for rank in range(ranks) for slot in range(slots)]
        rng.shuffle(places)
        for expert, place in zip(range(num_experts), places, strict=False):
            table[layer][place] = expert
        for place in places[num_experts:]:
            expert = rng.randrange(EMPTY, num_experts)
            if expert not in table[layer, place[0]]:
                table[layer][place] = expert
    return ExpertPlacement(num_experts=num_experts, slots=table)


def checksums_of(placement: ExpertPlacement, expert_bytes: int) -> NDArray[np.int64]:
    """The sums of all experts, [layers, E]."""
    shape = placement.layers, placement.num_experts
    sums = np.full(shape, UNKNOWN, np.int64)
    for layer, expert in np.ndindex(shape):
        rows = weights_of(layer, expert, expert_bytes)[None]
        sums[layer, expert] = row_checksum(rows, 0)
    return sums


class LateRead(LoopbackRead):
    """Copies when somebody asks whether it is quiet, once its backend is not ``late`` any more."""

    late_backend: "LateBackend"

    def poll(self) -> bool:
        return not self.late_backend.late and super().poll()

    def quiet(self) -> bool:
        return self.poll()


class LateBackend(LoopbackBackend):
    """While ``late``, reads begin that write at some later time, whether they are wanted or not."""

    late = False

    def start_read(self, peer: str, copies: Sequence[Copy]) -> LoopbackRead:
        read = super().start_read(peer, copies)
        if self.late:
            read = LateRead(self, peer, copies)
            read.late_backend = self
        return read


@dataclass
class MovingRank:
    """A rank and the stream that its flips and passes wait on."""

    network: StoreNetwork
    mover: ExpertMover
    backend: LateBackend
    stream: deque[Flip | None] = field(default_factory=deque[Flip | None])
    flipped: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(turn, layer) of everything that was launched."""

    def run(self, count: int) -> None:
        """Run that much of what was launched; None is a pass."""
        for _ in range(min(count, len(self.stream))):
            work = self.stream.popleft()
            if work is None:
                self.network.run_pass()
            else:
                work()


class Instance:
    """Ranks in step. ``now`` is their clock."""

    def __init__(
        self,
        start: ExpertPlacement,
        *,
        bandwidth: float = 1e12,
        deadline_s: float = 1e6,
    ) -> None:
        self.now = 0.0
        self.turn_number = 0
        self.hub = LoopbackHub()
        self.ranks: list[MovingRank] = []
        names = [f"decode-0.{rank}" for rank in range(start.ranks)]
        for rank, name in enumerate(names):
            network = StoreNetwork(start, rank)
            store = network.expert_store
            slots = torch.zeros((1, SLOT_BYTES), dtype=torch.uint8)
            layout = expert_layout("test", store.expert_bytes)
            arenas = Arenas(layout=layout, blocks=store.arena, slots=slots)
            backend = LateBackend(self.hub, name, arenas)
            mover = ExpertMover(
                network,
                backend,
                names,
                rank,
                bandwidth=bandwidth,
                deadline_s=deadline_s,
                timer=lambda: self.now,
            )
            self.ranks.append(MovingRank(network, mover, backend))
        for one, other in permutations(self.ranks, 2):
            one.backend.connect(other.backend.pairing())
        self.expert_bytes = self.ranks[0].network.expert_store.expert_bytes
        self.sums = checksums_of(start, self.expert_bytes)

    def plan(self, epoch: int, placement: ExpertPlacement) -> ExpertPlan:
        return ExpertPlan(epoch=epoch, placement=placement, checksums=self.sums)

    def offer(self, plan: ExpertPlan, to: Sequence[int] | None = None) -> None:
        for rank in range(len(self.ranks)) if to is None else to:
            self.ranks[rank].mover.offer(ExpertPlan.from_bytes(plan.to_bytes()))

    def turn(self, wants_pass: bool = True) -> None:
        """One turn of all ranks, as their loops take it. Flips bring a pass of their own."""
        self.turn_number += 1
        for rank in self.ranks:
            rank.mover.poll()
        told = [list(rank.mover.told) for rank in self.ranks]
        assert {len(numbers) for numbers in told} == {NUM_TOLD}
        for rank in self.ranks:
            flips = rank.mover.heed(told)
            rank.flipped += [(self.turn_number, flip.change.layer) for flip in flips]
            if flips or wants_pass:
                rank.stream += [*flips, None]

    def drain(self) -> None:
        """Run everything that was launched, and let the movers see it."""
        for rank in self.ranks:
            rank.run(len(rank.stream))
            rank.mover.poll()

    def settle(self, max_turns: int = 10_000) -> None:
        """Idle turns until no rank moves anything."""
        for _ in range(max_turns):
            if not any(rank.mover.is_moving for rank in self.ranks):
                return
            self.turn(wants_pass=False)
            self.drain()
        raise AssertionError("still moving")

    def check(self) -> ExpertPlacement:
        """All ranks agree on where experts lie, saw the same in every pass, and hold the right bytes."""
        self.drain()
        first = self.ranks[0]
        for rank in self.ranks:
            rank.network.run_pass()
        for rank in self.ranks:
            assert rank.network.seen == first.network.seen
            assert rank.flipped == first.flipped
            told = ExpertPlacement.from_bytes(rank.mover.state()["placement"])
            assert (told.slots == first.network.placement.slots).all()
            assert (rank.network.placement.slots == told.slots).all()
        return first.network.placement
