"""Moving experts between the ranks of an instance while it serves.

    offer(plan 8)     EPLB actor publishes to every rank
    poll              our reads go on: peers' rows --> staging rows, checked, capped          every turn of the loop
    told              which plan, layers staged, epoch given up, in the gather of the turn
    heed(all told)    flips: layers that every rank has staged                                launched with the pass
    flip              staged rows --> slots, and the layer's tables                           between two passes

One staging area as large as a layer: rows are used again once the flip of their layer has run. What goes wrong on any
rank (a peer lost, bytes wrong, time over) is told as given up, and the whole instance drops the rest of the plan in
that turn; layers that have changed stay changed. An offer that does not reach every rank changes nothing, and neither
do different offers of one epoch. A flip that fails ends its rank, and so the instance.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..transfer.backend import TransferBackend
from ..transfer.errors import PlacementError, StalePlanError, TransferError
from .expert_flip import ExpertNetwork, Flip
from .expert_plan import UNKNOWN, ExpertPlan, LayerMoves, moves_of
from .expert_reads import ExpertReads, Fetch
from .flip_agreement import NOT_READY, NOTHING, Told, agree
from .placement import EMPTY

REST_S = 0.01
"""How often the transport is looked after while nothing moves."""


@dataclass(slots=True, kw_only=True)
class _Work:
    """A plan under way: ``changes`` in order, how many of them are begun, staged and flipped (launched)."""

    plan: ExpertPlan
    digest: int
    changes: tuple[LayerMoves, ...]
    deadline: float
    agreed: bool = False
    """All ranks have the plan and are ready: slots of others may be read."""
    num_begun: int = 0
    num_flipped: int = 0
    missing: deque[int] = field(default_factory=deque[int])
    """Fetches to come of every begun change that is not flipped."""
    staged: dict[int, dict[int, int]] = field(default_factory=dict[int, dict[int, int]])
    """Change -> target slot -> staging row."""

    @property
    def num_staged(self) -> int:
        done = self.num_flipped
        for count in self.missing:
            if count:
                break
            done += 1
        return done


class ExpertMover:
    """Takes this rank through plans. ``peers`` are the names of the instance's ranks in ``backend``, in rank order.

    ``bandwidth`` is in bytes a second, what this rank reads; ``deadline_s`` is how long a plan may take from its offer,
    by ``timer``. All methods are called from the loop's thread; flips run where passes run.
    """

    def __init__(
        self,
        network: ExpertNetwork,
        backend: TransferBackend,
        peers: Sequence[str],
        rank: int,
        *,
        bandwidth: float,
        deadline_s: float,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._network = network
        self._store = network.expert_store
        self._rank = rank
        self._deadline_s = deadline_s
        self._timer = timer
        self._reads = ExpertReads(self._store, backend, peers, bandwidth, timer)
        self._placement = network.placement
        """Agreed on: what is in force once every launched flip has run."""
        self._since = np.zeros(self._placement.layers, np.int64)
        """First pass of every layer under what is in force."""
        self._sums = self._own_checksums()
        self._work: _Work | None = None
        self._flips: deque[Flip] = deque()
        """Launched, oldest first, until they are known to have run."""
        self._free = list(range(self._store.slots_per_rank))
        self._epoch = 0
        self._gives_up = 0
        self._reason = ""
        self._next_look = timer()
        self._num_flips = self._num_abandoned = 0
        self._stall_s = 0.0

    def offer(self, plan: ExpertPlan) -> None:
        """Accept a plan. One under way is given up for it, once every rank has accepted.

        Raises StalePlanError for an epoch that is not newer than every one we know of, PlacementError for a plan that
        was made for another instance or for other weights. Nothing is changed then.
        """
        if plan.epoch <= self._epoch:
            raise StalePlanError(
                f"plan of epoch {plan.epoch}: this rank knows of epoch {self._epoch}; make a new plan from the"
                " placement in force, with a larger epoch"
            )
        ours, new = self._placement, plan.placement
        if (ours.num_experts, ours.slots.shape) != (new.num_experts, new.slots.shape):
            raise PlacementError(
                f"plan of epoch {plan.epoch} is for {new.num_experts} experts in slots {list(new.slots.shape)}: this"
                f" instance has {ours.num_experts} in {list(ours.slots.shape)} [layers, ranks, slots]"
            )
        changes = moves_of(ours.slots, new.slots, self._rank)
        self._check_sums(plan, changes)
        self._drop(f"epoch {plan.epoch} was offered")
        self._epoch = plan.epoch
        deadline = self._timer() + self._deadline_s
        self._work = _Work(plan=plan, digest=plan.digest(), changes=changes, deadline=deadline)

    @property
    def is_moving(self) -> bool:
        """A plan is under way, or flips are not known to have run."""
        return self._work is not None or bool(self._flips)

    @property
    def told(self) -> Sequence[float]:
        """Our NUM_TOLD numbers for the gather of this turn; all 0 while there is no plan."""
        work = self._work
        if work is None:
            return NOTHING
        ready = work.agreed or (not self._flips and self._reads.is_quiet)
        staged = work.num_staged if ready else NOT_READY
        return Told(work.plan.epoch, work.digest, staged, self._gives_up).numbers()

    def poll(self) -> None:
        """Take in what arrived and begin what there is room for; what goes wrong with it gives the plan up."""
        now = self._timer()
        if not self.is_moving and now < self._next_look:
            return
        self._next_look = now + REST_S
        while self._flips and self._flips[0].is_done:
            self._settle(self._flips.popleft())
        try:
            for fetch in self._reads.advance():
                self._staged(fetch)
        except TransferError as error:
            self._give_up(str(error))
        work = self._work
        if work is None:
            return
        if now > work.deadline:
            staged = f"{work.num_staged} of {len(work.changes)} layers"
            self._give_up(f"not over after {self._deadline_s:g} s, {staged} are staged here")
        elif work.agreed and not self._gives_up:
            self._begin(work)

    def heed(self, told: Sequence[Sequence[float]]) -> Sequence[Flip]:
        """What to run, in order, directly before the pass of the turn in which the ranks told ``told``.

        Equally many on every rank. Once they are returned they must run; one that raises must end this rank.
        """
        if not any(map(any, told)):
            return ()
        agreed = agree(told)
        if agreed.gives_up:
            self._heed_giving_up(agreed.gives_up)
        work = self._work
        if work is None or agreed.epoch != work.plan.epoch:
            return ()
        work.agreed = True
        flips = [self._flip(work) for _ in range(work.num_flipped, agreed.layers)]
        if work.num_flipped == len(work.changes):
            self._work = None
        return flips

    def stats(self) -> dict[str, Any]:
        """Counters for the operator."""
        return {
            "experts_epoch": self._epoch,
            "experts_flips": self._num_flips,
            "experts_moved_bytes": self._reads.moved_bytes,
            "experts_abandoned": self._num_abandoned,
            "experts_stall_s": self._stall_s,
        }

    def state(self) -> dict[str, Any]:
        """What the EPLB actor asks for. ``checksums`` [layers, E] of every expert that we ever held, -1 for others."""
        work = self._work
        return {
            "epoch": self._epoch,
            "moving": self.is_moving,
            "placement": self._placement.to_bytes(),
            "since": self._since.tolist(),
            "staged_layers": 0 if work is None else work.num_staged,
            "moved_bytes": self._reads.moved_bytes,
            "flips": self._num_flips,
            "abandoned": self._num_abandoned,
            "stall_s": self._stall_s,
            "reason": self._reason,
            "checksums": self._sums.copy(),
            "expert_bytes": self._store.expert_bytes,
        }

    def _own_checksums(self) -> NDArray[np.int64]:
        sums = np.full((self._placement.layers, self._placement.num_experts), UNKNOWN, np.int64)
        for layer, slots in enumerate(self._placement.slots[:, self._rank]):
            for slot, expert in enumerate(slots.tolist()):
                if expert != EMPTY:
                    sums[layer, expert] = self._store.checksum(self._store.row_of(layer, slot))
        return sums

    def _check_sums(self, plan: ExpertPlan, changes: Sequence[LayerMoves]) -> None:
        for change in changes:
            for move in change.moves:
                if plan.checksums[change.layer, move.expert] == UNKNOWN:
                    raise PlacementError(
                        f"plan of epoch {plan.epoch}: layer {change.layer}, expert {move.expert} is to move and has"
                        " no checksum: ask the rank that holds it"
                    )
        both = (plan.checksums != UNKNOWN) & (self._sums != UNKNOWN)
        wrong = np.argwhere(both & (plan.checksums != self._sums))
        if len(wrong):
            layer, expert = wrong[0].tolist()
            raise PlacementError(
                f"plan of epoch {plan.epoch}: layer {layer}, expert {expert} has checksum"
                f" {plan.checksums[layer, expert]:#x} there and {self._sums[layer, expert]:#x} here: every rank of an"
                " instance must load the same checkpoint"
            )

    def _begin(self, work: _Work) -> None:
        """Fetch for the next changes, as far as there are staging rows."""
        while work.num_begun < len(work.changes):
            change = work.changes[work.num_begun]
            if len(change.moves) > len(self._free):
                return
            work.staged[work.num_begun] = {}
            work.missing.append(len(change.moves))
            work.num_begun += 1
            for move in change.moves:
                checksum = int(work.plan.checksums[change.layer, move.expert])
                row = self._free.pop()
                self._reads.add(Fetch(change.layer, move, row, checksum))

    def _staged(self, fetch: Fetch) -> None:
        work = self._work
        assert work is not None, "fetches are dropped with their plan"
        number = next(n for n, change in enumerate(work.changes) if change.layer == fetch.layer)
        work.staged[number][fetch.move.slot] = fetch.staging
        work.missing[number - work.num_flipped] -= 1
        self._sums[fetch.layer, fetch.move.expert] = fetch.checksum

    def _flip(self, work: _Work) -> Flip:
        change = work.changes[work.num_flipped]
        flip = Flip(self._network, change, work.staged.pop(work.num_flipped))
        work.missing.popleft()
        work.num_flipped += 1
        self._placement = self._placement.with_layer(change.layer, change.slots)
        self._flips.append(flip)
        return flip

    def _settle(self, flip: Flip) -> None:
        self._free += flip.staged.values()
        self._since[flip.change.layer] = flip.step
        self._num_flips += 1
        self._stall_s += flip.seconds

    def _give_up(self, reason: str) -> None:
        if self._work is not None and self._gives_up != self._work.plan.epoch:
            self._gives_up = self._work.plan.epoch
            self._reason = f"epoch {self._gives_up}: {reason}"
            self._reads.drop()

    def _heed_giving_up(self, epoch: int) -> None:
        """Drop every plan up to ``epoch``, and refuse such from now on."""
        self._epoch = max(self._epoch, epoch)
        self._gives_up = 0  # ``epoch`` is the largest that any rank gives up
        if self._work is not None and self._work.plan.epoch <= epoch:
            self._num_abandoned += 1
            self._drop(f"a rank of the instance gave up epoch {epoch}")

    def _drop(self, reason: str) -> None:
        """Forget the plan under way; what is staged and not flipped is void."""
        work, self._work = self._work, None
        if work is None:
            return
        if not self._reason.startswith(f"epoch {work.plan.epoch}: "):
            self._reason = f"epoch {work.plan.epoch}: {reason}"
        self._reads.drop()
        in_flips = {row for flip in self._flips for row in flip.staged.values()}
        self._free = [row for row in range(self._store.slots_per_rank) if row not in in_flips]
