"""Records on a local disk, in a folder that several processes share; see ``disk_folder`` for how.

Each process knows the files from its own index, brought up to date by ``refresh``; an index that is behind costs hits,
never more. The newest use of a record is the time of its file, so the order of use outlives the process.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ..layout import CacheLayout
from .disk_folder import NUM_SHARDS, CacheFolder, StoredFile, rounded
from .record import HEADER_BYTES, Miss, Record, find_fault, layout_digest, payload_bytes_of
from .store import Headers, Policy, Usage

_log = logging.getLogger(__name__)
_TOUCH_S = 60.0
_LOG_S = 60.0
_SETTLED_S = 2.0
"""A shard that changed less than this before it was read may have changed again within the clock's grain."""


class FileReader(Protocol):
    """Reads files from their beginning into buffers; ``PlainReader`` or ``nixl_files.NixlReader``."""

    def read(
        self, descriptors: Sequence[int], headers: Sequence[bytearray], rows: Sequence[memoryview]
    ) -> Sequence[bool]:
        """Fill header, then row, of each file; False where the system reports an error. May stop early without one."""
        ...


class PlainReader:
    """preadv, after the kernel was told of all files: it reads ahead while we copy and verify."""

    def read(
        self, descriptors: Sequence[int], headers: Sequence[bytearray], rows: Sequence[memoryview]
    ) -> Sequence[bool]:
        """See FileReader."""
        for descriptor in descriptors:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        return [
            self._read(descriptor, [header, row])
            for descriptor, header, row in zip(descriptors, headers, rows, strict=True)
        ]

    def _read(self, descriptor: int, buffers: Sequence[bytearray | memoryview]) -> bool:
        try:
            os.preadv(descriptor, buffers, 0)
        except OSError as error:
            _log.warning("a stored block cannot be read: %s", error)
            return False
        return True


