"""A deployment: one YAML file, loaded strictly into frozen dataclasses.

    ClusterConfig
    |-- model       which checkpoint, in which arithmetic
    |-- split       where the network is cut between prefill and decode
    |-- transfer    how a handoff crosses
    |-- tiers       where cached blocks are kept beside prefill's own memory
    |-- prefill     PoolConfig + PrefillConfig: how many ranks, their caches, their scheduler, where they run
    |-- decode      PoolConfig + DecodeConfig
    |-- router      how ranks are chosen
    |-- timeouts    the longest wait of every phase
    `-- ray         which Ray cluster

An unknown key is an error with its dotted path; so is a value of the wrong type or outside its range.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

import yaml

from ..decode.config import DecodeConfig
from ..model.experts_config import ExpertsConfig
from ..prefill.config import PrefillConfig
from ..transfer.errors import ConfigError
from ..transfer.nixl_options import NixlOptions
from ..transfer.tiers.tiers_config import TiersConfig
from .eplb.config import EplbConfig
from .router.least_load import RouterConfig
from .strict import build_section, plain, read_yaml, require

PACKAGE_ROOT = Path(__file__).resolve().parent.parent
CONFIGS = PACKAGE_ROOT / "configs"


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Which network, in which arithmetic; the same on every rank."""

    checkpoint: str
    """Directory of the checkpoint. A relative path is looked for beside the configuration file, then in the packaged
    `configs`; an absolute one must exist on every node."""
    numerics: Literal["released", "plain"] = "released"
    """`released` keeps every rounding step the model was trained with; `plain` is mathematics only, for checks."""
    deterministic: bool = False
    """Batch-invariant arithmetic and exact order of sums: a request's tokens do not depend on its neighbours."""
    block_tokens: int = 128
    """Tokens per block of global KV."""
    keep: int | None = None
    """Last prompt rows that run through the decoder layers; null takes the attention window plus 12."""

    def __post_init__(self) -> None:
        require(bool(self.checkpoint), "checkpoint", self.checkpoint, "a directory")
        require(
            self.block_tokens >= 2 and self.block_tokens % 2 == 0,
            "block_tokens",
            self.block_tokens,
            "an even integer of at least 2",
        )
        require(
            self.keep is None or self.keep >= 1,
            "keep",
            self.keep,
            "null or an integer of at least 1",
        )


@dataclass(frozen=True, kw_only=True)
class TransferSection:
    """How a handoff crosses from prefill to decode."""

    backend: Literal["nixl", "loopback"] = "nixl"
    """`nixl` between processes and hosts; `loopback` exists inside one process only and is refused by a cluster."""
    nixl: NixlOptions = field(default_factory=NixlOptions)
    """How NIXL and UCX are set up."""

    def __post_init__(self) -> None:
        require(
            self.backend != "loopback",
            "backend",
            self.backend,
            "nixl (loopback joins ranks of one process; the ranks of a Ray cluster are processes)",
        )


