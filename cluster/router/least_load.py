"""The router's decider: least load, ties broken round robin. Pure: the same query and view give the same decision.

    prefill cost = queued_tokens + (prompt_tokens - best hit)          tokens to compute before this prompt is offered
    decode cost  = context_tokens + request_tokens x running_requests  what one step of this rank reads and computes

A rank that is not alive is no candidate. Ranks with room go before ranks without, then lower cost; equals take turns.
Room is what is not promised: on a prefill rank the blocks of prompts, on a decode rank see ``promise``.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ...transfer.errors import RankError
from ..strict import require
from .promise import promised_blocks
from .types import Candidate, ClusterView, Decision, PoolView, RankView, RouteQuery


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Weights of the costs, and how full decode ranks are packed."""

    seed: int = 0
    """Where the turns among equal ranks begin."""
    request_tokens: int = 256
    """What one running request adds to a decode rank's cost beside its context, in tokens of context."""
    decode_overcommit: float = 3.0
    """How many times its memory a decode rank may be promised, if every answer came to its `max_tokens`: an answer is
    counted with this fraction of them until it is longer. 1 reserves the longest answer and never pauses a request;
    raise it when answers mostly end early."""

    def __post_init__(self) -> None:
        require(self.seed >= 0, "seed", self.seed, "an integer of at least 0")
        require(
            self.request_tokens >= 0,
            "request_tokens",
            self.request_tokens,
            "an integer of at least 0",
        )
        require(
            1.0 <= self.decode_overcommit <= 1000.0,
            "decode_overcommit",
            self.decode_overcommit,
            "a number from 1 to 1000",
        )


def choose(query: RouteQuery, view: ClusterView, config: RouterConfig) -> Decision:
    """The prefill rank and the decode rank for one request. Raises RankError if a pool has no rank alive."""

    def prefill_cost(rank: RankView) -> float:
        return float(
            rank.queued_tokens + query.prompt_tokens - max(rank.hit_tokens.values(), default=0)
        )

    def decode_cost(rank: RankView) -> float:
        return float(rank.context_tokens + config.request_tokens * rank.running_requests)

    prompt_blocks = -(-query.prompt_tokens // view.prefill.block_tokens)
    decode_blocks = promised_blocks(
        query.prompt_tokens,
        0,
        query.max_tokens,
        view.decode.block_tokens,
        config.decode_overcommit,
    )
    prefill = _candidates("prefill", view.prefill, prompt_blocks, prefill_cost)
    decode = _candidates("decode", view.decode, decode_blocks, decode_cost)
    turn = config.seed + view.turn
    return Decision(
        prefill=_pick(prefill, query, turn),
        decode=_pick(decode, query, turn),
        prefill_candidates=prefill,
        decode_candidates=decode,
    )


def _candidates(
    kind: str, pool: PoolView, num_blocks: int, cost: Callable[[RankView], float]
) -> tuple[Candidate, ...]:
    alive = [rank for rank in pool.ranks if rank.alive]
    if not alive:
        raise RankError(f"no {kind} rank is alive; {len(pool.ranks)} were started")
    return tuple(
        Candidate(
            rank=rank.name,
            cost=cost(rank),
            has_room=rank.free_slots >= 1 and rank.free_blocks >= num_blocks,
        )
        for rank in alive
    )


def _pick(candidates: tuple[Candidate, ...], query: RouteQuery, turn: int) -> str:
    def order(candidate: Candidate) -> tuple[bool, bool, float]:
        return candidate.rank in query.avoid, not candidate.has_room, candidate.cost

    best = min(order(candidate) for candidate in candidates)
    equals = [candidate.rank for candidate in candidates if order(candidate) == best]
    return equals[turn % len(equals)]
