"""What a deployment says about rebalancing: key ``eplb`` of both pools."""

import math
import re
from dataclasses import dataclass

from ...transfer.errors import ConfigError

_CLASS = re.compile(r"[\w-][\w.-]{0,99}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class EplbConfig:
    """When experts are moved between the ranks of an instance, and how fast. Raises ConfigError."""

    enabled: bool = False
    """Move experts while the instance serves. Rows are counted either way."""
    interval_s: float = 30.0
    """Between two decisions."""
    collect_s: float = 2.0
    """Between two collections of the ranks' counts; has to be shorter than `experts.window` passes take."""
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
    deadline_s: float = 60.0
    """Of one move; what is not in force by then is dropped."""
    bandwidth_mib_per_s: float = 256.0
    """Cap of what one rank reads from others, in MiB/s."""
    ranks_per_domain: int | None = None
    """Ranks that share a scale-up domain, if an instance is larger than one; null takes it as one domain."""
    history: str | None = None
    """Folder in which the statistics of `traffic_class` are kept, so that a new deployment begins with a plan; null
    keeps none."""
    traffic_class: str | None = None
    """Name of this deployment's traffic in `history`."""

    def __post_init__(self) -> None:
        for name, least in (("min_steps", 1), ("keep_steps", 1), ("horizon_steps", 1)):
            value: int = getattr(self, name)
            if value < least:
                raise ConfigError(
                    f"{name} = {value} is not allowed: an integer of at least {least}"
                )
        for name in ("interval_s", "collect_s", "plan_s", "deadline_s", "bandwidth_mib_per_s"):
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
        if (self.history is None) != (self.traffic_class is None):
            raise ConfigError(
                f"history = {self.history!r} with traffic_class = {self.traffic_class!r} is not allowed: both or none"
            )
        if self.traffic_class is not None and not _CLASS.fullmatch(self.traffic_class):
            raise ConfigError(
                f"traffic_class = {self.traffic_class!r} is not allowed: up to 100 letters, digits, _, - and dots, not"
                " a dot first"
            )