@dataclass(frozen=True, kw_only=True)
class PlacementSection:
    """Where the ranks of one pool run, and what one rank asks for."""

    cpus: float = 1.0
    """CPUs of one rank, as Ray counts them; also the number of threads its arithmetic uses (at least one)."""
    gpus: float = 0.0
    """GPUs of one rank."""
    resources: Mapping[str, float] = field(default_factory=dict[str, float])
    """Custom resources of one rank, such as `prefill: 1`; nodes offer them with `ray start --resources`."""
    strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """Where Ray puts the ranks of one instance: one node, few nodes, many nodes, one node each."""
    domain_label: str | None = None
    """Node label that names the scale-up domain: all ranks of an instance share one value of it. null ignores it."""

    def __post_init__(self) -> None:
        require(self.cpus >= 0, "cpus", self.cpus, "a number of at least 0")
        require(self.gpus >= 0, "gpus", self.gpus, "a number of at least 0")
        for name, amount in self.resources.items():
            require(amount > 0, f"resources.{name}", amount, "a number above 0")
            if name in ("CPU", "GPU", "memory"):
                raise ConfigError(f"resources.{name} is not a custom resource: use cpus or gpus")
        require(
            any((self.cpus, self.gpus, self.resources)),
            "cpus",
            self.cpus,
            "at least one of cpus, gpus and resources above 0",
        )
        if self.domain_label is not None and self.strategy == "STRICT_PACK":
            raise ConfigError(
                "domain_label is of no use with strategy = 'STRICT_PACK': one node lies in one domain; use PACK"
            )


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """One pool: `instances` gangs of `ranks` each. Cache sizes are per rank."""

    instances: int = 1
    """Instances in this pool; an instance is the unit of placement and failure."""
    ranks: int = 1
    """Ranks of one instance; they step together and share the experts (expert parallelism)."""
    num_blocks: int
    """Blocks of global KV on one rank, block 0 (reserved) included."""
    num_slots: int
    """State slots on one rank, slot 0 (reserved) included: at most this many requests less one are in flight."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    """How the ranks of an instance share experts."""
    eplb: EplbConfig = field(default_factory=EplbConfig)
    """When experts move between them."""
    placement: PlacementSection = field(default_factory=PlacementSection)
    """Where the ranks run."""
    rendezvous_port: int = 0
    """TCP port on rank 0's node where an instance's ranks meet; instance i takes port + i; 0 takes a free one."""

    def __post_init__(self) -> None:
        require(self.instances >= 1, "instances", self.instances, "an integer of at least 1")
        require(self.ranks >= 1, "ranks", self.ranks, "an integer of at least 1")
        require(self.num_blocks >= 2, "num_blocks", self.num_blocks, "an integer of at least 2")
        require(self.num_slots >= 2, "num_slots", self.num_slots, "an integer of at least 2")
        last = self.rendezvous_port + self.instances - 1
        require(
            self.rendezvous_port == 0 or 1024 <= self.rendezvous_port <= last <= 65535,
            "rendezvous_port",
            self.rendezvous_port,
            "0 (a free port) or a port from 1024 to 65535",
        )


@dataclass(frozen=True, kw_only=True)
class PrefillPool(PoolConfig, PrefillConfig):
    """The prefill pool, and the limits of each of its ranks."""

    def __post_init__(self) -> None:
        PoolConfig.__post_init__(self)
        PrefillConfig.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class DecodePool(PoolConfig, DecodeConfig):
    """The decode pool, and the limits of each of its ranks."""

    def __post_init__(self) -> None:
        PoolConfig.__post_init__(self)
        DecodeConfig.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """The longest wait of every phase, in seconds. A wait that runs out is a DeadlineError naming its phase.

    place | process | load | join | pair | ready            start-up, per stage
    route | prefill ........ | first token ... | token ...  a request
    """

    route_s: float = 3600.0
    """Until a decode rank has room for a request."""
    place_s: float = 60.0
    """Until Ray has found room for an instance."""
    process_s: float = 60.0
    """Until a placed rank's process is up."""
    load_s: float = 600.0
    """Until a rank has checked, and then loaded, its checkpoint."""
    join_s: float = 60.0
    """Until the ranks of an instance have met."""
    pair_s: float = 60.0
    """Until prefill and decode ranks can reach each other's memory."""
    prefill_s: float = 600.0
    """From a request's submission to prefill until its handoff is offered, queueing included."""
    first_token_s: float = 300.0
    """From the offer until the first token, waiting for room and the transfer included."""
    token_s: float = 120.0
    """Between two deliveries of tokens."""
    step_s: float = 60.0
    """How long an instance's ranks wait for each other, and how long a rank may be silent."""
    shutdown_s: float = 10.0
    """Until ranks have closed what they opened; after it they are killed."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value > 0, name, value, "a number above 0")


@dataclass(frozen=True, kw_only=True)
class LocalRay:
    """The Ray cluster that is started on this host when none is joined."""

    num_cpus: float | None = None
    """CPUs it offers; null offers what the ranks ask for. They are counted, not reserved."""
    object_store_mib: int = 80
    """Size of its object store in MiB; results are small, so is the store."""

    def __post_init__(self) -> None:
        require(
            self.num_cpus is None or self.num_cpus > 0, "num_cpus", self.num_cpus, "null or above 0"
        )
        require(
            self.object_store_mib >= 76, "object_store_mib", self.object_store_mib, "at least 76"
        )


@dataclass(frozen=True, kw_only=True)
class RaySection:
    """Which Ray cluster the ranks run on."""

    address: str | None = None
    """`host:port` of a running cluster, `auto` for the one of this host, `local` to start one; null takes RAY_ADDRESS
    if it is set, and otherwise starts one."""
    namespace: str = "headrace"
    """Ray namespace of the actors."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables of every rank, for example UCX_TLS."""
    local: LocalRay = field(default_factory=LocalRay)
    """Options of a cluster started here."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """One complete deployment."""

    model: ModelSection
    """Which network, in which arithmetic."""
    split: Literal["classic", "seam"] = "classic"
    """Where the network is cut. `classic`: prefill holds all layers and hands over global KV and all windows. `seam`:
    prefill holds the encoder layers alone and hands over global KV, their windows and what the decoder layers start
    from in the last `keep` rows; decode runs these rows inside its steps. Tokens are the same."""
    transfer: TransferSection = field(default_factory=TransferSection)
    """How a handoff crosses."""
    tiers: TiersConfig = field(default_factory=TiersConfig)
    """Where blocks are kept that no longer fit prefill's cache, and what answers added."""
    prefill: PrefillPool
    """The prefill pool."""
    decode: DecodePool
    """The decode pool."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """How ranks are chosen for a request."""
    max_prefills: int = 3
    """How often one request may be prefilled, the first time included, before a failing transfer fails it."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """The longest wait of every phase."""
    ray: RaySection = field(default_factory=RaySection)
    """Which Ray cluster."""

    def __post_init__(self) -> None:
        require(
            self.max_prefills >= 1, "max_prefills", self.max_prefills, "an integer of at least 1"
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of both pools together."""
        return sum(pool.instances * pool.ranks for pool in (self.prefill, self.decode))

    def resolved(self) -> str:
        """The whole configuration, defaults included, as YAML that loads again."""
        return yaml.safe_dump(plain(self), sort_keys=False, width=100)


