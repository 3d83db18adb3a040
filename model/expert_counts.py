"""Rows per (pass, layer, logical expert) that this rank routed, of the last passes.

ring    | pass 97 | pass 98 | pass 99 |  ...   one thread writes, others read without stopping it:
steps   |   97    |   98    |   -1    |  ...   a row whose step is -1, or changed while it was read, is left out
"""

import threading

import numpy as np
from numpy.typing import NDArray

_NO_STEP = -1


class ExpertCounts:
    """A ring of ``window`` passes. Passes are numbered alike on every rank of an instance, so ranks add up."""

    def __init__(self, layers: int, experts: int, window: int) -> None:
        self._now = np.zeros((layers, experts), np.int32)
        self._ring = np.zeros((window, layers, experts), np.int32)
        self._steps = np.full(window, _NO_STEP, np.int64)
        self._lock = threading.Lock()
        """Between the threads of one pass, never a reader."""

    def new_part(self) -> NDArray[np.int32]:
        """Zeros [layers, E] in which one thread counts its part of a pass."""
        return np.zeros_like(self._now)

    def add(self, part: NDArray[np.int32]) -> None:
        """Rows [layers, E] of one part of the running pass."""
        with self._lock:
            self._now += part

    def end_step(self, step: int) -> None:
        """The running pass was number ``step`` >= 0, greater than those before it."""
        place = step % len(self._steps)
        self._steps[place] = _NO_STEP
        self._ring[place] = self._now
        self._steps[place] = step
        self._now[:] = 0

    def clear(self) -> None:
        """Forget everything, as after passes that were no work."""
        self._steps[:] = _NO_STEP
        self._now[:] = 0

    def series(self, since: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """(steps int64 [n] in order, from ``since`` on; rows int32 [n, layers, E]). For any thread, at any time."""
        steps = self._steps.copy()
        places = np.flatnonzero(steps >= max(0, since))
        places = places[np.argsort(steps[places])]
        rows = self._ring[places]
        whole = self._steps[places] == steps[places]
        return steps[places][whole], rows[whole]
