"""Rebalances one instance: what its ranks told goes in, plans come out. Pure: no Ray, no clock, no waiting.

collected(counts of every rank)   passes that all ranks have told, summed, into the book
heard(state of every rank)        what is in force, what came of the last plan
due(now) --> Question             rows and placement to plan for, when it is time
decided(proposal, now) --> plan   to be offered to every rank; or None, and the book says why
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...model.expert_plan import ExpertPlan
from ...model.placement import ExpertPlacement
from .book import InstanceBook
from .config import EplbConfig
from .policy import Proposal, Rebalancer

Piece = tuple[NDArray[np.int64], NDArray[np.int32]]
"""Passes int64 [n], ascending, and rows int32 [n, layers, experts] that were routed in them."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What to plan for: ``rows`` [steps, layers, experts] under ``present`` [layers, ranks, S]."""

    brain: Rebalancer
    rows: NDArray[np.int32]
    present: NDArray[np.int32]

    def answer(self) -> Proposal:
        """Takes up to ``plan_s``."""
        return self.brain.consider(self.rows, self.present)


@dataclass(frozen=True, slots=True, eq=False)
class _Offer:
    """A plan that ranks were told of; ``stall_s`` is what earlier ones had cost.

    One that was ``refused`` may still come into force: an answer that was late was no refusal.
    """

    epoch: int
    slots: NDArray[np.int32]
    stall_s: float
    refused: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class _Ranks:
    """What the ranks of the instance said last, put together. ``slots`` is that of all of them where they agree."""

    epoch: int
    agree: bool
    moving: bool
    placement: ExpertPlacement
    since: NDArray[np.int64]
    checksums: NDArray[np.int64]
    expert_bytes: int
    reasons: list[str]
    totals: dict[str, float]

    @classmethod
    def of(cls, states: Sequence[Mapping[str, Any]]) -> "_Ranks":
        first = states[0]
        expert_bytes = int(first["expert_bytes"])
        moved = sum(int(state["moved_bytes"]) for state in states)
        return cls(
            epoch=max(int(state["epoch"]) for state in states),
            agree=all(state["placement"] == first["placement"] for state in states),
            moving=any(state["moving"] for state in states),
            placement=ExpertPlacement.from_bytes(first["placement"]),
            since=np.max([state["since"] for state in states], axis=0),
            checksums=np.maximum.reduce([state["checksums"] for state in states]),
            expert_bytes=expert_bytes,
            reasons=[str(state["reason"]) for state in states],
            totals={
                "moved_bytes": moved,
                "moved_experts": moved // expert_bytes,
                "flips": max(int(state["flips"]) for state in states),
                "abandoned": max(int(state["abandoned"]) for state in states),
                "stall_s": max(float(state["stall_s"]) for state in states),
            },
        )


