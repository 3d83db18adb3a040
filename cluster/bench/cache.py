"""``headrace bench cache``: what a prefix cache is worth on a trace, by eviction policy and size, without a model."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.table import Table

from ...transfer.errors import ConfigError
from ...transfer.tiers.eviction import POLICIES, make_policy
from ...transfer.tiers.record import HEADER_BYTES
from ..traces.trace import BLOCK_TOKENS, TraceRequest, load_trace, make_chats
from .handoff import bench_layout

SHARES = (0.01, 0.05, 0.1, 0.25)
_DEEP_BLOCKS = 1000.0
"""Depth in blocks at which attention over the prefix doubles what a block costs to compute."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.Command."""
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.jsonl[.gz]",
        help="a Mooncake trace or agent sessions (default: made-up chats)",
    )
    parser.add_argument("--limit", type=int, help="only the first so many requests")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> dict[str, object] | None:
    """See cli.Command."""
    path, limit = cast("Path | None", args.trace), cast("int | None", args.limit)
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit} is not allowed: at least 1")
    requests = make_chats(400, 12)[:limit] if path is None else load_trace(path, limit)
    tokens = sum(request.input_tokens for request in requests)
    distinct = len({block for request in requests for block in request.blocks})
    rows: list[dict[str, object]] = []
    for share in SHARES:
        capacity = max(1, int(share * distinct))
        for policy in POLICIES:
            began = time.perf_counter()
            hit, saved = replay(requests, capacity, policy)
            rows.append(
                {
                    "policy": policy,
                    "share_of_blocks": share,
                    "capacity_blocks": capacity,
                    "hit_rate": round(hit / tokens, 4),
                    "cost_saved": round(saved, 4),
                    "seconds": round(time.perf_counter() - began, 2),
                }
            )
    hit, saved = replay(requests, distinct + 1, "lru")
    layout = bench_layout()
    document: dict[str, object] = {
        "trace": "chats" if path is None else path.name,
        "requests": len(requests),
        "input_tokens": tokens,
        "distinct_blocks": distinct,
        "infinite": {"hit_rate": round(hit / tokens, 4), "cost_saved": round(saved, 4)},
        "bytes_per_token": round((layout.block_bytes + HEADER_BYTES) / BLOCK_TOKENS, 2),
        "replays": rows,
    }
    if args.json:
        return document
    Console().print(_table(document, rows))
    return None


def replay(requests: Sequence[TraceRequest], capacity: int, policy_name: str) -> tuple[int, float]:
    """(tokens that were hits, part of the cost of computing everything that hits saved)."""
    policy, size = make_policy(policy_name), BLOCK_TOKENS
    held: set[bytes] = set()
    hit_tokens = 0
    saved = total = 0.0
    for request in requests:
        keys = [block.to_bytes(8, "little") for block in request.blocks]
        hits = next((n for n, key in enumerate(keys) if key not in held), len(keys))
        hit_tokens += hits * BLOCK_TOKENS
        costs = [1.0 + depth / _DEEP_BLOCKS for depth in range(len(keys))]
        saved += sum(costs[:hits])
        total += sum(costs)
        for depth in reversed(range(len(keys))):  # a prefix without its head is of no use
            key = keys[depth]
            if key in held:
                policy.touch(key)
                continue
            if len(held) == capacity:
                victim = policy.victim()
                assert victim is not None
                policy.remove(victim)
                held.discard(victim)
            policy.insert(key, costs[depth], size)
            held.add(key)
    return hit_tokens, saved / total if total else 0.0


def _table(document: dict[str, object], rows: Sequence[dict[str, object]]) -> Table:
    infinite = cast("dict[str, float]", document["infinite"])
    table = Table(
        "cache, part of all blocks",
        *POLICIES,
        title=f"{document['trace']}: {document['requests']} requests, hit rate of an infinite cache "
        f"{infinite['hit_rate']:.3f}, {document['bytes_per_token']} bytes a token",
    )
    for share in SHARES:
        found = [f"{row['hit_rate']:.3f}" for row in rows if row["share_of_blocks"] == share]
        table.add_row(f"{share:g}", *found)
    return table
