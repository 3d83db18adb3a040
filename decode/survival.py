"""How likely drafts are to survive: by the confidences of one request, and over the requests of late.

survival of draft j = confidence 1 * ... * confidence j        expected tokens of a request = 1 + sum of survivals
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from .cost_table import Floats

NUM_THRESHOLDS = 64
THRESHOLDS: Floats = np.array(
    [np.inf, *(1.0 - k / NUM_THRESHOLDS for k in range(1, NUM_THRESHOLDS + 1))]
)
"""What a draft's survival must reach to be verified: from nothing is verified (infinity) to everything is (0)."""


def survivals(confidences: Sequence[Sequence[float]]) -> Floats:
    """[R, g]: chance that a request's first drafts are all accepted, from the confidences of each; 0 beyond the last.

    g is the greatest number of confidences. A confidence that is no number counts as 0.
    """
    lengths = np.fromiter(map(len, confidences), dtype=np.intp, count=len(confidences))
    width = int(lengths.max(initial=0))
    padded = np.zeros((len(lengths), width))
    if not width:
        return padded
    flat = np.fromiter(chain.from_iterable(confidences), dtype=np.float64, count=lengths.sum())
    padded[np.arange(width) < lengths[:, None]] = np.minimum(np.fmax(flat, 0.0), 1.0)
    return np.multiply.accumulate(padded, axis=1)


def distribute(
    confidences: Sequence[Sequence[float]], available: Sequence[int], min_survival: float
) -> tuple[int, ...]:
    """Drafts to verify of each request: those that survive with at least ``min_survival``, up to ``available`` each.

    Survival never grows along a request, so these are its first drafts.
    """
    if not any(confidences):
        return (0,) * len(confidences)
    found = survivals(confidences)
    lengths = np.fromiter(map(len, confidences), dtype=np.intp, count=len(confidences))
    limits = np.minimum(lengths, np.asarray(available, dtype=np.intp))
    return tuple(np.minimum((found >= min_survival).sum(axis=1), limits).tolist())


class SurvivalPool:
    """Survivals of the latest requests drafted for: at least ``MIN_ROWS`` rows, or those of the whole last step.

    Without any yet, every draft counts as sure: the first ones are verified and tell.
    """

    MIN_ROWS = 16
    MAX_ROWS = 256
    _DECAY = 0.98
    _DOUBT = 4.0

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._rows = np.zeros((0, num_drafts))
        self._predicted = self._accepted = 0.0
        sure = np.where(THRESHOLDS <= 1.0, float(num_drafts), 0.0)
        self._sums: tuple[Floats, Floats] | None = (sure, sure)

    def observe(self, confidences: Sequence[Sequence[float]]) -> None:
        """The drafts of one step: a row each for every request drafted for, empty where no draft was found."""
        if not confidences:
            return
        found = survivals(confidences)[:, : self._num_drafts]
        rows = np.zeros((len(found), self._num_drafts))
        rows[:, : found.shape[1]] = found
        if len(rows) >= self.MIN_ROWS:
            self._rows = rows[:: -(-len(rows) // self.MAX_ROWS)]
        else:
            self._rows = np.concatenate((self._rows, rows))[-self.MIN_ROWS :]
        self._sums = None

    def learn(self, predicted: float, accepted: int) -> None:
        """What a step's judged drafts promised (the sum of their survivals) and how many of them were right."""
        if predicted <= 0.0:
            return
        self._predicted = self._DECAY * self._predicted + predicted
        self._accepted = self._DECAY * self._accepted + accepted

    @property
    def honesty(self) -> float:
        """Right drafts for each one that the survivals promised, lately; between a half and two, 1 without evidence."""
        return min(max((self._accepted + self._DOUBT) / (self._predicted + self._DOUBT), 0.5), 2.0)

    @property
    def drafts_per_request(self) -> Floats:
        """[thresholds]: how many drafts of a request reach each of THRESHOLDS."""
        return self._sums_of_rows()[0]

    @property
    def tokens_per_request(self) -> Floats:
        """[thresholds]: tokens that a request gains in a step which verifies those drafts, its first included."""
        counts, tokens = self._sums_of_rows()
        return 1.0 + np.minimum(tokens * self.honesty, counts)

    def _sums_of_rows(self) -> tuple[Floats, Floats]:
        """[thresholds] each: drafts of a request that reach a threshold, and the sum of their survivals."""
        if self._sums is None:
            ordered = np.sort(self._rows, axis=None)
            places = np.searchsorted(ordered, THRESHOLDS)
            sums = np.concatenate((ordered[::-1].cumsum()[::-1], [0.0]))
            num_rows = len(self._rows)
            self._sums = (ordered.size - places) / num_rows, sums[places] / num_rows
        return self._sums
