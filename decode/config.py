"""What a deployment says about its decode ranks."""

import math
from dataclasses import dataclass, field

from ..transfer.errors import ConfigError
from .grammar_limits import GrammarLimits
from .speculation_config import SpeculationConfig


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
    host_cache_mib: int = 1024
    """Host memory for the caches of paused requests, in MiB; what it cannot hold is computed again. 0 moves nothing."""
    recompute_tokens: int = 64
    """Rows of dropped caches that one step computes again beside the running requests."""
    tail_tokens: int = 64
    """Prompt rows of newcomers that one step runs beside the running requests; for `split: seam`."""
    num_tails: int = 8
    """Newcomers whose prompt rows may be arriving or running at a time on a rank; for `split: seam`."""
    overlap: bool = True
    """Plan the next step and deliver the last one while the device runs; false takes turns. Tokens are the same."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    """Drafts, and how many of them a step verifies."""
    grammar: GrammarLimits = field(default_factory=GrammarLimits)
    """What compiling a grammar may cost."""
    profile_s: float = 3.0
    """Seconds for measuring what steps cost before a rank serves, once an hour; 0 learns it while serving."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_batch", 1),
            ("host_cache_mib", 0),
            ("recompute_tokens", 1),
            ("tail_tokens", 1),
            ("num_tails", 1),
        ):
            value: float = getattr(self, name)
            if value < least:
                raise ConfigError(
                    f"{name} = {value} is not allowed: an integer of at least {least}"
                )
        if not (math.isfinite(self.profile_s) and self.profile_s >= 0.0):
            raise ConfigError(f"profile_s = {self.profile_s} is not allowed: seconds, or 0")
        for name in ("transfer_timeout_s", "confirm_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ConfigError(f"{name} = {value} is not allowed: seconds above 0")
