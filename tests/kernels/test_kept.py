"""Folders that outlive a process belong to one user."""

import tempfile
from pathlib import Path

import pytest

from headrace.kernels.kept import kept_folder


def test_a_folder_is_made_once_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = kept_folder("costs")
    assert folder == tmp_path / ".cache" / "headrace" / "costs"
    assert folder.stat().st_mode & 0o077 == 0
    assert kept_folder("costs") == folder


def test_what_others_can_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    open_to_all = tmp_path / "home" / ".cache" / "headrace"
    open_to_all.mkdir(parents=True)
    open_to_all.chmod(0o777)
    folder = kept_folder("costs")
    assert folder is not None
    assert folder.parent.parent == tmp_path
    folder.parent.chmod(0o777)
    assert kept_folder("costs") is None


def test_no_place_to_write_means_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("HOME", str(blocked))
    monkeypatch.setattr(tempfile, "tempdir", str(blocked))
    assert kept_folder("costs") is None
