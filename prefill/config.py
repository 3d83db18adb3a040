"""What a deployment says about its prefill ranks."""

from dataclasses import dataclass
from typing import get_args

from ..transfer.errors import ConfigError
from .hits import PrefixMode

MAX_WAIT_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """Limits of one prefill rank. Raises ConfigError.

    How many rows run the decoder layers (``keep``) is part of the cache layout, which both pools share.
    """

    chunk_tokens: int = 2048
    """Prompt rows of one step, over all prompts that share it."""
    chunk_pairs: int = 1 << 24
    """Attention pairs (a row and a token it may look at) of one step; what bounds a step deep inside a long prompt."""
    prefix_cache: PrefixMode = "exact"
    """Blocks of earlier prompts are used again. After a hit `exact` runs as many rows again as it takes to give the
    same bits as without; `window` runs one window again, as the model's makers do, and answers differ a little. `off`
    keeps nothing."""
    lease_s: float = 60.0
    """How long a finished prompt is kept for its reader, the reader's wait for room included."""
    queue_timeout_s: float = 600.0
    """How long a prompt may wait for its first row."""

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "chunk_pairs"):
            number: int = getattr(self, name)
            if number < 1:
                raise ConfigError(f"{name} = {number} is not allowed: an integer of at least 1")
        if self.prefix_cache not in get_args(PrefixMode):
            raise ConfigError(
                f"prefix_cache = {self.prefix_cache!r} is not allowed: one of {', '.join(get_args(PrefixMode))}"
            )
        for name in ("lease_s", "queue_timeout_s"):
            value: float = getattr(self, name)
            if not 0.0 < value <= MAX_WAIT_S:
                raise ConfigError(
                    f"{name} = {value} is not allowed: seconds above 0, up to {MAX_WAIT_S:.0f}"
                )
