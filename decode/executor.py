"""What a decode step does on the device: rows through the network, tokens from their logits, drafts for the next step.

Runs on the rank's stream. Lanes carry everything from one step to the next, so a step can be launched before the one
before it is known: rows, positions and drafts are read from the lanes when the step's turn has come.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from ..model.batch import Span
from ..model.cache import Cache
from ..model.config import ModelConfig
from ..model.expert_flip import Flip
from ..transfer.errors import HeadraceError, RankError
from ..transfer.request import TopLogprobs
from .lane import Lane, Masks, Outcome, StepPlan, accepted, replay_span, turn_span
from .proposers import Drafter, Proposer
from .sampler import SampledRows, logprobs, sample
from .survival import distribute


class Network(Protocol):
    """What a rank needs of the model."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def cache(self) -> Cache: ...
    @property
    def drafter(self) -> Drafter | None: ...
    def forward(self, spans: Sequence[Span]) -> Tensor: ...


@dataclass(slots=True, kw_only=True)
class Pass:
    """Logits [rows, V] of a plan's turns, and how many drafts each turn verifies."""

    plan: StepPlan
    num_drafts: tuple[int, ...]
    logits: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Outcomes of a pass, confidences of the drafts that follow, and the seconds that drafting took of the sampling."""

    outcomes: tuple[Outcome, ...]
    confidences: tuple[tuple[float, ...], ...]
    draft_s: float


class Executor:
    """Runs plans on a network. Used from the stream alone."""

    def __init__(
        self, name: str, network: Network, proposer: Proposer, timer: Callable[[], float]
    ) -> None:
        self._name = name
        self._network = network
        self._proposer = proposer
        self._timer = timer
        self._eos_id = network.config.eos_token_id
        self._mask_maker = ThreadPoolExecutor(1, thread_name_prefix=f"masks of {name}")

    def enter(self, lane: Lane) -> None:
        """A lane begins."""
        self._proposer.enter(lane)

    def forward(self, plan: StepPlan, flips: Sequence[Flip] = ()) -> Pass:
        """Exactly one forward pass, of zero spans when the plan is empty, after ``flips``."""
        for flip in flips:
            flip()
        counts = self._verified(plan)
        spans = [turn_span(turn, count) for turn, count in zip(plan.turns, counts, strict=True)]
        spans += [replay_span(replay) for replay in plan.replays]
        return Pass(plan=plan, num_drafts=counts, logits=self._network.forward(spans))

    def sample(self, done: Pass, dropped: frozenset[Lane]) -> Sampled:
        """Tokens of every turn but those of ``dropped`` lanes, which are over, and their next drafts."""
        plan = done.plan
        ends = np.cumsum([1 + count for count in done.num_drafts]).tolist()
        for turn, count in zip(plan.turns, done.num_drafts, strict=True):
            if turn.lane not in dropped:
                _await_masks(turn.lane, count)
        kept = [
            row
            for row, turn in enumerate(plan.turns)
            if turn.lane not in dropped and turn.lane.error is None
        ]
        logits = done.logits
        if len(kept) < len(plan.turns):
            parts = [logits[ends[r] - 1 - done.num_drafts[r] : ends[r]] for r in kept]
            logits = torch.cat(parts) if parts else logits[:0]
        lanes = [plan.turns[row].lane for row in kept]
        counts = [done.num_drafts[row] for row in kept]
        wanted = [self._wanted(lane, count) for lane, count in zip(lanes, counts, strict=True)]
        ids = sample(logits, wanted, self._eos_id).tolist() if wanted else []
        outcomes = [
            Outcome(lane=turn.lane, error=turn.lane.error)
            for turn in plan.turns
            if turn.lane.error is not None and turn.lane not in dropped
        ]
        first = 0
        for lane, count in zip(lanes, counts, strict=True):
            rows = slice(first, first + 1 + count)
            outcomes.append(self._accept(lane, count, ids[rows], logits[rows]))
            first += 1 + count
        began = self._timer()
        alive = [o.lane for o in outcomes if o.error is None and not self._is_over(o.lane)]
        self._propose(alive, plan.draft)
        draft_s = self._timer() - began
        return Sampled(
            outcomes=tuple(outcomes),
            confidences=tuple(o.lane.confidences for o in outcomes if o.ids),
            draft_s=draft_s,
        )

    def close(self) -> None:
        """End the thread that makes masks."""
        self._mask_maker.shutdown(wait=False, cancel_futures=True)

    def _verified(self, plan: StepPlan) -> tuple[int, ...]:
        """Drafts of each turn that survive often enough by the newest confidences, at most ``max_drafts``."""
        available = [min(turn.max_drafts, len(turn.lane.drafts)) for turn in plan.turns]
        if plan.min_survival <= 0.0:
            return tuple(available)
        confidences = [turn.lane.confidences for turn in plan.turns]
        return distribute(confidences, available, plan.min_survival)

    def _wanted(self, lane: Lane, num_drafts: int) -> SampledRows:
        return SampledRows(
            params=lane.request.sampling,
            prompt_ids=lane.request.prompt_ids,
            output_ids=lane.output_ids,
            drafts=lane.drafts[:num_drafts],
            mask=cast("Masks | None", lane.masks),
        )

    def _accept(self, lane: Lane, num_drafts: int, sampled: Sequence[int], rows: Tensor) -> Outcome:
        count = accepted(lane.drafts[:num_drafts], sampled) + 1
        ids = list(sampled[:count])
        if -1 in ids:
            position = lane.num_tokens + ids.index(-1)
            return Outcome(
                lane=lane,
                error=RankError(
                    f"{self._name}: no token can follow at position {position}: its logits are not finite, or every "
                    "token is forbidden"
                ),
            )
        if self._eos_id in ids and not lane.request.sampling.ignore_eos:
            ids = ids[: ids.index(self._eos_id) + 1]
        try:
            if lane.grammar is not None:
                lane.grammar.advance(ids)
        except HeadraceError as error:
            return Outcome(lane=lane, error=error)
        # the last row's sample also judges the draft after the verified ones
        judged = lane.drafts[: num_drafts + 1]
        promised = sum(accumulate(lane.confidences[: len(judged)], mul))
        num_right = accepted(judged, sampled)
        params = lane.request.sampling
        chosen: tuple[float, ...] = ()
        likeliest: tuple[TopLogprobs, ...] = ()
        if params.logprobs or params.top_logprobs:
            chosen, likeliest = logprobs(rows[: len(ids)], ids, params.top_logprobs)
        lane.output_ids += ids
        return Outcome(
            lane=lane,
            ids=tuple(ids),
            num_verified=num_drafts,
            promised=promised,
            num_right=num_right,
            logprobs=chosen if params.logprobs else (),
            top_logprobs=likeliest,
        )

    def _is_over(self, lane: Lane) -> bool:
        params = lane.request.sampling
        return len(lane.output_ids) >= params.max_tokens or (
            lane.output_ids[-1] == self._eos_id and not params.ignore_eos
        )

    def _propose(self, lanes: Sequence[Lane], draft: bool) -> None:
        if draft:
            self._proposer.propose(lanes)
        else:
            for lane in lanes:
                lane.drafts, lane.confidences, lane.masks = (), (), None
        for lane in lanes:
            if lane.grammar is not None and lane.masks is None:
                lane.masks = self._mask_maker.submit(lane.grammar.masks, lane.drafts)


def _await_masks(lane: Lane, num_drafts: int) -> None:
    """Have the masks of a lane's rows in place, or the reason why it has none."""
    if lane.grammar is None or lane.error is not None:
        return
    try:
        if isinstance(lane.masks, Future):
            lane.masks = lane.masks.result()
        if lane.masks is None:
            lane.masks = lane.grammar.masks(lane.drafts)
        lane.masks = lane.masks[: num_drafts + 1]
    except HeadraceError as error:
        lane.error = error
