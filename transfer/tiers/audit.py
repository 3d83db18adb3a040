"""What is wrong in a folder of stored blocks: every record looked at by itself, without a deployment."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from .disk_folder import NUM_SHARDS, CacheFolder, StoredFile
from .record import HEADER_BYTES, Miss, find_fault, layout_digest, payload_bytes_of


@dataclass(frozen=True, slots=True)
class Finding:
    """One file, and why it is no record that anybody could use; None for a good one."""

    file: StoredFile
    path: str
    fault: Miss | None


def audit(folder: CacheFolder, *, payloads: bool) -> Iterator[Finding]:
    """Look at headers and sizes of all records, and with ``payloads`` at every byte. Others may use the folder."""
    digest = layout_digest(folder.layout)
    for shard in range(NUM_SHARDS):
        for file in folder.files(shard):
            path = folder.file_of(file.name)
            try:
                yield Finding(file, path, _fault(path, file.name, digest, payloads=payloads))
            except FileNotFoundError:
                continue  # evicted meanwhile


def _fault(path: str, name: bytes, digest: bytes, *, payloads: bool) -> Miss | None:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (a Path per file is slow)
            header = file.read(HEADER_BYTES)
            fault = find_fault(header, b"", name=name, layout_digest=digest)
            if fault not in (None, Miss.OTHER_SIZE):
                return fault
            expected = HEADER_BYTES + payload_bytes_of(header)
            found = os.fstat(file.fileno()).st_size
            if found != expected:
                return Miss.TRUNCATED if found < expected else Miss.DAMAGED_PAYLOAD
            if not payloads:
                return None
            return find_fault(header, file.read(), name=name, layout_digest=digest)
    except FileNotFoundError:
        raise
    except OSError:
        return Miss.UNREADABLE
