"""Which prompt rows run in the next prefill step: a pure decision over plain values.

Prompts run first in, first out, several per step, cut wherever the token budget ends:

    chunk_tokens = 8     |<------ step 1 ------>|<------ step 2 ------>|
    prompts (rows)       [A A A A A][B B B      |B B B B][C][D D D     |D ...

All blocks of a prompt and its slot are reserved when its first row is planned. An admitted prompt therefore never
waits for memory, so the oldest one always gets on and no step can deadlock; what waits, waits for memory that an
offered handoff gives back at the latest when its lease ends.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as the scheduler sees it: rows to run, rows done, and whether blocks and slot are reserved."""

    request_id: str
    num_rows: int
    num_done: int = 0
    admitted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows ``start .. start + count - 1`` of one prompt; count is at least 1."""

    request_id: str
    start: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What to reserve (ids in queue order), then what to run. A prompt without rows is admitted and has no chunk."""

    admitted: tuple[str, ...]
    chunks: tuple[Chunk, ...]


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold the global KV of ``num_tokens`` tokens."""
    return -(-num_tokens // block_tokens)


def plan_step(
    prompts: Iterable[Prompt],
    *,
    chunk_tokens: int,
    block_tokens: int,
    free_blocks: int,
    free_slots: int,
) -> StepPlan:
    """Fill one step from ``prompts`` (queue order). The head of those not admitted is never overtaken."""
    admitted: list[str] = []
    chunks: list[Chunk] = []
    budget = chunk_tokens
    for prompt in prompts:
        if budget == 0:
            break
        if not prompt.admitted:
            num_blocks = blocks_for(prompt.num_rows, block_tokens)
            if num_blocks > free_blocks or free_slots == 0:
                break
            free_blocks -= num_blocks
            free_slots -= 1
            admitted.append(prompt.request_id)
        count = min(budget, prompt.num_rows - prompt.num_done)
        if count:
            chunks.append(Chunk(request_id=prompt.request_id, start=prompt.num_done, count=count))
            budget -= count
    return StepPlan(admitted=tuple(admitted), chunks=tuple(chunks))
