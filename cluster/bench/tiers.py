"""``headrace bench tiers``: how fast blocks of the released layout go into each tier and come back.

One run interleaves everything, so that a busy machine slows all alike; figures are medians over the repeats. ``hot``
files are in the page cache, ``cold`` ones were written back and dropped from it first. ``loop`` is what the thread that
asks pays itself: to store a block (one copy into the queue), to find one, and to start its load.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table

from ...transfer.errors import ConfigError
from ...transfer.tiers.disk import DiskStore, FileReader, PlainReader
from ...transfer.tiers.disk_folder import rounded
from ...transfer.tiers.eviction import make_policy
from ...transfer.tiers.memory import MemoryStore
from ...transfer.tiers.nixl_files import NixlReader
from ...transfer.tiers.object_address import ObjectAddress
from ...transfer.tiers.objects import ObjectStore
from ...transfer.tiers.record import HEADER_BYTES, NO_PARENT, Kind, Miss, Record, layout_digest
from ...transfer.tiers.stack import TierStack
from ...transfer.tiers.store import Store
from ...transfer.tiers.tier import Tier
from .handoff import bench_layout
from .processor import processor

_LAYOUT = bench_layout()
_DIGEST = layout_digest(_LAYOUT)
_BLOCK_BYTES = _LAYOUT.block_bytes
Seconds = dict[str, list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.Command."""
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help="where on the disk to be measured (default: a temporary one)",
    )
    parser.add_argument(
        "--objects", metavar="URL", help="also measure s3://bucket/prefix?endpoint=..."
    )
    parser.add_argument("--blocks", type=int, default=64, help="blocks a round (default 64)")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds (default 9)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> dict[str, object] | None:
    """See cli.Command."""
    for name, value in (("--blocks", args.blocks), ("--repeats", args.repeats)):
        if value < 1:
            raise ConfigError(f"{name} = {value} is not allowed: at least 1")
    address = ObjectAddress.parse(args.objects) if args.objects else None
    document = measure(args.folder, address, args.blocks, args.repeats)
    if args.json:
        return document
    _print(document)
    return None


def measure(
    folder: str | None, objects: ObjectAddress | None, num_blocks: int, repeats: int
) -> dict[str, object]:
    """One warm-up round and ``repeats`` timed ones."""
    seconds: Seconds = {}
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        bench = _Bench(path, objects, num_blocks)
        stack.callback(bench.close)
        for repeat in range(repeats + 1):
            found = bench.round(repeat)
            if repeat:
                for name, value in found.items():
                    seconds.setdefault(name, []).append(value)
    return {
        "environment": {
            "processor": processor(),
            "num_cpus": os.cpu_count(),
            "load_average_1m": round(os.getloadavg()[0], 2),
            "blocks": num_blocks,
            "repeats": repeats,
        },
        "bytes_per_token": {
            "payload": _BLOCK_BYTES / _LAYOUT.block_tokens,
            "header": HEADER_BYTES / _LAYOUT.block_tokens,
            "on_disk": rounded(HEADER_BYTES + _BLOCK_BYTES) / _LAYOUT.block_tokens,
        },
        "results": [_summary(name, values, num_blocks) for name, values in seconds.items()],
    }


