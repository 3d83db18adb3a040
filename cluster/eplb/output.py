"""Where commands write."""

from pathlib import Path

from ...transfer.errors import ConfigError


def check_writable(path: Path, option: str) -> None:
    """Raises ConfigError before any work is done if ``path`` cannot become a file."""
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"lies in {path.parent}, which is no folder"
        raise ConfigError(f"{option} {path} {reason}: name a file in a folder that exists")