def load_cluster_config(path: str | Path, overrides: Sequence[str] = ()) -> ClusterConfig:
    """The deployment described by a YAML file.

    ``path`` is a file, or the name of a file in the packaged ``configs`` folder (``local``, ``configs/local.yaml``).
    ``overrides`` are ``dotted.key=value`` with the value in YAML, applied before the checks. Raises ConfigError.
    """
    file = _find_file(Path(path))
    try:
        document = read_yaml(file.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ConfigError(f"holds {type(document).__name__}, not a mapping of keys")
        values = cast(dict[str, object], document)
        for override in overrides:
            _apply(values, override)
        config = build_section(ClusterConfig, values)
        checkpoint = _find_checkpoint(config.model.checkpoint, file.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return replace(config, model=replace(config.model, checkpoint=checkpoint))


def checkpoint_dir(config: ClusterConfig) -> Path:
    """The checkpoint's directory on the caller's host: a relative path lies in `configs`, wherever the package is."""
    return CONFIGS / config.model.checkpoint


def _find_file(path: Path) -> Path:
    for candidate in (path, PACKAGE_ROOT / path, CONFIGS / path, CONFIGS / f"{path}.yaml"):
        if candidate.is_file():
            return candidate
    names = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.yaml")))
    raise ConfigError(f"{path} is not a file; the packaged configurations are {names}")


def _find_checkpoint(written: str, beside: Path) -> str:
    """Absolute, or relative to the packaged ``configs``, which may lie elsewhere on another node."""
    path = Path(written).expanduser()
    if path.is_absolute():
        return str(path)
    if beside.resolve() != CONFIGS and (beside / path).is_dir():
        return str((beside / path).resolve())
    if (CONFIGS / path).is_dir():
        return str(path)
    raise ConfigError(
        f"model.checkpoint = {written!r} is not a directory beside the file or in the packaged configs; "
        "give an absolute path, or one relative to the file"
    )


def _apply(values: dict[str, object], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {override!r} is not allowed: dotted.key=value")
    *parents, last = key.split(".")
    here = values
    for parent in parents:
        inner = here.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r} is not allowed: {parent} holds {inner!r}")
        here = cast(dict[str, object], inner)
    here[last] = read_yaml(text)
