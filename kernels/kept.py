"""Folders for what one process keeps for the next: compiled kernels, measured costs."""

import os
import stat
import tempfile
from pathlib import Path


def _is_ours(folder: Path) -> bool:
    """Whether nobody else can put anything into ``folder``, such as code that would be run."""
    found = folder.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def kept_folder(name: str) -> Path | None:
    """A folder ``name`` that this user alone can write, made if need be: under ~/.cache/headrace or, where that cannot
    be written, under the machine's folder for temporary files. None if neither can."""
    shared = Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"
    for base in (Path("~/.cache/headrace").expanduser(), shared):
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = base / name
            folder.mkdir(mode=0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                if _is_ours(base) and _is_ours(folder):
                    return folder
        except (OSError, RuntimeError):
            continue
    return None
