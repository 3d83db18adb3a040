"""The folder of a disk tier, as several processes share it.

    FOLDER/headrace-cache.json     whose blocks these are; written once; who uses the folder shares a lock on it
    FOLDER/lock                    held while files are added to the books or taken off them; its 8 bytes say how many
                                   bytes the files take
    FOLDER/new/...                 files being written, on the books at their full size
    FOLDER/records/ab/01ab...      one record a file, named by kind and key, in 256 folders by the key's first byte

A file comes into ``records`` complete, by renaming. A process killed at any moment leaves the lock free (the kernel
does that), at most one file in ``new`` (removed ten minutes later) and the books at worst too high until the next
``recount``. Nothing is synced to the medium: what a power failure takes of a record, its checksums tell.
Sizes are counted in file system blocks of 4096 bytes.
"""

import errno
import fcntl
import os
import re
import shutil
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from uuid import uuid4

import msgspec

from ..errors import ConfigError
from ..layout import CacheLayout
from .record import NAME_BYTES

HEADER_FILE = "headrace-cache.json"
FORMAT = "headrace cache"
VERSION = 1
NUM_SHARDS = 256
_NEW_FILES_S = 600.0
_PAGE_BYTES = 4096
_FILE_NAME = re.compile(rf"[0-9a-f]{{{2 * NAME_BYTES}}}")


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    layout: CacheLayout


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One record on disk; ``num_bytes`` in whole pages, ``used`` in seconds since 1970."""

    name: bytes
    num_bytes: int
    used: float


def rounded(num_bytes: int) -> int:
    """What a file of this size is counted as."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


