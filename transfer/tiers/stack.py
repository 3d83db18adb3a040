"""All tiers of one rank below its device: memory, then disk, then objects.

    find:   block:      0  1  2  3  4  5
            memory      x  x  .  .  .  .
            disk        x  x  x  x  .  .        -> 2 from memory, 2 from disk; at 4 the chain ends
            objects     x  .  .  .  .  x
    load:   a hit of a lower tier is kept in memory too
    store:  one copy of the payload, then behind our back into every tier that has no such record

Whoever loads has taken rows for the blocks first, publishes the ``num_leading`` that came, and reuses no row of a load
that is not ``quiet``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor

from ..layout import CacheLayout
from .rates import Rates
from .record import HEADER_BYTES, NO_PARENT, Kind, Record, layout_digest, parent_of, record_name
from .tier import Load, Tier, TierStats


@dataclass(frozen=True, slots=True)
class Span:
    """``num_blocks`` blocks next to each other in a prompt that are all in one tier."""

    tier: str
    num_blocks: int


class StackLoad:
    """Blocks on their way from several tiers; see ``tier.Load`` for the two questions."""

    def __init__(self, parts: Sequence[tuple[str, Load]], rates: Rates, row_bytes: int) -> None:
        self._parts = parts
        self._rates = rates
        self._row_bytes = row_bytes
        self._over = False

    def poll(self) -> bool:
        """Whether the load is over, at the latest at its deadline."""
        if not self._over and all([part.poll() for _, part in self._parts]):  # noqa: C419 - each must be asked
            self._over = True
            for tier, part in self._parts:
                hits = sum(miss is None for miss in part.results)
                self._rates.note_load(tier, hits * self._row_bytes, part.seconds)
        return self._over

    def quiet(self) -> bool:
        """Whether nobody can write into the rows any more."""
        return all(part.quiet() for _, part in self._parts)

    def abandon(self) -> None:
        """Nobody waits any more. The rows are free once ``quiet`` says so."""
        for _, part in self._parts:
            part.abandon()
        self._over = True

    @property
    def num_leading(self) -> int:
        """How many rows from the first on hold their blocks; 0 until ``poll`` says True."""
        total = 0
        for _, part in self._parts if self._over else ():
            total += part.num_leading
            if part.num_leading < len(part.results):
                break
        return total


class TierStack:
    """The tiers of one rank, top first. Call it from one thread, the rank's loop: nothing here waits."""

    def __init__(
        self, tiers: Sequence[Tier], layout: CacheLayout, rates: Rates | None = None
    ) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._layout = layout
        self._digest = layout_digest(layout)
        self.rates = rates or Rates()
        for lower in tiers[1:]:
            lower.on_loaded = self._promote

    def find(self, keys: Sequence[bytes]) -> list[Span]:
        """Where the leading blocks of a prompt lie, in token order; stops at the first that no tier has.

        A tier that is not worth reading for all that it would have to give is left out.
        """
        names = [record_name(Kind.BLOCK, key) for key in keys]
        left_out: set[str] = set()
        while True:
            spans = self._spans(names, left_out)
            slow = {
                tier
                for tier, num_blocks in _totals(spans).items()
                if not self._worth(tier, num_blocks)
            }
            if not slow:
                return spans
            left_out |= slow

    def load(
        self, spans: Sequence[Span], keys: Sequence[bytes], rows: Sequence[Tensor]
    ) -> StackLoad:
        """Start to bring the blocks that ``find`` found into rows, uint8 [block_bytes] on the CPU, one a key."""
        parts: list[tuple[str, Load]] = []
        first = 0
        for span in spans:
            end = first + span.num_blocks
            names = [record_name(Kind.BLOCK, key) for key in keys[first:end]]
            views = [_bytes_of(row) for row in rows[first:end]]
            parts.append((span.tier, self._tiers[span.tier].load(names, views)))
            first = end
        return StackLoad(parts, self.rates, HEADER_BYTES + self._layout.block_bytes)

    def find_windows(self, key: bytes) -> str | None:
        """The tier that has the windows of the turn that ended with block ``key``."""
        name = record_name(Kind.WINDOWS, key)
        return next((n for n, tier in self._tiers.items() if tier.has(name)), None)

    def load_windows(self, tier: str, key: bytes, row: Tensor) -> Load:
        """Start to bring them into ``row``, as long as what was stored."""
        return self._tiers[tier].load([record_name(Kind.WINDOWS, key)], [_bytes_of(row)])

    def store(
        self,
        key: bytes,
        row: Tensor,
        *,
        parent: bytes = NO_PARENT,
        kind: Kind = Kind.BLOCK,
        cost: float = 1.0,
    ) -> int:
        """Keep a full block, or windows, in every tier that lacks it; ``row`` may change as soon as this returns.

        Returns how many tiers will try. Of several blocks of a prompt store the last first: what was stored first is
        evicted first, and a prefix without its head is of no use.
        """
        name = record_name(kind, key)
        lacking = [tier for tier in self._tiers.values() if not tier.has(name)]
        if not lacking:
            return 0
        record = Record(
            kind=kind,
            key=key,
            parent=parent,
            layout_digest=self._digest,
            payload=bytes(_bytes_of(row)),
            cost=cost,
        )
        return sum(tier.store(record) for tier in lacking)

    def stats(self) -> Mapping[str, TierStats]:
        """Tier -> what it holds and did."""
        return {name: tier.stats() for name, tier in self._tiers.items()}

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was stored is written; False when that took too long."""
        return all([tier.flush(timeout_s) for tier in self._tiers.values()])  # noqa: C419 - each must be asked

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, within ``timeout_s`` a tier, and close the tiers. Idempotent."""
        for tier in self._tiers.values():
            tier.close(timeout_s)

    def _spans(self, names: Sequence[bytes], left_out: set[str]) -> list[Span]:
        tiers = [tier for tier in self._tiers.values() if tier.name not in left_out]
        holders: list[str] = []
        for name in names:
            holder = next((tier.name for tier in tiers if tier.has(name)), None)
            if holder is None:
                break
            holders.append(holder)
        return [Span(tier, len(list(same))) for tier, same in groupby(holders)]

    def _worth(self, tier: str, num_blocks: int) -> bool:
        num_bytes = num_blocks * (HEADER_BYTES + self._layout.block_bytes)
        return self.rates.worth_reading(num_blocks * self._layout.block_tokens, num_bytes, tier)

    def _promote(self, name: bytes, header: bytes, payload: memoryview) -> None:
        """Called by the load threads of lower tiers."""
        top = next(iter(self._tiers.values()))
        if top.has(name):
            return
        top.store(
            Record(
                kind=Kind(name[0]),
                key=name[1:],
                parent=parent_of(header),
                layout_digest=self._digest,
                payload=bytes(payload),
            )
        )


def _totals(spans: Sequence[Span]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for span in spans:
        totals[span.tier] = totals.get(span.tier, 0) + span.num_blocks
    return totals


def _bytes_of(row: Tensor) -> memoryview:
    array: Any = row.numpy()
    return memoryview(array)
