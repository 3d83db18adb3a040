"""Records in an object store that speaks S3; credentials come from the environment, as the AWS SDK finds them.

    s3://bucket/prefix?endpoint=http://127.0.0.1:9000&region=us-east-1
    prefix/<first 16 digits of the layout's fingerprint>/ab/01ab...       one object a record

Which objects there are is known from listing them (``refresh``) and from what this process wrote. When the store
fails, it is left alone for 1, 2, 4 ... 60 seconds, in which everything is a miss; the log says so once, and again
when it works. Several processes bound the bytes together only as well as they know of each other: what they write
between two refreshes may come on top.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import pyarrow
from pyarrow import fs

from ..layout import CacheLayout
from .object_address import ObjectAddress
from .record import HEADER_BYTES, NAME_BYTES, Miss, Record, find_fault, layout_digest
from .store import Headers, Policy, Usage

_log = logging.getLogger(__name__)
_FIRST_WAIT_S, _LAST_WAIT_S = 1.0, 60.0
_FAILURES = (OSError, pyarrow.ArrowException)


def connect(address: ObjectAddress, timeout_s: float) -> Any:
    """A client that tries once and gives up after ``timeout_s`` of silence (when writing, some 6 s later)."""
    options: dict[str, Any] = {}
    if address.endpoint is not None:
        found = urlsplit(address.endpoint)
        options |= {"scheme": found.scheme, "endpoint_override": found.netloc}
    if address.region is not None or address.endpoint is not None:
        options["region"] = address.region or "us-east-1"
    return fs.S3FileSystem(
        connect_timeout=timeout_s,
        request_timeout=timeout_s,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
        allow_delayed_open=True,
        background_writes=False,
        **options,
    )


class ObjectIo(Protocol):
    """How objects come and go: ``ArrowIo`` or ``nixl_objects.NixlIo``. Raises OSError; FileNotFoundError for none."""

    def get(self, key: str, row: memoryview) -> tuple[bytes, int]:
        """Fill ``row`` from behind the header; the header, and the size of the object."""
        ...

    def put(self, key: str, record: Record) -> None:
        """Write an object, as a whole or not at all."""
        ...


class ArrowIo:
    """Objects through pyarrow."""

    def __init__(self, filesystem: Any, bucket: str) -> None:
        self._filesystem = filesystem
        self._bucket = bucket

    def get(self, key: str, row: memoryview) -> tuple[bytes, int]:
        """See ObjectIo."""
        with self._filesystem.open_input_file(f"{self._bucket}/{key}") as file:
            header: bytes = file.read(HEADER_BYTES)
            file.readinto(row)
            return header, file.size()

    def put(self, key: str, record: Record) -> None:
        """See ObjectIo."""
        with self._filesystem.open_output_stream(f"{self._bucket}/{key}") as file:
            file.write(record.header)
            file.write(record.payload)


class ObjectStore:
    """See Store. Nothing is asked of the server before the first ``refresh``, so a dead one delays no start."""

    def __init__(
        self,
        address: ObjectAddress,
        *,
        layout: CacheLayout,
        capacity_bytes: int,
        policy: Policy,
        timeout_s: float = 2.0,
        io: ObjectIo | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._filesystem: Any = connect(address, timeout_s)
        self._io = io or ArrowIo(self._filesystem, address.bucket)
        self._layout_digest = layout_digest(layout)
        self._root = "/".join(filter(None, (address.prefix, layout.fingerprint()[:16])))
        self._capacity_bytes = capacity_bytes
        self._policy = policy
        self._clock = clock
        self._index: dict[bytes, int] = {}
        self._num_bytes = 0
        self._num_evicted = 0
        self._wait_s = 0.0
        self._next_try = float("-inf")
        self._lock = threading.Lock()

    def contains(self, name: bytes) -> bool:
        """See Store. Nothing is there while the store is left alone."""
        return name in self._index and self._clock() >= self._next_try

    def hold(self, names: Sequence[bytes]) -> None:
        """See Store. Eviction elsewhere could not be held off either."""

    def release(self, names: Sequence[bytes]) -> None:
        """See Store."""

    def read(self, names: Sequence[bytes], rows: Sequence[memoryview]) -> Headers:
        """See Store."""
        found = [
            self._read(name, row) for name, row in zip(reversed(names), reversed(rows), strict=True)
        ]
        return found[::-1]

    def write(self, record: Record) -> bool:
        """See Store."""
        if self._clock() < self._next_try or record.num_bytes > self._capacity_bytes:
            return False
        try:
            for victim in self._victims(record.num_bytes):
                self._remove(victim)
            self._io.put(self._key(record.name), record)
        except _FAILURES as error:
            self._fail(error)
            return False
        self._succeed()
        with self._lock:
            self._insert(record.name, record.num_bytes, record.cost)
        return True

    def refresh(self) -> None:
        """List the objects."""
        if self._clock() < self._next_try:
            return
        selector = fs.FileSelector(
            f"{self._address.bucket}/{self._root}", recursive=True, allow_not_found=True
        )
        with self._lock:
            before = set(self._index)
        try:
            # an empty answer also comes for a bucket that is not there
            bucket = self._filesystem.get_file_info(self._address.bucket)
            if bucket.type == fs.FileType.NotFound:
                raise FileNotFoundError(f"there is no bucket {self._address.bucket}")
            listed = {
                name: info.size
                for info in self._filesystem.get_file_info(selector)
                if info.size is not None and (name := _name_of(info.base_name)) is not None
            }
        except _FAILURES as error:
            self._fail(error)
            return
        self._succeed()
        with self._lock:
            for name in before - listed.keys():
                self._drop(name)
            for name, size in listed.items():
                self._insert(name, size, 1.0)

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
        """The objects stay."""

    def _read(self, name: bytes, row: memoryview) -> bytes | Miss:
        if self._clock() < self._next_try:
            return Miss.UNREADABLE
        try:
            header, size = self._io.get(self._key(name), row)
        except FileNotFoundError:
            with self._lock:
                self._drop(name)
            return Miss.ABSENT
        except _FAILURES as error:
            self._fail(error)
            return Miss.UNREADABLE
        self._succeed()
        fault = find_fault(header, row, name=name, layout_digest=self._layout_digest)
        if size < HEADER_BYTES + len(row) and fault is not Miss.OTHER_SIZE:
            fault = Miss.TRUNCATED
        elif size > HEADER_BYTES + len(row) and fault is None:
            fault = Miss.DAMAGED_PAYLOAD
        if fault is None:
            with self._lock:
                if name in self._index:
                    self._policy.touch(name)
            return header
        if fault.broken:
            _log.warning("object %s: %s; removed", self._key(name), fault)
            try:
                self._remove(name)
            except _FAILURES as error:
                self._fail(error)
        return fault

    def _key(self, name: bytes) -> str:
        return f"{self._root}/{name[1]:02x}/{name.hex()}"

    def _victims(self, num_bytes: int) -> list[bytes]:
        victims: list[bytes] = []
        with self._lock:
            while self._num_bytes + num_bytes > self._capacity_bytes:
                victim = self._policy.victim()
                if victim is None:
                    break
                self._drop(victim)
                victims.append(victim)
            self._num_evicted += len(victims)
        return victims

    def _remove(self, name: bytes) -> None:
        with self._lock:
            self._drop(name)
        try:
            self._filesystem.delete_file(f"{self._address.bucket}/{self._key(name)}")
        except FileNotFoundError:
            return

    def _insert(self, name: bytes, num_bytes: int, cost: float) -> None:
        if name not in self._index:
            self._policy.insert(name, cost, num_bytes)
        self._num_bytes += num_bytes - self._index.get(name, 0)
        self._index[name] = num_bytes

    def _drop(self, name: bytes) -> None:
        num_bytes = self._index.pop(name, None)
        if num_bytes is not None:
            self._num_bytes -= num_bytes
            self._policy.remove(name)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            first = not self._wait_s
            self._wait_s = min(max(2 * self._wait_s, _FIRST_WAIT_S), _LAST_WAIT_S)
            self._next_try = self._clock() + self._wait_s
        if first:
            _log.warning(
                "object store s3://%s/%s does not work, its blocks are misses until it does: %s",
                self._address.bucket,
                self._address.prefix,
                error,
            )

    def _succeed(self) -> None:
        if not self._wait_s:
            return
        with self._lock:
            self._wait_s = 0.0
        _log.info("object store s3://%s works again", self._address.bucket)


def _name_of(base_name: str) -> bytes | None:
    try:
        name = bytes.fromhex(base_name)
    except ValueError:
        return None
    return name if len(name) == NAME_BYTES else None
