"""Who may enter a decode rank: pure decisions over plain values.

Memory grows with an answer, block by block. A newcomer needs the blocks of its handoff and of its first step, a slot
and a place in the batch, and it must leave headroom: one free block for everyone inside that may still grow, itself
included. So all of them go on for at least ``block_tokens`` tokens before memory can be short again.

    tokens   0 ............ N-1 | N ...... | ....... N+L-2 | N+L-1       N prompt tokens, at most L sampled
             |<-- handoff -->|row                           sampled, never fed: needs no KV
             |<- blocks at entry ------->|<- one by one -->|
             |<- blocks of the longest answer ------------>|             must fit an idle rank

First come, first served: nobody overtakes, and while somebody is paused nobody enters. The exception keeps the promise
that was made with the handoff: an *overdue* arrival, whose lease is half over, lands as soon as its blocks are free,
without headroom. It is the youngest then, so ``pressure`` pauses it at once if anybody is paused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..transfer.errors import PromptTooLongError


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What an arrival needs to enter: blocks now, and whether its answer may need more."""

    num_blocks: int
    can_grow: bool = False
    overdue: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """What a rank of ``num_blocks`` usable blocks has. ``num_growing`` requests inside it may need more blocks."""

    num_blocks: int
    free_blocks: int
    free_slots: int
    free_places: int
    num_growing: int = 0
    num_paused: int = 0


def output_limit(num_prompt: int, max_tokens: int, context: int) -> int:
    """Tokens a request may sample: ``max_tokens``, or less where the context ends; 0 if the prompt fills it."""
    return max(0, min(max_tokens, context - num_prompt))


def blocks_needed(num_prompt: int, num_output: int, block_tokens: int) -> int:
    """Blocks for a prompt and ``num_output`` sampled tokens, of which the last leaves no KV."""
    return -(-(num_prompt + num_output - 1) // block_tokens)


def check_fits(
    num_prompt: int, max_tokens: int, *, context: int, block_tokens: int, num_blocks: int
) -> None:
    """Raise PromptTooLongError for a request that an idle rank of ``num_blocks`` usable blocks could not take."""
    limit = output_limit(num_prompt, max_tokens, context)
    if limit == 0:
        raise PromptTooLongError(
            f"prompt of {num_prompt} tokens leaves no room for an answer in a context of {context} tokens: "
            f"shorten it to at most {context - 1}"
        )
    needed = blocks_needed(num_prompt, limit, block_tokens)
    if needed > num_blocks:
        raise PromptTooLongError(
            f"prompt of {num_prompt} tokens with an answer of up to {limit} needs {needed} blocks of "
            f"{block_tokens} tokens, but the decode cache has {num_blocks}: shorten the prompt, lower max_tokens, "
            f"or raise num_blocks of the decode pool"
        )


def count_admissible(demands: Sequence[Demand], supply: Supply) -> int:
    """How many heads of the queue enter now; ``demands`` are in arrival order."""
    free, growing = supply.free_blocks, supply.num_growing
    count = 0
    for demand in demands[: max(0, min(supply.free_slots, supply.free_places))]:
        if supply.num_paused and not demand.overdue:
            break
        alone = free == supply.num_blocks
        headroom = 0 if alone or demand.overdue else growing + demand.can_grow
        if demand.num_blocks + headroom > free:
            break
        free -= demand.num_blocks
        growing += demand.can_grow
        count += 1
    return count
