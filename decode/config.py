"""What a deployment says about its decode ranks."""

import math
from dataclasses import dataclass

from ..transfer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Limits of one decode rank. Raises ConfigError.

    How many rows run the decoder layers (``keep``) is part of the cache layout, which both pools share.
    """

    max_batch: int = 64
    """Requests that run or are being read at a time."""
    transfer_timeout_s: float = 20.0
    """How long the read of one handoff may take."""
    confirm_timeout_s: float = 20.0
    """How long its holder, which may be in the middle of a step, has to confirm the lease afterwards."""

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise ConfigError(
                f"max_batch = {self.max_batch} is not allowed: an integer of at least 1"
            )
        for name in ("transfer_timeout_s", "confirm_timeout_s"):
            value: float = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ConfigError(f"{name} = {value} is not allowed: seconds above 0")
