import logging
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from dataclasses import replace
from itertools import count

import pytest
from moto.server import ThreadedMotoServer
from pyarrow import fs

from headrace.tests.transfer.layouts import SMALL
from headrace.tests.transfer.tiers.stored import payload_of, read, record_of
from headrace.transfer.errors import ConfigError
from headrace.transfer.layout import CacheLayout
from headrace.transfer.tiers.eviction import make_policy
from headrace.transfer.tiers.object_address import ObjectAddress
from headrace.transfer.tiers.objects import ObjectStore
from headrace.transfer.tiers.record import HEADER_BYTES, Miss

_numbers = count()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="module")
def server() -> Generator[str]:
    """Endpoint of an S3-compatible server on this host."""
    found = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    found.start()
    host, port = found.get_host_and_port()
    yield f"http://{host}:{port}"
    found.stop()


def client(endpoint: str) -> fs.S3FileSystem:
    return fs.S3FileSystem(
        scheme="http",
        endpoint_override=endpoint.removeprefix("http://"),
        region="us-east-1",
        allow_bucket_creation=True,
    )


@pytest.fixture
def url(server: str) -> str:
    """Address of an empty prefix in a bucket of its own."""
    bucket = f"bucket-{next(_numbers)}"
    client(server).create_dir(bucket)
    return f"s3://{bucket}/kv/cache?endpoint={server}"


def open_store(
    url: str, capacity_bytes: int = 1 << 30, layout: CacheLayout = SMALL, timeout_s: float = 1.0
) -> ObjectStore:
    return ObjectStore(
        ObjectAddress.parse(url),
        layout=layout,
        capacity_bytes=capacity_bytes,
        policy=make_policy("lru"),
        timeout_s=timeout_s,
    )


def path_of(url: str, number: int) -> str:
    name = record_of(number).name
    bucket = ObjectAddress.parse(url).bucket
    return f"{bucket}/kv/cache/{SMALL.fingerprint()[:16]}/{name[1]:02x}/{name.hex()}"


def test_what_goes_in_comes_out_and_another_process_finds_it(url: str) -> None:
    store = open_store(url)
    store.refresh()
    assert all(store.write(record_of(n)) for n in range(4))
    assert read(store, [3, 0, 9]) == [payload_of(3), payload_of(0), Miss.ABSENT]
    other = open_store(url)
    assert not other.contains(record_of(1).name)
    other.refresh()
    assert [other.contains(record_of(n).name) for n in range(5)] == [True] * 4 + [False]
    assert other.usage().num_bytes == 4 * record_of(0).num_bytes
    assert read(other, range(4)) == [payload_of(n) for n in range(4)]
    third = open_store(url, layout=replace(SMALL, window=5))
    third.refresh()
    assert third.usage().num_records == 0


def test_wrong_truncated_and_vanished_objects_are_misses(url: str, server: str) -> None:
    store, direct = open_store(url), client(server)
    for number in range(4):
        store.write(record_of(number))
    good = record_of(1).header + record_of(1).payload

    def replace_by(data: bytes, number: int) -> None:
        with direct.open_output_stream(path_of(url, number)) as file:
            file.write(data)

    wrong = [good[:-1], good[:HEADER_BYTES], good[:50], b"", good + b"x"]
    for data in [*wrong, good[:120] + b"?" + good[121:]]:
        replace_by(data, 1)
        assert isinstance(read(store, [1])[0], Miss)
        assert direct.get_file_info(path_of(url, 1)).type == fs.FileType.NotFound  # removed
        assert not store.contains(record_of(1).name)
    replace_by(good, 2)
    assert read(store, [2]) == [Miss.OTHER_KEY]
    direct.delete_file(path_of(url, 3))
    assert read(store, [0, 3]) == [payload_of(0), Miss.ABSENT]
    assert store.write(record_of(1)) and read(store, [1]) == [payload_of(1)]


def test_bytes_are_bounded(url: str, server: str) -> None:
    store = open_store(url, capacity_bytes=3 * record_of(0).num_bytes)
    for number in range(5):
        assert store.write(record_of(number))
    assert store.usage().num_records == 3 and store.usage().num_evicted == 2
    assert not store.write(record_of(9, num_bytes=1000))
    prefix = path_of(url, 0).rsplit("/", 2)[0]
    objects = client(server).get_file_info(fs.FileSelector(prefix, recursive=True))
    assert len([info for info in objects if info.type == fs.FileType.File]) == 3


