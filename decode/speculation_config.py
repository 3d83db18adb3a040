"""What a deployment says about speculation. It changes how fast tokens come, never which."""

import math
from dataclasses import dataclass
from typing import Literal

from ..transfer.errors import ConfigError

MAX_DRAFTS = 6
"""More could not be rolled back: a slot keeps the halves of open pairs for this many rows beside the newest."""


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """How decode guesses tokens ahead and how many guesses a step verifies. Tokens do not depend on any of it."""

    proposer: Literal["auto", "drafter", "ngram", "off"] = "auto"
    """Who guesses: the checkpoint's `drafter`, or `ngram`, which repeats what followed an earlier end like this;
    `auto` takes the drafter if the checkpoint has one and n-grams otherwise."""
    num_drafts: int = 5
    """Tokens guessed ahead of each request, 1 to 6; a drafter gives at most its block size."""
    schedule: Literal["confidence", "fixed"] = "confidence"
    """`confidence` verifies the drafts that promise the most tokens a second by measured step times, and stops drafting
    where that does not pay; `fixed` verifies all of them always."""
    min_tokens_per_s: float | None = None
    """A speed that each user shall have: a rank admits no more requests than can have it, and verifies accordingly.
    null: as many tokens a second in all as can be."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_drafts <= MAX_DRAFTS:
            raise ConfigError(
                f"num_drafts = {self.num_drafts} is not allowed: an integer from 1 to {MAX_DRAFTS}"
                " (proposer: off drafts nothing)"
            )
        floor = self.min_tokens_per_s
        if floor is not None and not (math.isfinite(floor) and floor > 0.0):
            raise ConfigError(
                f"min_tokens_per_s = {floor} is not allowed: null or tokens per second above 0"
            )
        if floor is not None and self.schedule == "fixed":
            raise ConfigError(
                "min_tokens_per_s needs schedule = 'confidence': a fixed schedule cannot keep it"
            )
