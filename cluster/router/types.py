"""What the router is asked, what it sees, and what it answers: plain values, so that a decision can be replayed."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteQuery:
    """One request to be placed.

    ``block_hashes`` are the chained hashes of its full blocks, empty where nothing looks for hits. A rank in
    ``avoid`` is chosen only if no other can serve (a retry should not land where the last try failed).
    """

    request_id: str
    prompt_tokens: int
    max_tokens: int
    block_hashes: tuple[bytes, ...] = ()
    priority: int = 0
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """What is known of one rank when a decision is taken.

    ``queued_tokens``: prompt tokens submitted and not yet offered (prefill). ``running_requests``: requests that hold
    a place (both kinds). ``context_tokens``: tokens x context, the sum of the context lengths a decode step reads.
    ``free_blocks``, ``free_slots``: room not promised to anyone; below 0 where answers grew beyond a decode rank's
    memory, so that some are paused. ``hit_tokens``: leading prompt tokens of this query
    per tier that the rank need not compute. A rank that is not ``alive`` is never chosen.
    """

    name: str
    instance: str
    alive: bool = True
    queued_tokens: int = 0
    running_requests: int = 0
    context_tokens: int = 0
    free_blocks: int = 0
    free_slots: int = 0
    hit_tokens: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """All ranks of one kind. ``block_tokens`` converts tokens to blocks."""

    ranks: tuple[RankView, ...]
    block_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """Both pools, and how many decisions came before: the counter that breaks ties."""

    prefill: PoolView
    decode: PoolView
    turn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What choosing a rank would cost, in tokens of work; lower is better.

    ``has_room`` is False where its promise of blocks or a slot is not free: such a rank loses against any rank with
    room, whatever the cost.
    """

    rank: str
    cost: float
    has_room: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The two chosen ranks, and every candidate with its cost, as an explanation."""

    prefill: str
    decode: str
    prefill_candidates: tuple[Candidate, ...]
    decode_candidates: tuple[Candidate, ...]
