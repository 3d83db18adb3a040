"""Is reading a hit worth it, or is recomputing faster? Decided from what both took lately.

read:       num_bytes  x  seconds per byte of this tier          averages in which the newest measurement
recompute:  num_tokens x  seconds per token of this rank's prefill   weighs ``_NEWEST``
"""

import time
from collections.abc import Callable

_NEWEST = 0.2
_LEAST_BYTES = 1 << 12


def worth_reading(
    num_tokens: int, num_bytes: int, *, load_s_per_byte: float, recompute_s_per_token: float
) -> bool:
    """Whether reading ``num_bytes`` is expected to be over before ``num_tokens`` are recomputed."""
    return num_bytes * load_s_per_byte < num_tokens * recompute_s_per_token


class Rates:
    """Measured rates of one rank and its tiers. Without a measurement on either side a tier is read: that measures it.

    A tier that lost is tried again after ``retry_s``, since disks and networks recover.
    """

    def __init__(
        self, *, retry_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._retry_s = retry_s
        self._clock = clock
        self._load: dict[str, float] = {}
        self._measured: dict[str, float] = {}
        self._recompute: float | None = None

    @property
    def load_s_per_byte(self) -> dict[str, float]:
        """Tier -> seconds per byte, of those that were read."""
        return dict(self._load)

    @property
    def recompute_s_per_token(self) -> float | None:
        """Seconds per token, or None before the first measurement."""
        return self._recompute

    def note_load(self, tier: str, num_bytes: int, seconds: float) -> None:
        """A load from a tier took so long, waiting included; one that brought nothing counts as a slow one."""
        rate = seconds / max(num_bytes, _LEAST_BYTES)
        self._load[tier] = _mixed(self._load.get(tier), rate)
        self._measured[tier] = self._clock()

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """A forward pass over so many prompt tokens took so long."""
        if num_tokens > 0:
            self._recompute = _mixed(self._recompute, seconds / num_tokens)

    def worth_reading(self, num_tokens: int, num_bytes: int, tier: str) -> bool:
        """See the function of this name; True when it is time to measure."""
        load = self._load.get(tier)
        if load is None or self._recompute is None:
            return True
        if self._clock() - self._measured[tier] >= self._retry_s:
            return True
        return worth_reading(
            num_tokens, num_bytes, load_s_per_byte=load, recompute_s_per_token=self._recompute
        )


def _mixed(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST * (newest - before)
