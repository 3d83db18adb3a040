import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.tests.transfer.layouts import SMALL
from headrace.tests.transfer.tiers.stored import payload_of, read, record_of, until
from headrace.transfer.errors import ConfigError
from headrace.transfer.tiers.disk import DiskStore, FileReader, PlainReader
from headrace.transfer.tiers.disk_folder import HEADER_FILE, CacheFolder
from headrace.transfer.tiers.eviction import make_policy
from headrace.transfer.tiers.nixl_files import NixlReader
from headrace.transfer.tiers.record import Miss

PAGE = 4096
BIG = 1 << 30


def open_store(
    path: Path, capacity_bytes: int = BIG, reader: FileReader | None = None
) -> DiskStore:
    return DiskStore(
        path,
        layout=SMALL,
        capacity_bytes=capacity_bytes,
        policy=make_policy("lru"),
        reader=reader,
    )


def file_of(path: Path, number: int) -> Path:
    name = record_of(number).name
    return path / "records" / f"{name[1]:02x}" / name.hex()


def files_of(path: Path) -> list[Path]:
    return [
        file for file in path.rglob("*") if file.is_file() and file.parent.parent.name == "records"
    ]


@pytest.fixture(params=["plain", "nixl"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[DiskStore]:
    reader = NixlReader() if request.param == "nixl" else PlainReader()
    store = open_store(tmp_path / "cache", reader=reader)
    yield store
    store.close()


def test_what_goes_in_comes_out(store: DiskStore) -> None:
    assert read(store, []) == []
    assert all(store.write(record_of(n)) for n in range(40))
    expected = [payload_of(n) for n in range(40)]
    assert read(store, range(41)) == [*expected, Miss.ABSENT]
    assert store.usage().num_records == 40


def test_every_truncation_and_every_flipped_byte_is_a_miss(
    store: DiskStore, tmp_path: Path
) -> None:
    file = file_of(tmp_path / "cache", 1)
    store.write(record_of(1))
    good = file.read_bytes()
    wrong = [good[:length] for length in range(0, len(good), 3)]
    wrong += [good + b"\0", good + good]
    wrong += [good[:i] + bytes([good[i] ^ 0x10]) + good[i + 1 :] for i in range(0, len(good), 2)]
    for data in wrong:
        file.write_bytes(data)
        assert isinstance(read(store, [1])[0], Miss)
        assert file.exists() == (data[4] != good[4] if len(data) == len(good) else False)
    store.refresh()
    assert store.write(record_of(1))
    assert read(store, [1]) == [payload_of(1)]


def test_a_record_under_another_name_is_a_miss(store: DiskStore, tmp_path: Path) -> None:
    store.write(record_of(1))
    store.write(record_of(2))
    shutil.copy(file_of(tmp_path / "cache", 1), file_of(tmp_path / "cache", 2))
    assert read(store, [1, 2]) == [payload_of(1), Miss.OTHER_KEY]


def test_files_may_go_from_under_us(store: DiskStore, tmp_path: Path) -> None:
    for number in range(4):
        store.write(record_of(number))
    file_of(tmp_path / "cache", 1).unlink()
    assert read(store, range(4))[1] is Miss.ABSENT
    assert not store.contains(record_of(1).name)
    shutil.rmtree(tmp_path / "cache")
    assert read(store, [0]) == [Miss.ABSENT]
    assert not store.write(record_of(9))
    store.refresh()


def test_a_file_that_cannot_be_read_is_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write(record_of(1))
    file_of(tmp_path, 1).unlink()
    file_of(tmp_path, 1).mkdir()
    assert read(store, [1]) == [Miss.UNREADABLE]
    store.close()


def test_the_order_of_use_outlives_the_process(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(4):
        store.write(record_of(number))
        os.utime(file_of(tmp_path, number), (number, number))
    assert read(store, [0]) == [payload_of(0)]
    store.close()
    store = open_store(tmp_path, capacity_bytes=4 * PAGE)
    store.write(record_of(4))
    assert [file_of(tmp_path, n).exists() for n in range(5)] == [True, False, True, True, True]
    store.close()


def test_of_a_prompt_the_head_stays_longest(tmp_path: Path) -> None:
    store = open_store(tmp_path, capacity_bytes=4 * PAGE)
    for number in range(4):
        store.write(record_of(number))
    read(store, range(4))
    for number in (10, 11, 12):
        store.write(record_of(number))
    assert [store.contains(record_of(n).name) for n in range(4)] == [True, False, False, False]
    store.close()


def test_bytes_on_disk_are_bounded(tmp_path: Path) -> None:
    store = open_store(tmp_path, capacity_bytes=10 * PAGE)
    for number in range(50):
        assert store.write(record_of(number))
        assert len(files_of(tmp_path)) <= 10
    usage = store.usage()
    assert (usage.num_records, usage.num_bytes, usage.num_evicted) == (10, 10 * PAGE, 40)
    assert not store.write(record_of(99, num_bytes=11 * PAGE))
    store.close()


def test_another_layout_is_refused_with_both_values(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    other = replace(SMALL, window=5, model_fingerprint="other")
    with pytest.raises(
        ConfigError,
        match=r"model_fingerprint: there 'small', here 'other'; window: there 4, here 5",
    ):
        DiskStore(tmp_path, layout=other, capacity_bytes=BIG, policy=make_policy("lru"))


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"holds other files \(thesis.tex"):
        open_store(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("text", ["", "{", '{"format": "headrace cache", "version": 1}'])
def test_a_damaged_header_file_is_refused(tmp_path: Path, text: str) -> None:
    open_store(tmp_path).close()
    (tmp_path / HEADER_FILE).write_text(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        open_store(tmp_path)


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    header = tmp_path / HEADER_FILE
    text = header.read_text()
    assert '"version": 1' in text
    header.write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(
        ConfigError, match="version 2; this release reads 'headrace cache' version 1"
    ):
        open_store(tmp_path)


def test_a_store_learns_what_another_wrote_and_removed(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path)
    first.write(record_of(1))
    assert not second.contains(record_of(1).name)
    assert read(second, [1]) == [payload_of(1)]  # known or not, what is there is found
    second.refresh()
    assert second.contains(record_of(1).name)
    file_of(tmp_path, 1).unlink()
    second.refresh()
    assert not second.contains(record_of(1).name)
    first.close()
    second.close()


def test_files_that_nobody_finished_are_removed(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    old, fresh = tmp_path / "new" / "old", tmp_path / "new" / "fresh"
    for file in (old, fresh):
        file.write_bytes(bytes(PAGE))
    os.utime(old, (time.time() - 700, time.time() - 700))
    store = open_store(tmp_path, capacity_bytes=3 * PAGE)
    assert not old.exists() and fresh.exists()
    for number in range(5):
        store.write(record_of(number))
    assert len(files_of(tmp_path)) == 2  # the fresh one may still become a record
    store.close()


def test_a_full_disk_is_a_failed_write(tmp_path: Path) -> None:
    limit = f"""
import resource, signal, sys
from pathlib import Path
from headrace.tests.transfer.tiers.test_disk import open_store, files_of
from headrace.tests.transfer.tiers.stored import record_of, read, payload_of
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = open_store(Path({str(tmp_path)!r}))
assert store.write(record_of(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
assert not store.write(record_of(2))
assert read(store, [1]) == [payload_of(1)]
assert len(files_of(Path({str(tmp_path)!r}))) == 1
assert not list(Path({str(tmp_path)!r}, "new").iterdir())
"""
    subprocess.run([sys.executable, "-c", limit], check=True, timeout=60)


class Writers:
    """Processes that write to one store."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "disk_process.py"), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, first: int, step: int, count: int, capacity_bytes: int) -> int:
        return int(self._ask(f"start {first} {step} {count} {capacity_bytes}"))

    def wait(self) -> list[int]:
        return [int(status) for status in self._ask("wait").split()]

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


@pytest.fixture
def writers(tmp_path: Path) -> Generator[Writers]:
    found = Writers(tmp_path)
    yield found
    found.close()


def test_a_process_killed_at_any_moment_leaves_a_usable_store(
    tmp_path: Path, writers: Writers
) -> None:
    chance = random.Random(5)
    capacity = 64 * PAGE
    num_written = 0
    for turn in range(25):
        first = 10_000 * turn
        process = writers.start(first, 1, 10_000, capacity)
        until((tmp_path / "records" / "ff").exists)
        time.sleep(chance.random() * 0.1)
        os.kill(process, signal.SIGKILL)
        assert writers.wait() == [signal.SIGKILL]
        store = open_store(tmp_path, capacity)
        sizes = [-(-file.stat().st_size // PAGE) * PAGE for file in files_of(tmp_path)]
        assert sum(sizes) <= capacity
        for number, found in enumerate(read(store, range(first, first + 200)), first):
            assert found in (payload_of(number), Miss.ABSENT)
            num_written += found is not Miss.ABSENT
        assert store.write(record_of(first + 9_999))
        assert read(store, [first + 9_999]) == [payload_of(first + 9_999)]
        store.close()
    assert num_written > 50


def test_two_processes_that_write_and_evict_stay_within_bounds(
    tmp_path: Path, writers: Writers
) -> None:
    capacity = 40 * PAGE
    processes = [writers.start(first, 2, 400, capacity) for first in (0, 1)]
    until((tmp_path / HEADER_FILE).exists)
    folder = CacheFolder.open(tmp_path)
    most = 0
    while any(Path(f"/proc/{process}/exe").exists() for process in processes):
        with folder.locked():
            files = len(files_of(tmp_path)) + len(list((tmp_path / "new").iterdir()))
        most = max(most, files)
        time.sleep(0.002)
    folder.close()
    assert writers.wait() == [0, 0]
    store = open_store(tmp_path, capacity)
    found = read(store, range(800))
    good = [number for number, payload in enumerate(found) if payload == payload_of(number)]
    assert len(good) == len(files_of(tmp_path)) == store.usage().num_records
    assert 35 <= len(good) <= 40
    assert 35 <= most <= 40
    assert all(found[n] is Miss.ABSENT for n in set(range(800)) - set(good))
    store.close()


def test_two_processes_that_write_the_same_records_keep_one_of_each(
    tmp_path: Path, writers: Writers
) -> None:
    for _ in range(2):
        writers.start(0, 1, 150, BIG)
    assert writers.wait() == [0, 0]
    store = open_store(tmp_path)
    assert read(store, range(150)) == [payload_of(n) for n in range(150)]
    assert not list((tmp_path / "new").iterdir())
    folder = CacheFolder.open(tmp_path)
    assert folder.used_bytes == 150 * PAGE
    folder.close()
    store.close()


def test_threads_share_a_store(tmp_path: Path) -> None:
    store = open_store(tmp_path, 20 * PAGE)
    wrong: list[object] = []

    def work(first: int) -> None:
        for number in range(first, first + 100):
            store.write(record_of(number))
            for found, n in zip(read(store, [number, first]), [number, first], strict=True):
                if found not in (Miss.ABSENT, payload_of(n)):
                    wrong.append(found)

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(files_of(tmp_path)) == 20 == store.usage().num_records
    store.close()


def test_a_sound_record_of_another_length_is_a_miss_and_stays(
    store: DiskStore, tmp_path: Path
) -> None:
    store.write(record_of(1))
    assert read(store, [1], num_bytes=SMALL.block_bytes - 1) == [Miss.OTHER_SIZE]
    assert read(store, [1], num_bytes=SMALL.block_bytes + 1) == [Miss.OTHER_SIZE]
    assert read(store, [1]) == [payload_of(1)]
