"""``headrace cache clear``: remove the stored blocks of a folder, and nothing else in it."""

import argparse
from pathlib import Path

from ...transfer.errors import ConfigError
from ...transfer.tiers.disk_folder import NUM_SHARDS, CacheFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.Command."""
    parser.add_argument("folder", metavar="DIR", help="the `disk` of a deployment's tiers")
    parser.add_argument("--json", action="store_true", help="print a JSON document")


def run(args: argparse.Namespace) -> dict[str, object]:
    """See cli.Command."""
    folder = CacheFolder.open(Path(args.folder))
    try:
        found = [file for shard in range(NUM_SHARDS) for file in folder.files(shard)]
        folder.clear()
    except OSError as error:
        raise ConfigError(
            f"folder {folder.path} cannot be cleared: {error}; run this as its owner"
        ) from error
    finally:
        folder.close()
    return {
        "folder": str(folder.path),
        "removed": len(found),
        "bytes": sum(file.num_bytes for file in found),
    }
