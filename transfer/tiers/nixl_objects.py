"""Objects through NIXL's plugin OBJ; see ``objects.ObjectIo``.

NIXL's plugin neither lists nor deletes, tells a missing object from a dead server only in words, and has no setting for
how long it tries (26 s against a server that refuses, 59 s against one that is silent). So ``ObjectStore`` lists and
deletes through pyarrow, asks it what a failure meant, and this is not the default.
"""

import threading
from itertools import count
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pyarrow import fs

from ..nixl_storage import NixlStorage
from .object_address import ObjectAddress
from .objects import connect
from .record import HEADER_BYTES, Record


class NixlIo:
    """One NIXL agent a thread. Raises ConfigError where this build of NIXL has no plugin OBJ."""

    def __init__(self, address: ObjectAddress, timeout_s: float = 2.0) -> None:
        self._options = {"bucket": address.bucket}
        if address.endpoint is not None:
            self._options |= {
                "endpoint_override": address.endpoint,
                "scheme": address.endpoint.partition(":")[0],
            }
        if address.region is not None or address.endpoint is not None:
            self._options["region"] = address.region or "us-east-1"
        self._bucket = address.bucket
        self._filesystem: Any = connect(address, timeout_s)
        self._local = threading.local()
        self._numbers = count(1)
        self._storage()

    def get(self, key: str, row: memoryview) -> tuple[bytes, int]:
        """See ObjectIo."""
        found = np.zeros(HEADER_BYTES + len(row), dtype=np.uint8)
        self._transfer("READ", key, found)
        np.frombuffer(row, dtype=np.uint8)[:] = found[HEADER_BYTES:]
        return found[:HEADER_BYTES].tobytes(), len(found)

    def put(self, key: str, record: Record) -> None:
        """See ObjectIo."""
        self._transfer("WRITE", key, np.frombuffer(record.header + record.payload, dtype=np.uint8))

    def _transfer(
        self, operation: Literal["READ", "WRITE"], key: str, memory: NDArray[np.uint8]
    ) -> None:
        number = next(self._numbers)
        region = np.array([[memory.ctypes.data, len(memory), 0]], dtype=np.uint64)
        good = self._storage().transfer(
            operation,
            region,
            [(0, len(memory), number, key)],
            poll_s=0.0005,
        )
        if good:
            return
        path = f"{self._bucket}/{key}"
        if (
            operation == "READ"
            and self._filesystem.get_file_info(path).type == fs.FileType.NotFound
        ):
            raise FileNotFoundError(path)
        raise OSError(f"NIXL could not {operation.lower()} {path}")

    def _storage(self) -> NixlStorage:
        storage: NixlStorage | None = getattr(self._local, "storage", None)
        if storage is None:
            storage = self._local.storage = NixlStorage("OBJ", self._options)
        return storage
