"""When moving experts pays."""

import math
from dataclasses import dataclass

from ...transfer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EplbConfig:
    """What a decision weighs. Raises ConfigError."""

    min_steps: int = 20
    """Passes that have to be seen before the first decision."""
    keep_steps: int = 500
    """Passes whose counts a decision looks back on."""
    horizon_steps: int = 1000
    """Passes for which a plan is expected to hold; what a move costs is weighed against what it saves in them."""
    min_gain: float = 0.02
    """Part of the busiest ranks' rows that a plan has to save."""
    move_cost_passes: float = 1.0
    """What fetching one expert is counted as: so many passes of the mean rank through one layer."""
    plan_s: float = 1.0
    """Deadline of planning; the best plan found until then is taken."""
    bandwidth_mib_per_s: float = 256.0
    """Cap of what one rank reads from others, in MiB/s."""
    ranks_per_domain: int | None = None
    """Ranks that share a scale-up domain, if an instance is larger than one; null takes it as one domain."""

    def __post_init__(self) -> None:
        for name, least in (("min_steps", 1), ("keep_steps", 1), ("horizon_steps", 1)):
            value: int = getattr(self, name)
            if value < least:
                raise ConfigError(
                    f"{name} = {value} is not allowed: an integer of at least {least}"
                )
        for name in ("plan_s", "bandwidth_mib_per_s"):
            number: float = getattr(self, name)
            if not 0 < number < math.inf:
                raise ConfigError(f"{name} = {number:g} is not allowed: a number above 0")
        if not 0 <= self.min_gain < 1:
            raise ConfigError(f"min_gain = {self.min_gain:g} is not allowed: from 0 to below 1")
        if not 0 <= self.move_cost_passes < math.inf:
            raise ConfigError(
                f"move_cost_passes = {self.move_cost_passes:g} is not allowed: a number of at least 0"
            )
        if self.ranks_per_domain is not None and self.ranks_per_domain < 1:
            raise ConfigError(
                f"ranks_per_domain = {self.ranks_per_domain} is not allowed: null or at least 1"
            )
