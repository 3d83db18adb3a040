"""What a deployment says about tiers: where blocks are kept that no longer fit the device."""

import math
from dataclasses import dataclass

from ..errors import ConfigError
from .eviction import DEFAULT_POLICY, POLICIES
from .object_address import ObjectAddress

_IO = ("plain", "nixl")


@dataclass(frozen=True, kw_only=True)
class TiersConfig:
    """Tiers of one rank; a size of 0 leaves a tier out. Raises ConfigError."""

    memory_mib: int = 0
    """Host memory of each rank, in MiB."""
    disk: str | None = None
    """Folder on a local disk; ranks of one host share it."""
    disk_gib: float = 64.0
    """What all ranks together keep in `disk`, in GiB."""
    disk_io: str = "plain"
    """How files are read: `plain` system calls, or `nixl` (plugin POSIX with io_uring)."""
    objects: str | None = None
    """Object store: s3://bucket/prefix, where needed with ?endpoint=http://host:port&region=name. Credentials come from
    the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, or a role)."""
    objects_gib: float = 1024.0
    """What is kept in `objects`, in GiB."""
    objects_io: str = "plain"
    """How objects come and go: `plain` (pyarrow), or `nixl` (plugin OBJ, where this build of NIXL has it)."""
    objects_timeout_s: float = 2.0
    """Silence after which a request to the object store has failed."""
    policy: str = DEFAULT_POLICY
    """Which records go first when a tier is full."""
    write_queue_mib: int = 64
    """Of each tier: blocks that wait to be written. What does not fit is not kept."""
    load_timeout_s: float = 5.0
    """A load that takes longer is a miss; the prompt is computed."""
    refresh_s: float = 5.0
    """Between two looks at what other processes keep in `disk`; `objects` is looked at a tenth as often."""
    retry_s: float = 30.0
    """A tier that was slower than computing is tried again after this."""

    @property
    def any(self) -> bool:
        """Whether there is any tier."""
        return bool(self.memory_mib) or self.disk is not None or self.objects is not None

    def __post_init__(self) -> None:
        for name, least in (("memory_mib", 0), ("write_queue_mib", 1)):
            value: int = getattr(self, name)
            if value < least:
                raise ConfigError(
                    f"{name} = {value} is not allowed: an integer of at least {least}"
                )
        for name in (
            "disk_gib",
            "objects_gib",
            "objects_timeout_s",
            "load_timeout_s",
            "refresh_s",
            "retry_s",
        ):
            number: float = getattr(self, name)
            if not 0 < number < math.inf:
                raise ConfigError(f"{name} = {number:g} is not allowed: a number above 0")
        for name, allowed in (("disk_io", _IO), ("objects_io", _IO), ("policy", POLICIES)):
            word: str = getattr(self, name)
            if word not in allowed:
                raise ConfigError(f"{name} = {word!r} is not allowed: one of {', '.join(allowed)}")
        if self.disk is not None and not self.disk.strip():
            raise ConfigError(f"disk = {self.disk!r} is not allowed: null, or a folder")
        if self.objects is not None:
            ObjectAddress.parse(self.objects)
