"""How many drafts an instance verifies, and whose. Pure decisions.

    step N-2   survivals of every rank -> RankLoad -> choose: one threshold a rank       (planned while N-1 runs)
    step N-1   its survivals           -> distribute: drafts at or above the threshold   (on the stream, just before N)

The ages are those of an overlapped loop (spec/engine.md 3.4, 3.8). A draft counts only if it equals what its row
samples, so no schedule can change a token, and step N-1 may say how many rows there are, not only whose: a threshold
instead of a number of rows. In a small batch, where one step's survivals say little about the next one's, that is
worth 1 to 5% of the throughput.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .cost_table import Floats
from .step_cost import StepCost
from .survival import NUM_THRESHOLDS, THRESHOLDS, SurvivalPool

_NUM_POINTS = len(THRESHOLDS)
VECTOR_LENGTH = 2 + 2 * _NUM_POINTS


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """What one rank tells the others before a step, for each of THRESHOLDS: tokens it expects and seconds it needs.

    ``draft_s`` is what drafting would add to the step.
    """

    num_requests: int
    draft_s: float
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(
        cls,
        pool: SurvivalPool,
        cost: StepCost,
        *,
        num_requests: int,
        context_tokens: int,
    ) -> "RankLoad":
        """Of ``num_requests`` with ``context_tokens`` in all."""
        context = context_tokens / max(num_requests, 1)
        rows = num_requests * (1.0 + pool.drafts_per_request)
        return cls(
            num_requests=num_requests,
            draft_s=cost.draft_seconds(num_requests),
            tokens=tuple((num_requests * pool.tokens_per_request).tolist()),
            seconds=tuple(cost.step_seconds(rows, context).tolist()),
        )

    def to_vector(self) -> list[float]:
        """Always VECTOR_LENGTH numbers."""
        return [float(self.num_requests), self.draft_s, *self.tokens, *self.seconds]

    @classmethod
    def from_vector(cls, vector: Sequence[float]) -> "RankLoad":
        """Of ``to_vector``. Raises ValueError for another length."""
        if len(vector) != VECTOR_LENGTH:
            raise ValueError(f"a load of {len(vector)} numbers, not {VECTOR_LENGTH}")
        return cls(
            num_requests=int(vector[0]),
            draft_s=vector[1],
            tokens=tuple(vector[2 : 2 + _NUM_POINTS]),
            seconds=tuple(vector[2 + _NUM_POINTS :]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What an instance's next step verifies: on each rank the drafts with at least its ``min_survivals``.

    ``tokens`` and ``seconds`` are expected of the step, drafting included; ``tokens_per_s`` of the average user of the
    slowest rank. ``gain`` is the throughput over that of steps without drafts and drafting.
    """

    min_survivals: tuple[float, ...]
    tokens: float
    seconds: float
    tokens_per_s: float
    gain: float


