"""``headrace bench transfer``: NIXL against a plain memory copy and against Ray's object store.

One run interleaves everything, so that a busy machine slows all alike; figures are medians over the repeats, ratios
are medians of the ratios within a repeat, and ``best`` holds the figures of the fastest repeat of each kind. NIXL
reads between two processes, in blocks of the released layout that are scattered, so that no two copies can be joined;
the memory copy makes the same copies inside one process; the object store puts in one process, gets and copies in
another. ``fixed_cost_ms`` is a whole handoff of two tokens: decode the offer, plan, read, verify, have the lease
confirmed, release. Its holder polls every 50 us; one in the middle of a forward pass answers at the end of it.
"""

import argparse
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ...transfer.checksum import block_checksums
from ...transfer.errors import ConfigError
from ...transfer.huge_pages import use_huge_pages
from ...transfer.nixl_options import NixlOptions
from .handoff import NUM_BLOCKS, Reader, bench_layout, make_arenas, memory_copy, payload
from .object_store import ObjectStore
from .processor import processor

DEFAULT_SIZES = ("64K", "1M", "4M", "16M", "64M", "128M")
_UNITS = {"K": 1 << 10, "M": 1 << 20}
_LARGEST = NUM_BLOCKS // 2 * bench_layout().block_bytes
_TINY_HANDOFFS = 10

_HEADINGS = {
    "bytes": "bytes",
    "nixl_gb_per_s": "NIXL",
    "memcpy_gb_per_s": "memcpy",
    "ray_object_store_gb_per_s": "Ray",
    "checksum_gb_per_s": "checksum",
    "nixl_over_memcpy": "/memcpy",
    "nixl_over_ray_object_store": "/Ray",
    "fixed_cost_ms": "fixed ms",
}

Round = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=list(DEFAULT_SIZES),
        metavar="SIZE",
        help="payload sizes: bytes, or with the suffix K (1024) or M (1024^2)",
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds (default 9)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> dict[str, object] | None:
    """Measure; return the document with ``--json``, else print a table."""
    sizes = [parse_size(text) for text in args.sizes]
    if args.repeats < 1:
        raise ConfigError(f"--repeats = {args.repeats} is not allowed: at least 1")
    document = measure(sizes, args.repeats, NixlOptions())
    if args.json:
        return document
    _print(document)
    return None


def parse_size(text: str) -> int:
    """Bytes of ``64K``, ``4M`` or ``1000``. Raises ConfigError."""
    digits, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    if not digits.isdecimal() or not 1 <= int(digits) * unit <= _LARGEST:
        raise ConfigError(f"size {text!r} is not allowed: 1 to {_LARGEST} bytes, such as 64K or 4M")
    return int(digits) * unit


def measure(sizes: Sequence[int], repeats: int, options: NixlOptions) -> dict[str, object]:
    """One warm-up round and ``repeats`` timed ones over all sizes."""
    started = time.time()
    store = ObjectStore(max(sizes))
    try:
        reader = Reader.start(options)
        try:
            local = make_arenas(0x5A)
            use_huge_pages(local.blocks)
            rounds: dict[int, list[Round]] = {size: [] for size in sizes}
            for repeat in range(repeats + 1):
                for number, size in enumerate(sizes):
                    turn = repeat * len(sizes) + number
                    found = _round(reader, store, local.blocks, size, turn)
                    if repeat:
                        rounds[size].append(found)
        finally:
            reader.close()
    finally:
        store.close()
    return {
        "environment": _environment(options, repeats, started),
        "results": [_summary(size, found) for size, found in rounds.items()],
    }


def _round(reader: Reader, store: ObjectStore, local: Any, size: int, turn: int) -> Round:
    """Seconds of each way for one size."""
    seconds = {
        "nixl": reader.read(payload(size, 2 * turn)),
        "memcpy": memory_copy(local, reader.arenas.blocks, payload(size, 2 * turn + 1)),
        "ray_object_store": store.copy(size, turn),
    }
    layout = reader.arenas.layout
    number = max(1, size // layout.block_bytes)
    started = time.perf_counter()
    block_checksums(layout, local, range(number), number * layout.block_tokens)
    seconds["checksum"] = (time.perf_counter() - started) * size / (number * layout.block_bytes)
    seconds["fixed"] = statistics.median(reader.tiny_handoff() for _ in range(_TINY_HANDOFFS))
    return seconds


def _summary(size: int, rounds: Sequence[Round]) -> dict[str, object]:
    def over_nixl(name: str) -> float:
        return round(statistics.median(r[name] / r["nixl"] for r in rounds), 3)

    return {
        "bytes": size,
        **_figures(size, rounds, statistics.median),
        "nixl_over_memcpy": over_nixl("memcpy"),
        "nixl_over_ray_object_store": over_nixl("ray_object_store"),
        "best": _figures(size, rounds, min),
    }


def _figures(
    size: int, rounds: Sequence[Round], choose: Callable[[Iterable[float]], float]
) -> dict[str, float]:
    figures = {
        f"{name}_gb_per_s": round(size / choose(r[name] for r in rounds) / 1e9, 3)
        for name in ("nixl", "memcpy", "ray_object_store", "checksum")
    }
    return figures | {"fixed_cost_ms": round(choose(r["fixed"] for r in rounds) * 1e3, 4)}


def _environment(options: NixlOptions, repeats: int, started: float) -> dict[str, object]:
    versions = {name: importlib.metadata.version(name) for name in ("nixl", "ray", "torch")}
    return {
        "headrace": importlib.metadata.version("headrace"),
        **versions,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "num_cpus": os.cpu_count(),
        "load_average_1m": round(os.getloadavg()[0], 2),
        "ucx": {name: os.environ.get(name) for name in options.environment()},
        "repeats": repeats,
        "started": round(started, 3),
        "seconds": round(time.time() - started, 3),
    }


def _print(document: dict[str, Any]) -> None:
    table = Table(title="handoff transfer: medians, GB/s (10^9 bytes)")
    for heading in _HEADINGS.values():
        table.add_column(heading, justify="right")
    for row in document["results"]:
        table.add_row(*(str(row[name]) for name in _HEADINGS))
    Console().print(table)
