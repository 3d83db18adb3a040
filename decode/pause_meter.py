"""What pausing costs on this machine, as measured: seconds per byte to host memory, seconds per recomputed row."""

from collections import deque
from statistics import median

from .pressure import PauseCosts

_WINDOW = 15
_UNMEASURED = PauseCosts(byte_s=1e-9, row_s=1e-3)


class PauseMeter:
    """Medians of the last samples, so that one hiccup decides nothing."""

    def __init__(self) -> None:
        self._byte_s: deque[float] = deque(maxlen=_WINDOW)
        self._row_s: deque[float] = deque(maxlen=_WINDOW)

    @property
    def costs(self) -> PauseCosts:
        """What ``pressure.decide`` weighs; 1 GB/s and 1 ms a row until something was measured."""
        return PauseCosts(
            byte_s=median(self._byte_s) if self._byte_s else _UNMEASURED.byte_s,
            row_s=median(self._row_s) if self._row_s else _UNMEASURED.row_s,
        )

    def moved(self, num_bytes: int, seconds: float) -> None:
        """``num_bytes``, at least one, went one way in ``seconds``."""
        self._byte_s.append(seconds / num_bytes)

    def recomputed(self, num_rows: int, seconds: float) -> None:
        """A pass of ``num_rows``, at least one and most of them recomputed, took ``seconds``."""
        self._row_s.append(seconds / num_rows)
