"""Which prompt rows run in the next prefill step: a pure decision over plain values.

Several prompts share a step, within a budget of rows and one of attention pairs (a row and a token it may look at):

    chunk_tokens = 8     |<- share of the senior ->|<- fewest rows left first ->|
                         [ A A                     | C | D D | A A A            ]

The *senior* is the prompt of the highest priority that came first. A quarter of every step is its own, so a long prompt
never waits for more than four times its rows. The rest goes to the highest priority, and there to whoever has the
fewest rows left, so a short prompt never waits for a long one to end.

Blocks are reserved chunk by chunk. A block is given only if afterwards all admitted prompts can still end, one after
the other, each with what those before it gave back (the banker's rule): prompts never wait for each other in a circle.
What still waits for memory waits for handoffs, whose leases end.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

SENIOR_SHARE = 4
"""One part in so many of a step's rows is the senior's."""
_MOST_WAITING = 64
"""Prompts without a slot that one step considers beside the senior: those that would come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as the scheduler sees it: rows to run, rows done, blocks held, and whether it has a slot.

    ``num_shared`` of its blocks belong to others too, and come back to nobody when it ends. One without a slot is about
    to hold blocks of the cache, of which ``num_unowned`` are counted as free until it does.
    """

    request_id: str
    num_rows: int
    num_done: int = 0
    num_blocks: int = 0
    num_shared: int = 0
    num_unowned: int = 0
    admitted: bool = False
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows ``start .. start + count - 1`` of one prompt, at least one; it needs ``num_blocks`` more blocks for them."""

    request_id: str
    start: int
    count: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Who gets a slot, then what runs. A prompt without rows is admitted and has no chunk."""

    admitted: tuple[str, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """What a rank has: ``num_blocks`` in all but for shared ones, ``free_blocks`` now; others come back by then."""

    num_blocks: int
    free_blocks: int
    free_slots: int


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold the global KV of ``num_tokens`` tokens."""
    return -(-num_tokens // block_tokens)


def pairs_of(start: int, count: int) -> int:
    """Attention pairs of rows ``start .. start + count - 1``: each looks at itself and all before it."""
    return count * (2 * start + count + 1) // 2


def rows_within(start: int, pairs: int) -> int:
    """Most rows from ``start`` on whose pairs are at most ``pairs``."""
    low, high = 0, 1
    while pairs_of(start, high) <= pairs:
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pairs_of(start, middle) <= pairs else (low, middle)
    return low


def plan_step(
    prompts: Iterable[Prompt],
    supply: Supply,
    *,
    chunk_tokens: int,
    chunk_pairs: int,
    block_tokens: int,
) -> StepPlan:
    """Fill one step from ``prompts``, which are in order of arrival. One row always runs, whatever its pairs."""
    queue = list(prompts)
    if not queue:
        return StepPlan(admitted=(), chunks=())
    senior = min(queue, key=lambda prompt: -prompt.priority)  # the first of them
    admitted = [prompt for prompt in queue if prompt.admitted]
    waiting = heapq.nsmallest(
        _MOST_WAITING, (prompt for prompt in queue if not prompt.admitted), key=_urgency
    )
    step = _Step(supply, admitted, chunk_tokens, chunk_pairs, block_tokens)
    step.run(senior, -(-chunk_tokens // SENIOR_SHARE))
    for prompt in sorted([*admitted, *waiting], key=_urgency):
        step.run(prompt, chunk_tokens)
    step.run(senior, chunk_tokens)
    return step.plan()


def _urgency(prompt: Prompt) -> tuple[int, int]:
    return -prompt.priority, prompt.num_rows - prompt.num_done


@dataclass(slots=True)
class _Share:
    """What a prompt gets in the step."""

    prompt: Prompt
    held: int
    count: int = 0


@dataclass(slots=True)
class _Step:
    """A step that is being filled."""

    supply: Supply
    admitted: list[Prompt]
    rows: int
    pairs: int
    block_tokens: int
    shares: dict[str, _Share] = field(init=False)
    newcomers: list[str] = field(default_factory=list[str])
    free_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.free_blocks = self.supply.free_blocks
        self.shares = {p.request_id: _Share(p, p.num_blocks) for p in self.admitted}

    def run(self, prompt: Prompt, most: int) -> None:
        """Give ``prompt`` up to ``most`` rows, as far as budgets and memory reach."""
        share = self.shares.get(prompt.request_id)
        if share is None:
            full = len(self.newcomers) == self.supply.free_slots
            if full or prompt.num_unowned > self.free_blocks:
                return
            share = _Share(prompt, prompt.num_blocks)
        start = prompt.num_done + share.count
        count = min(most, self.rows, prompt.num_rows - start)
        if self.pairs < pairs_of(start, count):
            is_first = not any(other.count for other in self.shares.values())
            count = max(rows_within(start, self.pairs), int(is_first and count > 0))
        is_new = prompt.request_id not in self.shares
        if is_new:
            self.free_blocks -= prompt.num_unowned
        count = self._with_blocks(share, start, count)
        if count == 0 and start < prompt.num_rows:
            if is_new:
                self.free_blocks += prompt.num_unowned
            return
        if is_new:
            self.newcomers.append(prompt.request_id)
            self.shares[prompt.request_id] = share
        share.count += count
        self.rows -= count
        self.pairs -= pairs_of(start, count)

    def plan(self) -> StepPlan:
        """What was given."""
        chunks = tuple(
            Chunk(
                request_id=name,
                start=share.prompt.num_done,
                count=share.count,
                num_blocks=share.held - share.prompt.num_blocks,
            )
            for name, share in self.shares.items()
            if share.count
        )
        return StepPlan(admitted=tuple(self.newcomers), chunks=chunks)

    def _with_blocks(self, share: _Share, start: int, count: int) -> int:
        """Rows of ``count`` for which there are blocks; these are given."""
        wanted = max(0, blocks_for(start + count, self.block_tokens) - share.held)
        given = min(wanted, self.free_blocks)
        while given and not self._is_safe(share, given):
            given -= 1
        count = min(count, (share.held + given) * self.block_tokens - start)
        if count <= 0:
            return 0
        share.held += given
        self.free_blocks -= given
        return count

    def _is_safe(self, share: _Share, given: int) -> bool:
        """Whether all can still end, one after the other, if ``share`` gets ``given`` blocks."""
        held = {id(other): other.held for other in self.shares.values()}
        held[id(share)] = share.held + given
        sharers = {id(other): other for other in (*self.shares.values(), share)}
        backs = {key: held[key] - other.prompt.num_shared for key, other in sharers.items()}
        left = self.supply.num_blocks - sum(backs.values())
        needs = sorted(
            (blocks_for(other.prompt.num_rows, self.block_tokens) - held[key], backs[key])
            for key, other in sharers.items()
        )
        for need, back in needs:
            if need > left:
                return False
            left += back
        return True
