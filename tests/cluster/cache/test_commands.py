import json
from dataclasses import asdict
from pathlib import Path

import pytest

from headrace.cluster.cli import main
from headrace.tests.transfer.layouts import SMALL
from headrace.tests.transfer.tiers.stored import read, record_of
from headrace.transfer.tiers.disk import DiskStore
from headrace.transfer.tiers.eviction import make_policy
from headrace.transfer.tiers.record import Kind, Miss


def open_store(path: Path) -> DiskStore:
    return DiskStore(path, layout=SMALL, capacity_bytes=1 << 30, policy=make_policy("lru"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of 5 blocks and the windows of one turn."""
    path = tmp_path / "cache"
    store = open_store(path)
    for number in range(5):
        store.write(record_of(number))
    store.write(record_of(4, kind=Kind.WINDOWS, num_bytes=5000))
    store.close()
    return path


def file_of(folder: Path, number: int) -> Path:
    name = record_of(number).name
    return folder / "records" / f"{name[1]:02x}" / name.hex()


def document(
    capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0
) -> dict[str, object]:
    assert main([*arguments, "--json"]) == status
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def damage(folder: Path) -> None:
    data = bytearray(file_of(folder, 1).read_bytes())
    data[-1] ^= 1
    file_of(folder, 1).write_bytes(bytes(data))
    file_of(folder, 2).write_bytes(file_of(folder, 3).read_bytes())
    file_of(folder, 3).write_bytes(b"")


def test_stat(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = document(capfd, "cache", "stat", str(folder))
    assert (found["blocks"], found["windows"], found["tokens"]) == (5, 1, 5 * SMALL.block_tokens)
    assert found["bytes"] == 5 * 4096 + 8192
    assert found["broken"] == 0 and found["model"] == "small"
    assert isinstance(found["longest_unused_s"], float) and 0 <= found["longest_unused_s"] < 60
    damage(folder)
    assert (
        document(capfd, "cache", "stat", str(folder))["broken"] == 2
    )  # a flipped payload bit shows in verify
    assert main(["cache", "stat", str(folder)]) == 0
    assert "blocks: 5\n" in capfd.readouterr().out


def test_verify_lists_and_removes_what_is_broken(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert document(capfd, "cache", "verify", str(folder))["broken"] == 0
    damage(folder)
    assert main(["cache", "verify", str(folder)]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == sorted(
        [
            f"{file_of(folder, 1)}: damaged payload",
            f"{file_of(folder, 2)}: other key",
            f"{file_of(folder, 3)}: truncated",
        ]
    )
    found = document(capfd, "cache", "verify", str(folder), "--remove", status=1)
    assert (found["records"], found["broken"], found["removed"]) == (6, 3, 3)
    assert found["faults"] == {"damaged payload": 1, "other key": 1, "truncated": 1}
    found = document(capfd, "cache", "verify", str(folder))
    assert (found["records"], found["broken"]) == (3, 0)
    store = open_store(folder)
    assert [isinstance(data, Miss) for data in read(store, range(5))] == [
        False,
        True,
        True,
        True,
        False,
    ]
    store.close()


def test_clear_removes_what_is_ours_and_nothing_else(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "notes.txt").write_text("mine")
    found = document(capfd, "cache", "clear", str(folder))
    assert (found["removed"], found["bytes"]) == (6, 5 * 4096 + 8192)
    assert [entry.name for entry in folder.iterdir()] == ["notes.txt"]


def test_clear_removes_a_folder_that_is_all_ours(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    document(capfd, "cache", "clear", str(folder))
    assert not folder.exists()


def test_clear_refuses_a_folder_in_use(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = open_store(folder)
    assert main(["cache", "clear", str(folder)]) == 2
    assert "is in use" in capfd.readouterr().err
    assert not isinstance(read(store, [0])[0], Miss)
    store.close()
    assert main(["cache", "clear", str(folder)]) == 0


@pytest.mark.parametrize("command", ["stat", "verify", "clear"])
def test_a_folder_that_is_none_of_ours_is_refused(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "song.flac").write_text("mine")
    assert main(["cache", command, str(tmp_path)]) == 2
    assert "is not a headrace cache" in capfd.readouterr().err
    assert main(["cache", command, str(tmp_path / "nowhere")]) == 2
    assert (tmp_path / "records" / "song.flac").exists()


def test_the_header_file_names_the_layout(folder: Path) -> None:
    header = json.loads((folder / "headrace-cache.json").read_text())
    assert header["layout"] == json.loads(json.dumps(asdict(SMALL)))
