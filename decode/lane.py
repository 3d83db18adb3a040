"""A request as the device sees it: always up to date, while the planner knows it one step late.

output_ids (accepted)     drafts (may be right)
[ t0 t1 t2 ... anchor ] + [ d1 d2 d3 d4 d5 ]
                 |-------------------|          rows of the next pass: the anchor and the drafts to verify
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..model.batch import Logits, Span
from ..transfer.errors import HeadraceError
from ..transfer.request import Request, TopLogprobs
from .grammar import GrammarState
from .ngram import NgramIndex

HISTORY_TOKENS = 3  # ids before a row that n-gram layers look at

Masks = npt.NDArray[np.uint32]


@dataclass(slots=True, kw_only=True, eq=False)
class Lane:
    """Belongs to the stream while a step with it is in flight, and to the rank otherwise.

    ``masks`` are the grammar's, one row for the anchor and one for each draft, or are being made.
    """

    request: Request
    slot: int
    tail_start: int
    tail: int = 0
    output_ids: list[int] = field(default_factory=list[int])
    drafts: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    grammar: GrammarState | None = None
    masks: Masks | Future[Masks] | None = None
    ngrams: NgramIndex | None = None
    error: HeadraceError | None = None
    """Why it cannot go on; reported with its next outcome."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.request.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A lane's part in a step: at most ``max_drafts`` drafts are verified in ``blocks``."""

    lane: Lane
    blocks: tuple[int, ...]
    max_drafts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Rows ``start`` .. ``start + count`` - 1 of a request whose cache is not whole.

    It was dropped; or, where the network is cut between the pools, the decoder layers have ``late`` rows to run.
    """

    lane: Lane
    blocks: tuple[int, ...]
    start: int
    count: int
    late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step runs: drafts that survive with at least ``min_survival``; with ``draft``, new ones follow."""

    turns: tuple[Turn, ...] = ()
    replays: tuple[Replay, ...] = ()
    min_survival: float = 0.0
    draft: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step gave one lane: new ids, and how many drafts were verified for them.

    ``num_right`` drafts turned out right, one more than were verified being judged, where ``promised`` were expected.
    With an ``error`` the lane is dead and there are no ids.
    """

    lane: Lane
    ids: tuple[int, ...] = ()
    num_verified: int = 0
    promised: float = 0.0
    num_right: int = 0
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    error: HeadraceError | None = None


def ids_before(lane: Lane, position: int) -> tuple[int, ...]:
    """Up to three ids before ``position``, oldest first."""
    return ids_between(lane, max(0, position - HISTORY_TOKENS), position)


def ids_between(lane: Lane, start: int, end: int) -> tuple[int, ...]:
    """Ids of prompt and answer at positions ``start`` .. ``end`` - 1."""
    prompt, output = lane.request.prompt_ids, lane.output_ids
    length = len(prompt)
    if start >= length:
        return tuple(output[start - length : end - length])
    return (*prompt[start:end], *output[: max(0, end - length)])


def turn_span(turn: Turn, num_drafts: int) -> Span:
    """The last id so far and ``num_drafts`` drafts, all with logits."""
    lane = turn.lane
    position = lane.num_tokens - 1
    return Span(
        token_ids=ids_between(lane, position, position + 1) + lane.drafts[:num_drafts],
        start=position,
        history=ids_before(lane, position),
        slot=lane.slot,
        blocks=turn.blocks,
        tail_start=lane.tail_start,
        logits=Logits.ALL,
    )


def replay_span(replay: Replay) -> Span:
    """Rows that run for their caches alone."""
    lane = replay.lane
    return Span(
        token_ids=ids_between(lane, replay.start, replay.start + replay.count),
        start=replay.start,
        history=ids_before(lane, replay.start),
        slot=lane.slot,
        blocks=replay.blocks,
        tail_start=lane.tail_start,
        tail=lane.tail,
        late=replay.late,
        logits=Logits.NONE,
    )


def accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many of ``drafts`` equal what was sampled in their place: the leading ones that do."""
    for place, draft in enumerate(drafts):
        if draft != sampled[place]:
            return place
    return len(drafts)