def assert_of_no_use_and_said_once(
    store: ObjectStore, caplog: pytest.LogCaptureFixture, within_s: float, writes: bool = True
) -> None:
    started = time.monotonic()
    with caplog.at_level(logging.INFO):
        for number in range(5):
            assert not (writes and store.write(record_of(number)))
            assert read(store, [number])[0] in (Miss.UNREADABLE, Miss.ABSENT)
            assert not store.contains(record_of(number).name)
            store.refresh()
    assert time.monotonic() - started < within_s
    assert len([record for record in caplog.records if "does not work" in record.message]) == 1


def test_a_missing_bucket_is_said_once(server: str, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(f"s3://nobody-made-this/kv?endpoint={server}")
    assert_of_no_use_and_said_once(store, caplog, within_s=5)
    assert "nobody-made-this" in caplog.text


def test_a_dead_server_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    store = open_store(f"s3://bucket/kv?endpoint=http://127.0.0.1:{port}")
    assert_of_no_use_and_said_once(store, caplog, within_s=5)


def test_a_silent_server_costs_its_timeout_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        port = silent.getsockname()[1]
        store = open_store(f"s3://bucket/kv?endpoint=http://127.0.0.1:{port}", timeout_s=1.0)
        assert_of_no_use_and_said_once(store, caplog, within_s=4, writes=False)


def test_bad_credentials_are_said_once(
    url: str, server: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(url)
    assert store.write(record_of(0))

    def check_credentials(after: int) -> None:
        request = urllib.request.Request(
            f"{server}/moto-api/reset-auth",
            data=str(after).encode(),
            headers={"Content-Type": "text/plain"},
        )
        urllib.request.urlopen(request, timeout=5).read()

    check_credentials(0)
    try:
        assert_of_no_use_and_said_once(store, caplog, within_s=5)
        assert "ACCESS_DENIED" in caplog.text or "INVALID_ACCESS_KEY_ID" in caplog.text
    finally:
        check_credentials(10**9)


def test_a_server_that_comes_back_is_used_again(url: str, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    address = ObjectAddress.parse(url)
    dead = replace(address, endpoint="http://127.0.0.1:9")
    store = ObjectStore(
        dead,
        layout=SMALL,
        capacity_bytes=1 << 30,
        policy=make_policy("lru"),
        timeout_s=1.0,
        clock=lambda: now[0],
    )
    assert not store.write(record_of(0))
    alive = ObjectStore(
        address, layout=SMALL, capacity_bytes=1 << 30, policy=make_policy("lru"), timeout_s=1.0
    )
    store._filesystem, store._io = alive._filesystem, alive._io  # pyright: ignore[reportPrivateUsage]
    now[0] = 0.9
    assert not store.write(record_of(0))
    now[0] = 1.0
    with caplog.at_level(logging.INFO):
        assert store.write(record_of(0))
    assert "works again" in caplog.text
    assert store.contains(record_of(0).name)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://bucket/x", "s3://bucket/prefix"),
        ("s3:///x", "s3://bucket/prefix"),
        ("s3://bucket/x?endpont=http://h", "s3://bucket/prefix"),
        ("s3://bucket/x?endpoint=localhost:9000", "begins with http:// or https://"),
        ("s3://key:secret@bucket/x", "AWS_ACCESS_KEY_ID"),
    ],
)
def test_addresses_that_are_none_are_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ObjectAddress.parse(url)


NIXL = """
import sys
import {build}, {build}._api
sys.modules["nixl"], sys.modules["nixl._api"] = {build}, {build}._api
from headrace.tests.transfer.tiers.stored import payload_of, read, record_of
from headrace.tests.transfer.tiers.test_objects import open_store
from headrace.transfer.tiers.nixl_objects import NixlIo
from headrace.transfer.tiers.object_address import ObjectAddress
from headrace.transfer.tiers.record import Miss
url = sys.argv[1]
nixl, plain = open_store(url), open_store(url)
nixl._io = NixlIo(ObjectAddress.parse(url))
assert all(nixl.write(record_of(n)) for n in range(4))
assert all(plain.write(record_of(n)) for n in range(4, 8))
expected = [payload_of(n) for n in range(8)]
assert read(nixl, range(9)) == [*expected, Miss.ABSENT]
assert read(plain, range(8)) == expected
assert read(nixl, [1], num_bytes=len(expected[1]) + 1)[0] is Miss.OTHER_SIZE
assert read(nixl, [1], num_bytes=len(expected[1]) - 1)[0] is Miss.OTHER_SIZE
"""


def test_nixl_and_pyarrow_read_each_others_objects(url: str) -> None:
    """In a process of its own: of NIXL's builds, that for CUDA 12 has the plugin without a library from elsewhere."""
    script = NIXL.format(build="nixl_cu12")
    environment = os.environ | {"NIXL_LOG_LEVEL": "FATAL"}
    done = subprocess.run(
        [sys.executable, "-c", script, url],
        env=environment,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