class InstanceController:
    """One instance. Every ``now`` is in seconds of one steady clock that began at 0."""

    def __init__(
        self, index: int, config: EplbConfig, seed: NDArray[np.int32] | None = None
    ) -> None:
        """``seed``: rows [steps, layers, experts] of an earlier deployment, with which the first plan is made."""
        self._index = index
        self._config = config
        self._seed = seed
        self._ranks: _Ranks | None = None
        self._book: InstanceBook | None = None
        self._agreed: _Ranks | None = None
        """What all ranks said last time that they said the same."""
        self._before: _Ranks | None = None
        """What they said before the placement in force; it held until ``since``, layer by layer."""
        self._epochs = (0, 0)
        """Of what was in force before, and of what is."""
        self._offer: _Offer | None = None
        self._next_decision = 0.0
        self.lost_steps = 0
        """Passes that left the ranks' rings before they were collected."""

    @property
    def next_step(self) -> int:
        """The first pass that was not collected."""
        return 0 if self._book is None else self._book.next_step

    @property
    def rows(self) -> NDArray[np.int32]:
        """Rows [passes, layers, experts] of the last ``keep_steps`` passes that had any, those of the seed first."""
        seen = np.zeros((0, 1, 1), np.int32) if self._book is None else self._book.recent()
        if self._seed is None:
            return seen
        rows = np.concatenate((self._seed, seen)) if len(seen) else self._seed
        return rows[-self._config.keep_steps :]

    def heard(self, states: Sequence[Mapping[str, Any]], now: float) -> None:
        """The states of all ranks, in rank order: ``ExpertMover.state`` of each."""
        ranks = _Ranks.of(states)
        if self._book is None:
            self._book = InstanceBook(
                self._index,
                num_experts=ranks.placement.num_experts,
                expert_bytes=ranks.expert_bytes,
                window=self._config.keep_steps,
            )
            self._before = self._agreed = ranks
            self._epochs = (ranks.epoch, ranks.epoch)
        self._ranks = ranks
        if ranks.agree:
            known, self._agreed = self._agreed, ranks
            changed = known is not None and _changed(known, ranks).any()
            if changed and self._epochs[1] != ranks.epoch:
                self._before, self._epochs = known, (self._epochs[1], ranks.epoch)
        self._settle(ranks, now)

    def collected(self, pieces: Sequence[Piece]) -> None:
        """Counts of all ranks from ``next_step`` on, in rank order; after ``heard``.

        Passes that some ranks lack wait, and so do all while ranks disagree on what is in force.
        """
        ranks, book = self._ranks, self._book
        assert ranks is not None and book is not None, "the states come first"
        if not ranks.agree:
            return
        steps, rows = summed(pieces)
        first = book.next_step
        steps, rows = steps[steps >= first], rows[steps >= first]
        if len(steps):
            self.lost_steps += int(steps[-1]) + 1 - len(steps) - (first or int(steps[0]))
            self._write(book, steps, rows)

    def due(self, now: float) -> Question | None:
        """What to plan for, if it is time: not while anything moves or ranks disagree."""
        ranks, config = self._ranks, self._config
        if ranks is None or ranks.moving or not ranks.agree or now < self._next_decision:
            return None
        rows = self.rows
        if self._under_way() or len(rows) < config.min_steps:
            return None
        present = ranks.placement
        brain = Rebalancer(
            config,
            ranks=present.ranks,
            slots_per_rank=present.slots_per_rank,
            expert_bytes=ranks.expert_bytes,
        )
        return Question(brain, rows, present.slots)

    def decided(self, proposal: Proposal, now: float) -> bytes | None:
        """Note the answer to a question. The plan to offer to every rank, if it pays."""
        ranks, book = self._ranks, self._book
        assert ranks is not None and book is not None
        self._next_decision = now + self._config.interval_s
        epoch = ranks.epoch + 1 if proposal.pays else ranks.epoch
        book.decided(proposal, epoch=epoch, time_s=now)
        if not proposal.pays:
            return None
        placement = ExpertPlacement(num_experts=ranks.placement.num_experts, slots=proposal.slots)
        plan = ExpertPlan(epoch=epoch, placement=placement, checksums=ranks.checksums)
        self._offer = _Offer(epoch, placement.slots, ranks.totals["stall_s"])
        return plan.to_bytes()

    def refused(self, reason: str, now: float) -> None:
        """Some rank did not say that it took the plan. Unless all did, those that have it drop it at its deadline."""
        offer, book = self._offer, self._book
        if offer is not None and book is not None:
            book.dropped(offer.epoch, reason, time_s=now, outcome="refused")
            self._offer = replace(offer, refused=True)

    def report(self) -> dict[str, Any] | None:
        """One instance of the report; None before the ranks were heard."""
        if self._ranks is None or self._book is None:
            return None
        ranks = self._ranks
        found = self._book.report(ranks.placement.slots, self._epochs[1], ranks.totals)
        return {**found, "lost_steps": self.lost_steps, "agree": ranks.agree}

    def _under_way(self) -> bool:
        return self._offer is not None and not self._offer.refused

    def _settle(self, ranks: _Ranks, now: float) -> None:
        """What became of the plan that was offered, once nobody works on it any more."""
        offer, book = self._offer, self._book
        if offer is None or book is None or ranks.moving or ranks.epoch < offer.epoch:
            return
        if ranks.agree and (ranks.placement.slots == offer.slots).all():
            stall_s = ranks.totals["stall_s"] - offer.stall_s
            book.in_force(offer.epoch, step=int(ranks.since.max()), time_s=now, stall_s=stall_s)
        elif not offer.refused:
            begin = f"epoch {offer.epoch}: "
            said = [
                reason.removeprefix(begin) for reason in ranks.reasons if reason.startswith(begin)
            ]
            book.dropped(offer.epoch, said[0] if said else "given up", time_s=now)
        self._offer = None

    def _write(self, book: InstanceBook, steps: NDArray[np.int64], rows: NDArray[np.int32]) -> None:
        """Into the book, each pass under what was in force in it: layers change one after the other."""
        ranks, before = self._ranks, self._before
        assert ranks is not None and before is not None
        launched = ranks.moving & _changed(before, ranks) & (ranks.since == before.since)
        flipped = (steps[:, None] >= ranks.since[None]) & ~launched  # those have yet to run
        borders = np.flatnonzero((flipped[1:] != flipped[:-1]).any(1)) + 1
        for part in np.split(np.arange(len(steps)), borders):
            now = flipped[part[0]]
            slots = np.where(now[:, None, None], ranks.placement.slots, before.placement.slots)
            book.add(steps[part], rows[part], slots, self._epochs[int(now.all())])


def _changed(before: _Ranks, now: _Ranks) -> NDArray[np.bool_]:
    """Which layers have another placement, [layers]."""
    return (before.placement.slots != now.placement.slots).any((1, 2))


def summed(pieces: Sequence[Piece]) -> Piece:
    """The passes that all ranks told, and their rows over all ranks."""
    steps = pieces[0][0]
    for others, _ in pieces[1:]:
        steps = np.intersect1d(steps, others, assume_unique=True)
    rows = [rows[np.isin(told, steps)] for told, rows in pieces]
    return steps, np.stack(rows).sum(axis=0, dtype=np.int32)
