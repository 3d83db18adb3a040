"""``headrace cache stat``: what a folder of stored blocks holds, as far as names, sizes and headers tell."""

import argparse
import time
from pathlib import Path

from ...transfer.tiers.audit import audit
from ...transfer.tiers.disk_folder import CacheFolder
from ...transfer.tiers.record import Kind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.Command."""
    parser.add_argument("folder", metavar="DIR", help="the `disk` of a deployment's tiers")
    parser.add_argument("--json", action="store_true", help="print a JSON document")


def run(args: argparse.Namespace) -> dict[str, object]:
    """See cli.Command."""
    folder = CacheFolder.open(Path(args.folder))
    try:
        found = list(audit(folder, payloads=False))
        with folder.locked():
            new_bytes = folder.new_bytes()
    finally:
        folder.close()
    kinds = [finding.file.name[0] for finding in found]
    ages = [time.time() - finding.file.used for finding in found]
    layout = folder.layout
    return {
        "folder": str(folder.path),
        "model": layout.model_fingerprint,
        "kv_format": layout.kv_format,
        "blocks": kinds.count(Kind.BLOCK),
        "tokens": kinds.count(Kind.BLOCK) * layout.block_tokens,
        "windows": kinds.count(Kind.WINDOWS),
        "bytes": sum(finding.file.num_bytes for finding in found),
        "unfinished_bytes": new_bytes,
        "last_used_s": round(min(ages), 1) if ages else None,
        "longest_unused_s": round(max(ages), 1) if ages else None,
        "broken": sum(finding.fault is not None for finding in found),
    }
