"""What the router knows of the ranks: its own promises. One entry per request on its way.

    open()          offered()              arrived()                       close()
      |----- prefill ----|-- handoff waits ----|----------- decode ----------|
      |<- queued_tokens->|
      |<------- blocks, slot of prefill ------>|
      |<------------------- blocks, slot, context of decode --------------->|

The decode rank's room is promised when the request is routed, and the promise grows with the answer (see ``promise``).
So requests wait here, and not as handoffs whose leases run out.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from .promise import promised_blocks
from .types import ClusterView, Decision, PoolView, RankView, RouteQuery


@dataclass(slots=True, kw_only=True)
class RankBook:
    """One rank: what it has, and what is promised of it."""

    name: str
    instance: str
    num_blocks: int
    num_slots: int
    alive: bool = True
    queued_tokens: int = 0
    running_requests: int = 0
    context_tokens: int = 0
    used_blocks: int = 0
    used_slots: int = 0

    def view(self) -> RankView:
        """The rank as a decision sees it."""
        return RankView(
            name=self.name,
            instance=self.instance,
            alive=self.alive,
            queued_tokens=self.queued_tokens,
            running_requests=self.running_requests,
            context_tokens=self.context_tokens,
            free_blocks=self.num_blocks - self.used_blocks,
            free_slots=self.num_slots - self.used_slots,
        )

    def take(self, num_blocks: int) -> None:
        """Promise blocks and a slot to one more request."""
        self.used_blocks += num_blocks
        self.used_slots += 1
        self.running_requests += 1

    def give(self, num_blocks: int) -> None:
        """Take a promise back."""
        self.used_blocks -= num_blocks
        self.used_slots -= 1
        self.running_requests -= 1


@dataclass(slots=True, kw_only=True)
class Entry:
    """What one request was promised, and how far it is."""

    prefill: RankBook
    decode: RankBook
    prefill_blocks: int
    decode_blocks: int
    queued_tokens: int
    prompt_tokens: int
    max_tokens: int
    output_tokens: int = 0
    prefill_open: bool = True


class Book:
    """All ranks and all entries; used from one thread."""

    def __init__(
        self,
        prefill: Iterable[RankBook],
        decode: Iterable[RankBook],
        block_tokens: int,
        overcommit: float,
    ) -> None:
        self._prefill = {rank.name: rank for rank in prefill}
        self._decode = {rank.name: rank for rank in decode}
        self._block_tokens = block_tokens
        self._overcommit = overcommit
        self._turn = 0

    def view(self) -> ClusterView:
        """What a decision is based on."""
        prefill, decode = (
            PoolView(
                ranks=tuple(rank.view() for rank in pool.values()), block_tokens=self._block_tokens
            )
            for pool in (self._prefill, self._decode)
        )
        return ClusterView(prefill=prefill, decode=decode, turn=self._turn)

    def is_idle(self, decode_rank: str) -> bool:
        """Whether nothing is promised of a decode rank: waiting for it would be waiting for nothing."""
        return self._decode[decode_rank].running_requests == 0

    def open(self, query: RouteQuery, decision: Decision) -> Entry:
        """A request goes where it was decided."""
        self._turn += 1
        entry = Entry(
            prefill=self._prefill[decision.prefill],
            decode=self._decode[decision.decode],
            prefill_blocks=-(-query.prompt_tokens // self._block_tokens),
            decode_blocks=0,
            queued_tokens=query.prompt_tokens,
            prompt_tokens=query.prompt_tokens,
            max_tokens=query.max_tokens,
        )
        entry.decode_blocks = self._promise(entry)
        entry.prefill.take(entry.prefill_blocks)
        entry.prefill.queued_tokens += entry.queued_tokens
        entry.decode.take(entry.decode_blocks)
        entry.decode.context_tokens += entry.prompt_tokens
        return entry

    def offered(self, entry: Entry) -> None:
        """Its prompt is computed. Idempotent."""
        entry.prefill.queued_tokens -= entry.queued_tokens
        entry.queued_tokens = 0

    def grew(self, entry: Entry, num_tokens: int) -> None:
        """It has more tokens; the first ones tell that the handoff was read."""
        self._end_prefill(entry)
        entry.output_tokens += num_tokens
        entry.decode.context_tokens += num_tokens
        promised, entry.decode_blocks = entry.decode_blocks, self._promise(entry)
        entry.decode.used_blocks += entry.decode_blocks - promised

    def close(self, entry: Entry) -> None:
        """It is over, one way or another."""
        self._end_prefill(entry)
        entry.decode.give(entry.decode_blocks)
        entry.decode.context_tokens -= entry.prompt_tokens + entry.output_tokens

    def lose_instance(self, instance: str) -> None:
        """Ranks of an instance live and die together."""
        for rank in [*self._prefill.values(), *self._decode.values()]:
            if rank.instance == instance:
                rank.alive = False

    def _end_prefill(self, entry: Entry) -> None:
        self.offered(entry)
        if entry.prefill_open:
            entry.prefill_open = False
            entry.prefill.give(entry.prefill_blocks)

    def _promise(self, entry: Entry) -> int:
        return promised_blocks(
            entry.prompt_tokens,
            entry.output_tokens,
            entry.max_tokens,
            self._block_tokens,
            self._overcommit,
        )
