"""``headrace cache verify``: read every stored block of a folder; exit status 1 when one is broken."""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from ...transfer.errors import ConfigError
from ...transfer.tiers.audit import audit
from ...transfer.tiers.disk_folder import CacheFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.Command."""
    parser.add_argument("folder", metavar="DIR", help="the `disk` of a deployment's tiers")
    parser.add_argument("--remove", action="store_true", help="remove what is broken")
    parser.add_argument("--json", action="store_true", help="print a JSON document")


def run(args: argparse.Namespace) -> dict[str, object]:
    """See cli.Command. Broken records go to standard error, one a line, as they are found."""
    folder = CacheFolder.open(Path(args.folder))
    started = time.monotonic()
    faults: Counter[str] = Counter()
    num_records = num_bytes = num_removed = 0
    try:
        for finding in audit(folder, payloads=True):
            num_records += 1
            num_bytes += finding.file.num_bytes
            if finding.fault is None:
                continue
            faults[finding.fault.value] += 1
            sys.stderr.write(f"{finding.path}: {finding.fault.value}\n")
            if args.remove:
                with folder.locked():
                    num_removed += folder.remove(finding.path)
    except OSError as error:
        raise ConfigError(
            f"folder {folder.path} cannot be verified: {error}; run this as its owner"
        ) from error
    finally:
        folder.close()
    return {
        "folder": str(folder.path),
        "records": num_records,
        "bytes": num_bytes,
        "broken": faults.total(),
        "faults": dict(faults),
        "removed": num_removed,
        "seconds": round(time.monotonic() - started, 3),
        "exit_status": int(faults.total() > 0),
    }
