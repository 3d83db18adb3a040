"""A cluster of two raylets started by hand: prefill is pinned to one and decode to the other by custom resources."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.tests.cluster.ray_support import (
    alive,
    answers_of_one_process,
    descendants,
    request_of,
    wait_until,
)

RAY = str(Path(sys.executable).with_name("ray"))
START_S = 120
DRIVER = Path(__file__).with_name("two_raylets_driver.py")


@dataclass(frozen=True)
class HandStarted:
    """A Ray cluster with token authentication: its address, and the environment that knows the token."""

    address: str
    env: dict[str, str]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ray_start(env: dict[str, str], log: Path, *options: str) -> subprocess.Popen[bytes]:
    """A started node. Ray gives up after 30 s of its own, which a busy host may need, so there is a second try."""
    command = [RAY, "start", "--block", "--num-cpus=2", *options]
    command += ["--object-store-memory=80000000", "--disable-usage-stats"]
    for _ in range(2):
        with log.open("wb") as output:
            node = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        wait_until(lambda node=node: is_up(log) or node.poll() is not None, START_S)
        if is_up(log):
            return node
        stop(node)
    raise AssertionError(log.read_text())


def is_up(log: Path) -> bool:
    return "Ray runtime started" in log.read_text()


def stop(node: subprocess.Popen[bytes]) -> None:
    """End a node and everything that it started."""
    started = descendants(node.pid)
    node.send_signal(signal.SIGTERM)
    node.wait(60)
    if not wait_until(lambda: not alive(started), 10):
        for pid in alive(started):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def hand_started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandStarted]:
    logs = tmp_path_factory.mktemp("raylets")
    sessions = tempfile.mkdtemp(prefix="hr")  # sockets live here: their paths must be short
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    port = free_port()
    address = f"127.0.0.1:{port}"
    head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={sessions}"]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        nodes.append(ray_start(env, logs / "head", *head, '--resources={"prefill": 1}'))
        nodes.append(
            ray_start(env, logs / "worker", f"--address={address}", '--resources={"decode": 2}')
        )
        yield HandStarted(address=address, env=env)
    finally:
        for node in reversed(nodes):
            stop(node)
        shutil.rmtree(sessions, ignore_errors=True)


def drive(cluster: HandStarted, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DRIVER), cluster.address]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=240, check=False
    )


def test_each_pool_runs_on_its_own_node_and_leaves_it_as_it_was(hand_started: HandStarted) -> None:
    ran = drive(hand_started, hand_started.env)
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert document["where"] == {
        "decode-0.0": ["decode"],
        "decode-0.1": ["decode"],
        "prefill-0.0": ["prefill"],
    }
    expected = answers_of_one_process(request_of(f"r{n}", n) for n in (5, 33, 60))
    assert [tuple(ids) for ids in document["answers"]] == expected


def test_a_wrong_token_is_a_clear_error(hand_started: HandStarted) -> None:
    ran = drive(hand_started, {**hand_started.env, "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    assert ran.returncode != 0
    last = ran.stderr.strip().splitlines()[-1]
    assert f"ConfigError: no Ray cluster can be joined at '{hand_started.address}'" in ran.stderr, (
        last
    )
