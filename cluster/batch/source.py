"""The input of a batch: where it lies, what it is, and its lines one after another in bounded memory."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pyarrow
from pyarrow import parquet

from ...transfer.errors import ConfigError
from .storage import InputStream, describe, exists, is_directory, is_local

MAX_LINE_BYTES = 32 << 20
_READ_BYTES = 1 << 20
_PARQUET_ROWS = 64
_PARQUET_MAGIC = b"PAR1"
_BOM = b"\xef\xbb\xbf"
_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")


@dataclass(frozen=True, slots=True)
class RawLine:
    """One non-blank line of a JSONL input, without its line end."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line above ``MAX_LINE_BYTES``, skipped without being held in memory, or a row that is no Python value."""

    number: int
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a Parquet input."""

    number: int
    value: object


InputLine = RawLine | Row | Unreadable


class Source:
    """An input that exists and holds at least one line.

    ``num_lines`` is None where counting would cost a second download or decompression. ``identity`` tells one input
    from another by what it holds, so that a moved file is still the same: size and digest for a local file, size and
    time of change for an object store. Raises ConfigError for an input that cannot be read or is empty.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._filesystem, self._path, info = describe(uri)
        if not exists(info):
            raise ConfigError(f"input {uri} does not exist")
        if is_directory(info):
            raise ConfigError(f"input {uri} is a directory; name one JSONL or Parquet file")
        self.size_bytes = int(info.size or 0)
        self._is_parquet = self._has_parquet_magic()
        self.num_lines: int | None = None
        self.identity: dict[str, int | str] = {"size_bytes": self.size_bytes}
        if is_local(self._filesystem):
            digest, newlines = _digest(Path(self._path))
            self.identity["digest"] = digest
            if not self._is_parquet and not self._path.endswith(_COMPRESSED):
                self.num_lines = newlines
        else:
            self.identity["changed_ns"] = int(info.mtime_ns or 0)
        if self._is_parquet:
            self.num_lines = self._open_parquet().metadata.num_rows
        if next(self.lines(), None) is None:
            raise ConfigError(f"input {uri} holds no line to answer; nothing was started")

    def lines(self) -> Iterator[InputLine]:
        """Every non-blank line in order. Raises ConfigError when the file turns out to be damaged."""
        try:
            yield from self._rows() if self._is_parquet else self._raw_lines()
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(f"input {self.uri} cannot be read: {error}") from error

    def _has_parquet_magic(self) -> bool:
        try:
            with self._filesystem.open_input_stream(self._path, compression=None) as stream:
                return stream.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
        except OSError as error:
            raise ConfigError(f"input {self.uri} cannot be read: {error}") from error

    def _open_parquet(self) -> parquet.ParquetFile:
        try:
            return parquet.ParquetFile(self._filesystem.open_input_file(self._path))
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(
                f"input {self.uri} begins like Parquet but cannot be read: {error}"
            ) from error

    def _rows(self) -> Iterator[InputLine]:
        number = 0
        with self._open_parquet() as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for index in range(batch.num_rows):
                    number += 1
                    try:
                        (value,) = batch.slice(index, 1).to_pylist()
                    except (
                        ValueError
                    ) as error:  # text that is not UTF-8, an instant outside Python's range
                        yield Unreadable(number, "invalid_row", f"the row cannot be read: {error}")
                    else:
                        yield Row(number, _without_nulls(value))

    def _raw_lines(self) -> Iterator[InputLine]:
        with self._filesystem.open_input_stream(self._path, compression="detect") as stream:
            yield from split_lines(_chunks(stream))


def _chunks(stream: InputStream) -> Iterator[bytes]:
    while chunk := stream.read(_READ_BYTES):
        yield chunk


def split_lines(chunks: Iterator[bytes], max_bytes: int = MAX_LINE_BYTES) -> Iterator[InputLine]:
    """Cuts a byte stream at its line feeds. A line above ``max_bytes`` is skipped as it comes; blank ones too."""
    number, pending, pending_bytes = 1, list[bytes](), 0
    for chunk in chunks:
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            piece = chunk[start:end]
            yield from _finish_line(number, pending, pending_bytes, piece, max_bytes)
            number, pending, pending_bytes, start = number + 1, [], 0, end + 1
        rest = chunk[start:]
        pending_bytes += len(rest)
        pending = [*pending, rest] if pending_bytes <= max_bytes else []
    yield from _finish_line(number, pending, pending_bytes, b"", max_bytes)


def _finish_line(
    number: int, pending: list[bytes], pending_bytes: int, piece: bytes, limit: int
) -> Iterator[InputLine]:
    if pending_bytes + len(piece) > limit:
        size = pending_bytes + len(piece)
        yield Unreadable(number, "line_too_long", f"{size} bytes, and a line may have {limit}")
        return
    line = b"".join([*pending, piece])
    if number == 1:
        line = line.removeprefix(_BOM)
    line = line.strip(b" \t\r")
    if line:
        yield RawLine(number, line)


def _digest(path: Path) -> tuple[str, int]:
    """Digest of the content, and the number of lines (a last one without line feed counts)."""
    state, newlines, last = hashlib.blake2b(digest_size=16), 0, b"\n"
    try:
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                state.update(chunk)
                newlines += chunk.count(b"\n")
                last = chunk[-1:]
    except OSError as error:
        raise ConfigError(f"input {path} cannot be read: {error}") from error
    return state.hexdigest(), newlines + (last != b"\n")


def _without_nulls(value: object) -> object:
    """A Parquet struct holds every field any row has; the ones that are null here are absent."""
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return {key: _without_nulls(item) for key, item in items if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast("list[object]", value)]
    return value
