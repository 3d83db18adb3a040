"""Local paths and URIs: through pyarrow's own filesystems (file, s3, gs, abfs, hdfs), or fsspec's behind pyarrow."""

from pathlib import Path
from typing import Protocol, cast

import pyarrow
from fsspec.core import url_to_fs
from pyarrow import fs

from ...transfer.errors import ConfigError, HeadraceError

_COPY_BYTES = 4 << 20


class InputStream(Protocol):
    """A file being read from its beginning."""

    def __enter__(self) -> "InputStream":
        """The stream itself."""
        ...

    def __exit__(self, *_: object) -> None:
        """Closes the stream."""

    def read(self, nbytes: int, /) -> bytes:
        """Up to ``nbytes`` bytes; none at the end."""
        ...


class OutputStream(Protocol):
    """A file being written."""

    def __enter__(self) -> "OutputStream":
        """The stream itself."""
        ...

    def __exit__(self, *_: object) -> None:
        """Closes the stream."""

    def write(self, data: bytes, /) -> int:
        """Appends."""
        ...


class FileInfo(Protocol):
    """What a filesystem says about a path."""

    type: object
    size: int | None
    mtime_ns: int | None


class FileSystem(Protocol):
    """The part of ``pyarrow.fs.FileSystem`` that a batch uses."""

    def get_file_info(self, path: str, /) -> FileInfo:
        """Type, size and time of change."""
        ...

    def open_input_stream(self, path: str, /, *, compression: str | None) -> InputStream:
        """Opens for reading; ``detect`` unpacks by the name's ending."""
        ...

    def open_input_file(self, path: str, /) -> object:
        """Opens for reading at any place."""
        ...

    def open_output_stream(self, path: str, /) -> OutputStream:
        """Opens for writing; an object store shows the object when it is closed."""
        ...


def resolve(uri: str) -> tuple[FileSystem, str]:
    """The filesystem and the path in it; anything without a scheme is a local path. Raises ConfigError."""
    if "://" not in uri:
        return cast("FileSystem", fs.LocalFileSystem()), str(Path(uri).expanduser().absolute())
    try:
        return cast("tuple[FileSystem, str]", fs.FileSystem.from_uri(uri))
    except (ValueError, OSError, pyarrow.ArrowException) as unknown:
        try:
            filesystem, path = url_to_fs(uri)
        except (ValueError, OSError, ImportError) as error:
            raise ConfigError(
                f"{uri} is no address that pyarrow or fsspec can read: {unknown}; {error}"
            ) from error
        return cast("FileSystem", fs.PyFileSystem(fs.FSSpecHandler(filesystem))), path


def is_local(filesystem: FileSystem) -> bool:
    """True for this machine's own files."""
    return isinstance(filesystem, fs.LocalFileSystem)


def describe(uri: str) -> tuple[FileSystem, str, FileInfo]:
    """Where a URI leads, and what lies there. Raises ConfigError when the filesystem cannot be asked."""
    filesystem, path = resolve(uri)
    try:
        return filesystem, path, filesystem.get_file_info(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{uri} cannot be reached: {error}") from error


def exists(info: FileInfo) -> bool:
    """True when something lies at the path."""
    return info.type != fs.FileType.NotFound


def is_directory(info: FileInfo) -> bool:
    """True for a directory."""
    return info.type == fs.FileType.Directory


def upload(source: Path, uri: str) -> None:
    """Copies a local file to a URI. Raises HeadraceError; an object store then keeps what it had."""
    filesystem, path = resolve(uri)
    try:
        with (
            source.open("rb") as file,
            filesystem.open_output_stream(path) as stream,
        ):
            while chunk := file.read(_COPY_BYTES):
                stream.write(chunk)
    except (OSError, pyarrow.ArrowException) as error:
        raise HeadraceError(
            f"the finished output {source} cannot be copied to {uri}: {error}"
        ) from error
