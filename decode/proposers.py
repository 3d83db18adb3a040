"""Who guesses the next tokens: the checkpoint's drafter, or n-grams of the text. A guess never changes a token."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..model.drafter import Choose, Drafts, DraftSpan
from ..transfer.errors import ConfigError, HeadraceError
from .grammar import GrammarState
from .lane import Lane
from .ngram import MatchCounts, NgramIndex
from .sampler import SampledRows, sample
from .speculation_config import SpeculationConfig


class Drafter(Protocol):
    """What a proposer needs of ``model.drafter.Drafter``."""

    block_size: int

    def draft(self, anchors: Sequence[DraftSpan], choose: Choose, num_drafts: int) -> Drafts: ...


class Proposer(Protocol):
    """Gives lanes up to ``num_drafts`` ``drafts``, their ``confidences`` and, if it knows them, the next ``masks``."""

    @property
    def num_drafts(self) -> int: ...
    @property
    def is_free(self) -> bool:
        """Whether proposing takes next to no time, so that it always pays."""
        ...

    def enter(self, lane: Lane) -> None:
        """A lane begins, perhaps with tokens."""
        ...

    def propose(self, lanes: Sequence[Lane]) -> None:
        """After tokens were accepted: the drafts that follow them."""
        ...


class NoProposer:
    """Never guesses."""

    num_drafts = 0
    is_free = True

    def enter(self, lane: Lane) -> None:
        """Nothing is kept."""

    def propose(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            lane.drafts, lane.confidences, lane.masks = (), (), None


class NgramProposer:
    """What followed the last time that the text ended like this."""

    is_free = True

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self._counts = MatchCounts()

    def enter(self, lane: Lane) -> None:
        lane.ngrams = NgramIndex(lane.request.prompt_ids, self._counts)
        lane.ngrams.push(lane.output_ids)

    def propose(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            assert lane.ngrams is not None
            known = lane.ngrams.num_tokens - len(lane.request.prompt_ids)
            lane.ngrams.push(lane.output_ids[known:])
            drafts = lane.ngrams.propose(self.num_drafts)
            lane.drafts, lane.confidences = drafts.ids, drafts.confidences
            lane.masks = None


class DrafterProposer:
    """The checkpoint's DSpark drafter. Drafts are sampled with the noise that their positions' tokens will be."""

    is_free = False

    def __init__(self, drafter: Drafter, num_drafts: int, eos_id: int) -> None:
        self._drafter = drafter
        self.num_drafts = num_drafts
        self._eos_id = eos_id

    def enter(self, lane: Lane) -> None:
        """The context lies in the lane's slot already."""

    def propose(self, lanes: Sequence[Lane]) -> None:
        if not lanes:
            return
        walks = [_Walk(lane) for lane in lanes]

        def choose(_: int, logits: Tensor) -> list[int]:
            # where nothing is allowed, behind a draft that ends the answer, any id will do
            ids = sample(logits, [walk.wanted() for walk in walks], self._eos_id)
            return [walk.take(token) for walk, token in zip(walks, ids.tolist(), strict=True)]

        spans = [
            DraftSpan(
                token_id=lane.output_ids[-1],
                position=lane.num_tokens - 1,
                slot=lane.slot,
                floor=lane.tail_start,
            )
            for lane in lanes
        ]
        made = self._drafter.draft(spans, choose, self.num_drafts)
        for walk, confidences in zip(walks, made.confidences.tolist(), strict=True):
            walk.finish(confidences)


class _Walk:
    """Drafts of one lane while they are being drawn, and the masks that its grammar has after each of them."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._drafts: list[int] = []
        self._masks: list[npt.NDArray[np.uint32]] = []
        self._step(lambda grammar: (grammar.reset(), grammar.mask())[1])

    def wanted(self) -> SampledRows:
        """The row behind the drafts so far."""
        return SampledRows(
            params=self._lane.request.sampling,
            prompt_ids=self._lane.request.prompt_ids,
            output_ids=self._lane.output_ids,
            drafts=self._drafts,
            mask=self._masks[-1][None] if self._masks else None,
            last_only=True,
        )

    def take(self, token: int) -> int:
        """One draft more."""
        token = max(token, 0)
        self._drafts.append(token)
        self._step(lambda grammar: grammar.extend(token))
        return token

    def finish(self, confidences: Sequence[float]) -> None:
        """Leave everything on the lane."""
        lane = self._lane
        lane.drafts, lane.confidences = tuple(self._drafts), tuple(confidences)
        lane.masks = None
        if lane.grammar is not None and lane.error is None:
            lane.grammar.reset()
            lane.masks = np.stack(self._masks)

    def _step(self, move: Callable[[GrammarState], npt.NDArray[np.uint32]]) -> None:
        lane = self._lane
        if lane.grammar is None or lane.error is not None:
            return
        try:
            self._masks.append(move(lane.grammar))
        except HeadraceError as error:
            lane.error = error


def make_proposer(drafter: Drafter | None, config: SpeculationConfig, eos_id: int) -> Proposer:
    """The configured proposer. Raises ConfigError for a drafter that the checkpoint lacks, or for too many drafts."""
    kind = config.proposer
    if kind == "auto":
        kind = "ngram" if drafter is None else "drafter"
    if kind == "off":
        return NoProposer()
    if kind == "ngram":
        return NgramProposer(config.num_drafts)
    if drafter is None:
        raise ConfigError(
            "speculation.proposer = 'drafter': the checkpoint has none; use auto, ngram or off"
        )
    if config.proposer == "drafter" and config.num_drafts > drafter.block_size:
        raise ConfigError(
            f"speculation.num_drafts = {config.num_drafts} is not allowed: the checkpoint's drafter gives at most "
            f"{drafter.block_size}"
        )
    return DrafterProposer(drafter, min(config.num_drafts, drafter.block_size), eos_id)