class DiskStore:
    """See Store. ``capacity_bytes`` counts what the files of all processes take; raises ConfigError."""

    def __init__(
        self,
        path: Path,
        *,
        layout: CacheLayout,
        capacity_bytes: int,
        policy: Policy,
        reader: FileReader | None = None,
    ) -> None:
        self._folder = CacheFolder.create(path, layout)
        self._layout_digest = layout_digest(layout)
        self._capacity_bytes = capacity_bytes
        self._policy = policy
        self._reader = reader or PlainReader()
        self._index: dict[bytes, int] = {}
        self._touched: dict[bytes, float] = {}
        self._shards: list[set[bytes]] = [set() for _ in range(NUM_SHARDS)]
        self._shard_read = [float("-inf")] * NUM_SHARDS
        self._lock = (
            threading.Lock()
        )  # of the index; taken inside the folder's lock, never around it
        self._num_bytes = 0
        self._num_evicted = 0
        self._next_log = 0.0
        self.refresh()

    def contains(self, name: bytes) -> bool:
        """See Store."""
        return name in self._index

    def hold(self, names: Sequence[bytes]) -> None:
        """See Store. A load opens all its files first, and an open file stays."""

    def release(self, names: Sequence[bytes]) -> None:
        """See Store."""

    def read(self, names: Sequence[bytes], rows: Sequence[memoryview]) -> Headers:
        """See Store."""
        found: Headers = [Miss.ABSENT] * len(names)
        opened: list[tuple[int, int]] = []  # place in names, descriptor
        try:
            for place, name in enumerate(names):
                descriptor = self._open(name, HEADER_BYTES + len(rows[place]))
                if isinstance(descriptor, Miss):
                    found[place] = descriptor
                else:
                    opened.append((place, descriptor))
            headers = [bytearray(HEADER_BYTES) for _ in opened]
            read = self._reader.read(
                [descriptor for _, descriptor in opened],
                headers,
                [rows[place] for place, _ in opened],
            )
            for (place, descriptor), header, good in reversed(
                list(zip(opened, headers, read, strict=True))
            ):
                found[place] = (
                    self._verify(descriptor, names[place], header, rows[place])
                    if good
                    else Miss.UNREADABLE
                )
        finally:
            for _, descriptor in opened:
                os.close(descriptor)
        return found

    def write(self, record: Record) -> bool:
        """See Store."""
        try:
            return self._write(record)
        except OSError as error:
            self._complain("stored blocks cannot be written to %s: %s", self._folder.path, error)
            return False

    def refresh(self) -> None:
        """Read the shards that changed, and write the books anew from what is there."""
        try:
            with self._folder.locked():
                self._refresh()
        except OSError as error:
            self._complain("folder %s cannot be read: %s", self._folder.path, error)

    def usage(self) -> Usage:
        """See Store."""
        with self._lock:
            return Usage(
                num_records=len(self._index),
                num_bytes=self._num_bytes,
                capacity_bytes=self._capacity_bytes,
                num_evicted=self._num_evicted,
            )

    def close(self) -> None:
        """Let go of the folder; the records stay."""
        self._folder.close()

    def _open(self, name: bytes, size: int) -> int | Miss:
        try:
            descriptor = os.open(self._folder.file_of(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._forget(name)
            return Miss.ABSENT
        except OSError as error:
            return self._unreadable(error)
        try:
            found = os.fstat(descriptor).st_size
            if found == size:
                return descriptor
            header = os.pread(descriptor, HEADER_BYTES, 0)
        except OSError as error:
            os.close(descriptor)
            return self._unreadable(error)
        os.close(descriptor)
        fault = find_fault(header, b"", name=name, layout_digest=self._layout_digest)
        if fault is Miss.OTHER_SIZE and HEADER_BYTES + payload_bytes_of(header) == found:
            return fault  # a sound one
        return self._broken(name, Miss.TRUNCATED if found < size else Miss.DAMAGED_PAYLOAD)

    def _verify(
        self, descriptor: int, name: bytes, header: bytearray, row: memoryview
    ) -> bytes | Miss:
        fault = find_fault(header, row, name=name, layout_digest=self._layout_digest)
        if fault is None:
            self._touch(name, descriptor)
            return bytes(header)
        return self._broken(name, fault) if fault.broken else fault

    def _broken(self, name: bytes, fault: Miss) -> Miss:
        _log.warning("%s: %s; removed", self._folder.file_of(name), fault)
        self._forget(name)
        try:
            with self._folder.locked():
                self._folder.remove(self._folder.file_of(name))
        except OSError as error:
            self._complain("a broken block of %s cannot be removed: %s", self._folder.path, error)
        return fault

    def _unreadable(self, error: OSError) -> Miss:
        self._complain("a block of %s cannot be read: %s", self._folder.path, error)
        return Miss.UNREADABLE

    def _touch(self, name: bytes, descriptor: int) -> None:
        now = time.time()
        with self._lock:
            if name in self._index:
                self._policy.touch(name)
            late = now - self._touched.get(name, 0.0) > _TOUCH_S
            if late:
                self._touched[name] = now
        if late:
            try:
                os.utime(descriptor, (now, now))
            except OSError as error:
                self._complain("files of %s cannot be touched: %s", self._folder.path, error)

    def _write(self, record: Record) -> bool:
        size = record.num_bytes
        path = self._folder.file_of(record.name)
        with self._folder.locked():
            if not self._make_room(rounded(size)):
                return False
            descriptor, temporary = self._folder.new_file(size)
        try:
            try:
                written = os.pwritev(descriptor, [record.header, record.payload], 0)
            finally:
                os.close(descriptor)
            if written != size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with self._folder.locked():
                if os.path.exists(path):  # noqa: PTH110 (another process was faster)
                    self._folder.remove(temporary)
                else:
                    os.rename(temporary, path)  # noqa: PTH104
        except OSError:
            with self._folder.locked():
                self._folder.remove(temporary)
            raise
        with self._lock:
            self._insert(record.name, rounded(size), record.cost)
        return True

    def _make_room(self, num_bytes: int) -> bool:
        """Evict until so many more bytes fit. The folder is locked."""
        if num_bytes > self._capacity_bytes:
            return False
        looked = False
        while self._folder.used_bytes + num_bytes > self._capacity_bytes:
            with self._lock:
                victim = self._policy.victim()
            if victim is not None:
                self._num_evicted += self._folder.remove(self._folder.file_of(victim))
                self._forget(victim)
            elif looked:
                return False
            else:  # the files are others', or the books are wrong
                self._refresh()
                looked = True
        return True

    def _refresh(self) -> None:
        """Bring the index up to date, in the order of use. The folder is locked."""
        found: list[StoredFile] = []
        for shard in range(NUM_SHARDS):
            if self._folder.shard_changed(shard) + _SETTLED_S < self._shard_read[shard]:
                continue
            self._shard_read[shard] = time.time()
            files = list(self._folder.files(shard))
            with self._lock:
                for name in self._shards[shard] - {file.name for file in files}:
                    self._drop(name)
            found += files
        found.sort(key=lambda file: file.used)
        with self._lock:
            for file in found:
                self._insert(file.name, file.num_bytes, 1.0)
        self._folder.set_used(self._num_bytes + self._folder.new_bytes())

    def _insert(self, name: bytes, num_bytes: int, cost: float) -> None:
        if name not in self._index:
            self._policy.insert(name, cost, num_bytes)
            self._shards[name[1]].add(name)
        self._num_bytes += num_bytes - self._index.get(name, 0)
        self._index[name] = num_bytes

    def _forget(self, name: bytes) -> None:
        with self._lock:
            self._drop(name)

    def _drop(self, name: bytes) -> None:
        num_bytes = self._index.pop(name, None)
        if num_bytes is not None:
            self._num_bytes -= num_bytes
            self._policy.remove(name)
            self._shards[name[1]].discard(name)
            self._touched.pop(name, None)

    def _complain(self, text: str, *values: object) -> None:
        """Once a minute: a disk that fails does so for every block."""
        if time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + _LOG_S
            _log.warning(text, *values)
