"""From what a deployment says to tiers at work."""

from pathlib import Path

from ..layout import CacheLayout
from .disk import DiskStore, PlainReader
from .eviction import make_policy
from .memory import MemoryStore
from .nixl_files import NixlReader
from .nixl_objects import NixlIo
from .object_address import ObjectAddress
from .objects import ObjectStore
from .rates import Rates
from .record import layout_digest
from .stack import TierStack
from .tier import Tier
from .tiers_config import TiersConfig

_MIB, _GIB = 1 << 20, 1 << 30
_OBJECT_THREADS, _OBJECT_PART = 8, 2
_OBJECTS_REFRESH = 10


def open_tiers(config: TiersConfig, layout: CacheLayout) -> TierStack:
    """The tiers of one rank, ready for use.

    Raises ConfigError for a folder that cannot be used, and for NIXL where it was asked for and cannot be had. An
    object store that does not answer is no error: its blocks are misses.
    """
    queue_records = max(1, config.write_queue_mib * _MIB // layout.block_bytes)
    tiers: list[Tier] = []
    if config.memory_mib:
        tiers.append(Tier("memory", _memory(config, layout), write_queue_records=queue_records))
    if config.disk is not None:
        tiers.append(
            Tier(
                "disk",
                _disk(config, layout, config.disk),
                write_queue_records=queue_records,
                load_timeout_s=config.load_timeout_s,
                refresh_s=config.refresh_s,
            )
        )
    if config.objects is not None:
        tiers.append(
            Tier(
                "objects",
                _objects(config, layout, config.objects),
                write_queue_records=queue_records,
                num_load_threads=_OBJECT_THREADS,
                num_write_threads=_OBJECT_THREADS,
                part_records=_OBJECT_PART,
                load_timeout_s=config.load_timeout_s,
                refresh_s=_OBJECTS_REFRESH * config.refresh_s,
            )
        )
    return TierStack(tiers, layout, Rates(retry_s=config.retry_s))


def _memory(config: TiersConfig, layout: CacheLayout) -> MemoryStore:
    return MemoryStore(
        layout_digest=layout_digest(layout),
        capacity_bytes=config.memory_mib * _MIB,
        row_bytes=layout.block_bytes,
        policy=make_policy(config.policy),
    )


def _disk(config: TiersConfig, layout: CacheLayout, folder: str) -> DiskStore:
    return DiskStore(
        Path(folder).expanduser(),
        layout=layout,
        capacity_bytes=int(config.disk_gib * _GIB),
        policy=make_policy(config.policy),
        reader=NixlReader() if config.disk_io == "nixl" else PlainReader(),
    )


def _objects(config: TiersConfig, layout: CacheLayout, url: str) -> ObjectStore:
    address = ObjectAddress.parse(url)
    return ObjectStore(
        address,
        layout=layout,
        capacity_bytes=int(config.objects_gib * _GIB),
        policy=make_policy(config.policy),
        timeout_s=config.objects_timeout_s,
        io=NixlIo(address, config.objects_timeout_s) if config.objects_io == "nixl" else None,
    )
