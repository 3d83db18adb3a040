"""What a deployment says about the experts of a pool: key ``experts`` of both pools."""

from dataclasses import dataclass
from typing import Literal, get_args

from ..transfer.errors import ConfigError

ExchangeName = Literal["auto", "shared_memory", "gloo", "nccl"]
DispatchName = Literal["float32", "fp8"]
CombineName = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """How the ranks of an instance share experts. Raises ConfigError."""

    redundant: int = 0
    """Expert slots of an instance and layer beyond one an expert, rounded up to whole slots a rank; for replicas."""
    exchange: ExchangeName = "auto"
    """Transport between ranks: `auto` is shared memory on one host and gloo otherwise; nccl has to be named."""
    dispatch: DispatchName = "float32"
    """How rows travel to their experts. FP8 is a quarter of the bytes and changes no bit, since the experts' inputs
    are rounded to it anyway; not for ``numerics: plain``."""
    combine: CombineName = "float32"
    """What a routed expert's output is rounded to before outputs are added, on any number of ranks; it travels so."""
    window: int = 100
    """Forward passes of which rows per expert are kept."""

    def __post_init__(self) -> None:
        for name, least in (("redundant", 0), ("window", 1)):
            value: int = getattr(self, name)
            if value < least:
                raise ConfigError(
                    f"{name} = {value} is not allowed: an integer of at least {least}"
                )
        for name, kind in (
            ("exchange", ExchangeName),
            ("dispatch", DispatchName),
            ("combine", CombineName),
        ):
            chosen: str = getattr(self, name)
            if chosen not in get_args(kind):
                raise ConfigError(
                    f"{name} = {chosen!r} is not allowed: one of {', '.join(get_args(kind))}"
                )
