"""The output file, which is also the record of what is done: one line appended per outcome, never changed.

A killed driver loses nothing it has written (each line is one ``write`` to the kernel), except that the last line may
be torn; a host that loses power may have lost or torn the lines of the last second. ``recover`` therefore keeps every
line that is whole, ours and new, and cuts out everything else:

    | line 3 | line 1 | line 7 | lin      killed while writing     ->  the tail is cut off
    | line 3 | ?????? | line 7 | line 3 | damaged or doubled       ->  the file is rewritten without those pieces
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from ...transfer.errors import HeadraceError
from .records import Outcome, read_outcome

_COPY_BYTES = 1 << 20


class OutputFile:
    """An output open for appending."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._unsynced = False

    def append(self, line: bytes) -> None:
        """Writes one whole line, line end included. Raises HeadraceError when the disk refuses."""
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            raise HeadraceError(f"output {self.path} cannot be written: {error}") from error
        self._unsynced = True

    def sync(self) -> None:
        """Makes what was appended survive a loss of power."""
        if self._unsynced:
            self._unsynced = False
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Syncs and closes."""
        self.sync()
        os.close(self._descriptor)


def recover(path: Path, accept: Callable[[Outcome], bool]) -> int:
    """Reduces an output to its good lines; returns the number of bytes that were cut out.

    ``accept`` is called with each whole line in file order and says whether it is new. A missing file is an empty one.
    """
    if not path.exists():
        return 0
    pieces: list[
        tuple[int, int]
    ] = []  # good stretches (start, end); one unless the middle is damaged
    position = 0
    with path.open("rb") as file:
        for line in file:
            outcome = read_outcome(line) if line.endswith(b"\n") else None
            if outcome is not None and accept(outcome):
                if pieces and pieces[-1][1] == position:
                    pieces[-1] = (pieces[-1][0], position + len(line))
                else:
                    pieces.append((position, position + len(line)))
            position += len(line)
    kept = sum(end - start for start, end in pieces)
    if kept == position:
        return 0
    if not pieces or pieces == [(0, kept)]:
        os.truncate(path, kept)
    else:
        _rewrite(path, pieces)
    return position - kept


def sort_by_line(path: Path) -> None:
    """Puts an output into the order of the input, at once and in bounded memory: an index of 8 bytes a line on disk."""
    with tempfile.TemporaryFile(dir=path.parent) as index:
        position, last = 0, 0
        with path.open("rb") as file:
            for line in file:
                outcome = read_outcome(line)
                if outcome is None:
                    raise HeadraceError(
                        f"output {path} was changed by somebody else at byte {position}; cannot sort it"
                    )
                os.pwrite(index.fileno(), (position + 1).to_bytes(8), outcome.line * 8)
                position, last = position + len(line), max(last, outcome.line)
        with _Replacement(path) as target, path.open("rb") as file:
            index.seek(8)
            for _ in range(last):
                offset = int.from_bytes(index.read(8))
                if offset:
                    file.seek(offset - 1)
                    target.write(file.readline())


class _Replacement:
    """A new content for a file that takes its place only when it is whole and on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._new = path.with_name(path.name + ".new")
        self._file = self._new.open("wb")

    def __enter__(self) -> "_Replacement":
        return self

    def write(self, data: bytes) -> None:
        """Appends to the new content."""
        self._file.write(data)

    def __exit__(self, kind: object, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        if kind is None:
            self._new.replace(self._path)
        else:
            self._new.unlink()


def _rewrite(path: Path, pieces: list[tuple[int, int]]) -> None:
    with _Replacement(path) as target, path.open("rb") as file:
        for start, end in pieces:
            file.seek(start)
            while start < end:
                chunk = file.read(min(_COPY_BYTES, end - start))
                target.write(chunk)
                start += len(chunk)