class _Bench:
    """The stores, and the blocks that go round."""

    def __init__(self, path: Path, objects: ObjectAddress | None, num_blocks: int) -> None:
        self._path = path
        self._num_blocks = num_blocks
        self._blocks = torch.randint(0, 256, (num_blocks, _BLOCK_BYTES), dtype=torch.uint8)
        self._rows = torch.zeros_like(self._blocks)
        capacity = 4 * num_blocks * (HEADER_BYTES + _BLOCK_BYTES + 4096)
        self._disks = {
            "plain": self._disk(PlainReader(), capacity),
            "nixl": self._disk(NixlReader(), capacity),
        }
        self._memory = self._arena(2)
        self._objects = objects and ObjectStore(
            objects, layout=_LAYOUT, capacity_bytes=1 << 40, policy=make_policy("lru")
        )
        self._tiers = TierStack(
            [Tier("memory", self._arena(2), write_queue_records=num_blocks)], _LAYOUT
        )

    def round(self, number: int) -> dict[str, float]:
        """Seconds of everything."""
        records = [self._record(number, place) for place in range(self._num_blocks)]
        names = [record.name for record in records]
        for record in records:
            _ = record.header  # not counted twice, and not at all against one store
        found = {
            "memory store": _timed(lambda: _write(self._memory, records)),
            "memory load": self._load(self._memory, names),
            "disk store": _timed(lambda: _write(self._disks["plain"], records)),
        }
        readers = list(self._disks.items())
        for name, disk in readers if number % 2 else reversed(readers):
            found[f"disk load hot, {name}"] = self._load(disk, names)
            self._drop_pages()
            found[f"disk load cold, {name}"] = self._load(disk, names)
        if self._objects is not None:
            store = self._objects
            found["objects store"] = _timed(lambda: _write(store, records))
            found["objects load"] = self._load(store, names)
        return found | self._loop(records)

    def close(self) -> None:
        """Close the stores."""
        self._tiers.close()
        for disk in self._disks.values():
            disk.close()

    def _loop(self, records: Sequence[Record]) -> dict[str, float]:
        keys = [record.key for record in records]
        rows, blocks = list(self._rows), list(self._blocks)
        found = {
            "loop: store": _timed(
                lambda: [self._tiers.store(k, r) for k, r in zip(keys, blocks, strict=True)]
            )
        }
        self._tiers.flush(60)
        found["loop: find"] = _timed(lambda: self._tiers.find(keys))
        spans = self._tiers.find(keys)
        started = time.perf_counter()
        load = self._tiers.load(spans, keys, rows)
        found["loop: start a load"] = time.perf_counter() - started
        while not load.poll():
            time.sleep(0.0001)
        return found

    def _load(self, store: Store, names: Sequence[bytes]) -> float:
        rows = [memoryview(cast("Any", row.numpy())) for row in self._rows]
        self._rows.zero_()
        started = time.perf_counter()
        headers = store.read(names, rows)
        seconds = time.perf_counter() - started
        if any(isinstance(header, Miss) for header in headers) or not torch.equal(
            self._rows, self._blocks
        ):
            raise AssertionError("a block did not come back")
        return seconds

    def _record(self, number: int, place: int) -> Record:
        return Record(
            kind=Kind.BLOCK,
            key=place.to_bytes(8, "little") + number.to_bytes(8, "little"),
            parent=NO_PARENT,
            layout_digest=_DIGEST,
            payload=self._blocks[place].numpy().tobytes(),
        )

    def _disk(self, reader: FileReader, capacity_bytes: int) -> DiskStore:
        return DiskStore(
            self._path / "cache",
            layout=_LAYOUT,
            capacity_bytes=capacity_bytes,
            policy=make_policy("lru"),
            reader=reader,
        )

    def _arena(self, rounds: int) -> MemoryStore:
        return MemoryStore(
            layout_digest=_DIGEST,
            capacity_bytes=rounds * self._num_blocks * _BLOCK_BYTES,
            row_bytes=_BLOCK_BYTES,
            policy=make_policy("lru"),
        )

    def _drop_pages(self) -> None:
        os.sync()
        for file in (self._path / "cache" / "records").glob("*/*"):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write(store: Store, records: Sequence[Record]) -> None:
    for record in records:
        if not store.write(record):
            raise ConfigError("a block could not be stored; see the log")


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _summary(name: str, seconds: Sequence[float], num_blocks: int) -> dict[str, object]:
    median = statistics.median(seconds)
    return {
        "what": name,
        "us_per_block": round(median / num_blocks * 1e6, 1),
        "mb_per_s": round(num_blocks * _BLOCK_BYTES / median / 1e6, 1),
        "best_mb_per_s": round(num_blocks * _BLOCK_BYTES / min(seconds) / 1e6, 1),
    }


def _print(document: dict[str, Any]) -> None:
    table = Table(title=f"stored blocks of {_BLOCK_BYTES} bytes: medians, MB/s (10^6 bytes)")
    for heading in ("", "us a block", "MB/s", "best MB/s"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in document["results"]:
        rates = (
            ("", "") if row["what"].startswith("loop") else (row["mb_per_s"], row["best_mb_per_s"])
        )
        table.add_row(row["what"], str(row["us_per_block"]), *map(str, rates))
    Console().print(table)
    Console().print(
        "bytes per token: "
        + ", ".join(f"{name} {value:g}" for name, value in document["bytes_per_token"].items())
    )