def choose(loads: Sequence[RankLoad], min_tokens_per_s: float | None = None) -> Budget:
    """The thresholds with the most tokens a second: all ranks' tokens over the slowest rank's seconds.

    The search is global. A step of t seconds lets every rank verify whatever it can in t; so the candidates are the
    seconds of every rank at every threshold, in order, each adding that rank's tokens. With ``min_tokens_per_s`` only
    candidates count in which the average user of every rank is at least that fast, or, when there is none, the one
    whose slowest rank's users are fastest. Every rank gets the same answer from the same ``loads``.
    """
    busy = [load.num_requests > 0 for load in loads]
    if not any(busy):
        return Budget(
            min_survivals=(np.inf,) * len(loads),
            tokens=0.0,
            seconds=0.0,
            tokens_per_s=0.0,
            gain=0.0,
        )
    tokens = np.array([load.tokens for load in loads])
    seconds = np.maximum.accumulate([load.seconds for load in loads], axis=1)
    draft_s = max(load.draft_s for load in loads)
    least_s = seconds[:, 0].max()
    later = seconds[:, 1:].ravel()
    order = later.argsort(kind="stable")
    owner = order // NUM_THRESHOLDS
    added = np.diff(tokens, axis=1).ravel()[order]
    total = tokens[:, 0].sum() + np.concatenate(([0.0], added.cumsum()))
    step_s = np.maximum(least_s, np.concatenate(([0.0], later[order])))
    throughput = total / (step_s + draft_s)
    if min_tokens_per_s is None:
        best = int(throughput.argmax())
    else:
        speed = _slowest_users(loads, tokens, owner, added) / (step_s + draft_s)
        enough = speed >= min_tokens_per_s
        best = int((np.where(enough, throughput, -1.0) if enough.any() else speed).argmax())
    points = np.bincount(owner[:best], minlength=len(loads))
    chosen = tokens[np.arange(len(loads)), points]
    return Budget(
        min_survivals=tuple(THRESHOLDS[points].tolist()),
        tokens=float(total[best]),
        seconds=float(step_s[best] + draft_s),
        tokens_per_s=float(
            min(chosen[r] / load.num_requests for r, load in enumerate(loads) if busy[r])
            / (step_s[best] + draft_s)
        ),
        gain=float(throughput[best] * least_s / tokens[:, 0].sum()),
    )


def _slowest_users(
    loads: Sequence[RankLoad], tokens: Floats, owner: npt.NDArray[np.intp], added: Floats
) -> Floats:
    """[candidates]: tokens a step of the average user of the rank where it gains least."""
    growth = np.zeros((len(owner) + 1, len(loads)))
    growth[np.arange(1, len(owner) + 1), owner] = added
    growth[0] = tokens[:, 0]
    requests = np.array([load.num_requests for load in loads])
    return (growth.cumsum(axis=0)[:, requests > 0] / requests[requests > 0]).min(axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Whether a step makes drafts. While they do not pay, probes ``wait`` steps apart see whether they would.

    A probe drafts for PROBE_REQUESTS or more: one step of a large batch, some of a small one, where the drafts of a
    single step would say nothing. Only a gain that lasts makes the wait short again. All ranks of an instance hold the
    same value, for drafting may need all of them.
    """

    draft: bool = True
    pays: bool = True
    skipped: int = 0
    probed: int = 0
    paid: int = 0
    wait: int = 16

    MAX_WAIT = 256
    PROBE_REQUESTS = 4
    HYSTERESIS = 1.05

    def next(self, gain: float, num_requests: int) -> "Drafting":
        """After a step of ``num_requests`` for which ``choose`` expected ``gain``.

        To begin again, the gain has to exceed HYSTERESIS.
        """
        if gain > (1.0 if self.pays else self.HYSTERESIS):
            paid = self.paid + 1
            return Drafting() if paid >= self.wait else Drafting(paid=paid, wait=self.wait)
        probed = self.probed + num_requests
        if self.draft and not self.pays and probed < self.PROBE_REQUESTS:
            return replace(self, probed=probed)
        if self.skipped + 1 >= self.wait:
            return Drafting(pays=False, wait=min(2 * self.wait, self.MAX_WAIT))
        return Drafting(
            draft=False, pays=False, skipped=0 if self.draft else self.skipped + 1, wait=self.wait
        )


def affordable_requests(
    pool: SurvivalPool, cost: StepCost, context: float, min_tokens_per_s: float, most: int
) -> int:
    """The most requests of ``context`` tokens each, from 1 to ``most``, that all get at least ``min_tokens_per_s``.

    More requests make a step slower, so this is where a rank stops admitting.
    """
    requests = np.arange(1, most + 1)[:, None]
    rows = requests * (1.0 + pool.drafts_per_request)
    with_drafts = cost.step_seconds(rows, context) + cost.draft.seconds(requests)
    plain = 1.0 / cost.step_seconds(requests[:, 0], context)
    speed = np.maximum((pool.tokens_per_request / with_drafts).max(axis=1), plain)
    below = np.flatnonzero(speed < min_tokens_per_s)
    return max(1, int(below[0])) if len(below) else most
