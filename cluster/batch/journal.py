"""Which job an output file belongs to. The output itself says which lines are done; see ``output.py``.

    OUT.journal    {"headrace_batch": 1, "job_id": ..., "identity": {...}}

It is written before the first request and locked while a driver runs, so that two never write one output; the kernel
drops the lock of a driver that was killed.
"""

import fcntl
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...transfer.errors import ConfigError

FORMAT_VERSION = 1
Identity = Mapping[str, bool | int | str | None]


class _Header(msgspec.Struct, frozen=True):
    headrace_batch: int
    job_id: str
    identity: dict[str, bool | int | str | None]


class Journal:
    """An open, locked journal. ``resumed`` tells whether an earlier run had begun this job."""

    def __init__(self, descriptor: int, path: Path, header: _Header, *, resumed: bool) -> None:
        self._descriptor = descriptor
        self.path = path
        self.job_id = header.job_id
        self.resumed = resumed

    @classmethod
    def open(cls, output: Path, identity: Identity) -> "Journal":
        """Opens or creates the journal of ``output``.

        Raises ConfigError when another driver holds it, when it was written for another ``identity``, or when the
        output holds lines that no journal speaks of.
        """
        path = journal_path(output)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"output {output} cannot be written: {error}") from error
        try:
            return cls._lock_and_read(descriptor, path, output, identity)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def _lock_and_read(
        cls, descriptor: int, path: Path, output: Path, identity: Identity
    ) -> "Journal":
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another driver is writing {output}; wait for it or choose another output"
            ) from None
        written = path.read_bytes()
        if b"\n" not in written:  # new, or its writer died before the first request
            if output.exists() and output.stat().st_size > 0:
                path.unlink()
                raise ConfigError(
                    f"output {output} exists and has no journal; remove it or choose another output"
                )
            header = _Header(FORMAT_VERSION, secrets.token_hex(8), dict(identity))
            os.ftruncate(descriptor, 0)
            _write(descriptor, msgspec.json.encode(header))
            _sync_directory(path.parent)
            return cls(descriptor, path, header, resumed=False)
        header = _read_header(written.partition(b"\n")[0], path)
        _require_same(header.identity, identity, output)
        return cls(descriptor, path, header, resumed=True)

    def close(self) -> None:
        """Gives the lock back."""
        os.close(self._descriptor)


def journal_path(output: Path) -> Path:
    """Where the journal of an output lies."""
    return output.with_name(output.name + ".journal")


def _write(descriptor: int, document: bytes) -> None:
    data = document + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_header(data: bytes, path: Path) -> _Header:
    try:
        header = msgspec.json.decode(data, type=_Header)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a journal of this program: {error}") from error
    if header.headrace_batch != FORMAT_VERSION:
        raise ConfigError(
            f"{path} has version {header.headrace_batch}, this program reads {FORMAT_VERSION}"
        )
    return header


def _require_same(written: Identity, now: Identity, output: Path) -> None:
    changed = [key for key in sorted({*written, *now}) if written.get(key) != now.get(key)]
    if changed:
        details = "; ".join(
            f"{key}: {written.get(key)} then, {now.get(key)} now" for key in changed
        )
        raise ConfigError(
            f"{output} was begun as another job ({details}); give the same input and configuration, "
            f"or begin anew with another --output (or remove {output} and {journal_path(output)})"
        )