class CacheFolder:
    """Names, lock and books of one folder. Methods that change the books need ``locked``; OSErrors come out as such."""

    def __init__(self, path: Path, layout: CacheLayout) -> None:
        self.path = path
        self.layout = layout
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._user = -1
        self._threads = threading.Lock()  # flock tells descriptors apart, not threads

    @classmethod
    def create(cls, path: Path, layout: CacheLayout) -> "CacheFolder":
        """Open the folder for records of this layout, making it when there is none.

        Raises ConfigError for a folder of another layout, or one that holds something else.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            foreign = {entry.name for entry in path.iterdir()} - {"lock", "new", "records"}
            if HEADER_FILE not in foreign and {n for n in foreign if not n.startswith(HEADER_FILE)}:
                raise ConfigError(
                    f"folder {path} holds other files ({min(foreign)}, ...) and no {HEADER_FILE}: "
                    "name a new or empty folder"
                )
            folder = cls(path, layout)
            with folder.locked():
                for inner in ("new", *(f"records/{shard:02x}" for shard in range(NUM_SHARDS))):
                    (path / inner).mkdir(parents=True, exist_ok=True)
                if not (path / HEADER_FILE).exists():
                    folder._publish_header()
                folder._use()
        except OSError as error:
            raise ConfigError(
                f"folder {path} cannot be used for a cache: {error.strerror}; name one that can be written"
            ) from error
        found = _read_header(path)
        if found != layout:
            folder.close()
            raise ConfigError(_difference(path, found, layout))
        return folder

    @classmethod
    def open(cls, path: Path) -> "CacheFolder":
        """Open a folder as it is. Raises ConfigError when it is none of ours."""
        layout = _read_header(path)
        try:
            return cls(path, layout)
        except OSError as error:
            raise ConfigError(
                f"folder {path} cannot be opened: {error.strerror}; run this as its owner"
            ) from error

    @contextmanager
    def locked(self) -> Generator[None]:
        """Alone among all processes (and threads that opened the folder themselves)."""
        with self._threads:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    @property
    def used_bytes(self) -> int:
        """What the books say."""
        return int.from_bytes(os.pread(self._lock, 8, 0), "little")

    def add_used(self, num_bytes: int) -> None:
        """Add to the books, or take off them."""
        self.set_used(self.used_bytes + num_bytes)

    def set_used(self, num_bytes: int) -> None:
        """Write the books anew."""
        os.pwrite(self._lock, max(0, num_bytes).to_bytes(8, "little"), 0)

    def file_of(self, name: bytes) -> str:
        """Where a record lies."""
        return f"{self.path}/records/{name[1]:02x}/{name.hex()}"

    def new_file(self, num_bytes: int) -> tuple[int, str]:
        """Descriptor and path of a file being written, on the books from now on."""
        path = f"{self.path}/new/{uuid4().hex}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, num_bytes)
        except OSError:
            os.close(descriptor)
            os.unlink(path)  # noqa: PTH108
            raise
        self.add_used(rounded(num_bytes))
        return descriptor, path

    def remove(self, path: str) -> bool:
        """Remove a file and take it off the books; False when it was gone already."""
        try:
            num_bytes = rounded(os.stat(path).st_size)  # noqa: PTH116 (a Path per file is slow)
            os.unlink(path)  # noqa: PTH108
        except FileNotFoundError:
            return False
        self.add_used(-num_bytes)
        return True

    def shard_changed(self, shard: int) -> float:
        """When a record last came into a shard or left it."""
        return os.stat(f"{self.path}/records/{shard:02x}").st_mtime  # noqa: PTH116

    def files(self, shard: int) -> Iterator[StoredFile]:
        """The records of a shard. Files that are not ours are passed over."""
        with os.scandir(f"{self.path}/records/{shard:02x}") as entries:
            for entry in entries:
                if _FILE_NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        found = entry.stat()
                        yield StoredFile(
                            bytes.fromhex(entry.name), rounded(found.st_size), found.st_mtime
                        )

    def new_bytes(self) -> int:
        """Bytes of files being written; those that nobody writes any more are removed."""
        total = 0
        with os.scandir(f"{self.path}/new") as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found = entry.stat()
                    if time.time() - found.st_mtime > _NEW_FILES_S:
                        os.unlink(entry.path)  # noqa: PTH108
                    else:
                        total += rounded(found.st_size)
        return total

    def clear(self) -> None:
        """Remove everything that is ours, the folder too when nothing else is left in it.

        Raises ConfigError while a process uses the folder.
        """
        with self.locked():
            self._require_unused()
            for inner in ("records", "new"):
                shutil.rmtree(self.path / inner, ignore_errors=True)
            (self.path / HEADER_FILE).unlink(missing_ok=True)
            (self.path / "lock").unlink(missing_ok=True)
        try:
            self.path.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.EACCES):
                raise

    def close(self) -> None:
        """Let go of the lock file. Idempotent."""
        descriptors, self._lock, self._user = (self._lock, self._user), -1, -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def _use(self) -> None:
        """Tell ``clear`` that somebody is here. The folder is locked."""
        self._user = os.open(self.path / HEADER_FILE, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._user, fcntl.LOCK_SH)
        if os.fstat(self._lock).st_nlink == 0:
            raise OSError(errno.EBUSY, "it was cleared at the same moment")

    def _require_unused(self) -> None:
        descriptor = os.open(self.path / HEADER_FILE, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"folder {self.path} is in use; stop the deployment that uses it first"
            ) from error
        finally:
            os.close(descriptor)

    def _publish_header(self) -> None:
        header = {"format": FORMAT, "version": VERSION, "layout": asdict(self.layout)}
        temporary = self.path / f"{HEADER_FILE}.{uuid4().hex}"
        with temporary.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(header)))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path / HEADER_FILE)


def _read_header(path: Path) -> CacheLayout:
    try:
        header = msgspec.json.decode((path / HEADER_FILE).read_bytes(), type=_Header)
    except FileNotFoundError as error:
        raise ConfigError(
            f"folder {path} is not a headrace cache: it has no {HEADER_FILE}"
        ) from error
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(
            f"{path / HEADER_FILE} cannot be read: {error}; remove the folder and start anew"
        ) from error
    if header.format != FORMAT or header.version != VERSION:
        raise ConfigError(
            f"folder {path} is of format {header.format!r} version {header.version}; this release reads "
            f"{FORMAT!r} version {VERSION}: name another folder"
        )
    return header.layout


def _difference(path: Path, theirs: CacheLayout, ours: CacheLayout) -> str:
    differing = "; ".join(
        f"{field.name}: there {getattr(theirs, field.name)!r}, here {getattr(ours, field.name)!r}"
        for field in fields(CacheLayout)
        if getattr(theirs, field.name) != getattr(ours, field.name)
    )
    return (
        f"folder {path} holds blocks of another layout ({differing}): name another folder, or empty this one "
        f"with `headrace cache clear {path}`"
    )
