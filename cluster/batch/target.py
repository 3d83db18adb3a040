"""Where the output of a batch goes."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ...transfer.errors import ConfigError
from .journal import journal_path
from .storage import describe, exists, is_directory, is_local


@dataclass(frozen=True, slots=True)
class Target:
    """Where the output goes: ``path`` is written line by line, and copied to ``uri`` at the end if that is remote."""

    path: Path
    uri: str | None

    @classmethod
    def of(cls, output: str, work_dir: Path) -> "Target":
        """The target for ``--output``; a remote one is built in ``work_dir``. Raises ConfigError if it is taken."""
        filesystem, path, info = describe(output)
        if is_directory(info):
            raise ConfigError(f"output {output} is a directory; name a file")
        if is_local(filesystem):
            return cls(Path(path), None)
        name = hashlib.blake2b(output.encode(), digest_size=8).hexdigest() + ".jsonl"
        local = work_dir.absolute() / name
        if exists(info) and not journal_path(local).exists():
            raise ConfigError(f"output {output} exists already; remove it or choose another output")
        return cls(local, output)
