"""kill -9 of the driver, again and again: at the end every line is there exactly once."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

from headrace.cluster.batch.journal import journal_path

DRIVER = Path(__file__).with_name("driver.py")
NUM_LINES = 1500
NUM_KILLS = 5
DEADLINE_S = 120.0


def start(source: Path, output: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, str(DRIVER), str(source), str(output)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def wait_for_growth(driver: "subprocess.Popen[bytes]", output: Path, size: int) -> None:
    """Until the driver has written ``size`` bytes more than there were, so that every kill hits it at work."""
    until = time.monotonic() + DEADLINE_S
    begun = output.stat().st_size if output.exists() else 0
    while driver.poll() is None and time.monotonic() < until:
        if output.exists() and output.stat().st_size > begun + size:
            return
        time.sleep(0.001)


def test_every_line_exactly_once_whenever_the_driver_is_killed(tmp_path: Path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"id": i, "prompt": f"prompt {i}" * (i % 7 + 1), "max_tokens": i % 40 + 1}
        for i in range(NUM_LINES)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rng = random.Random(20260)
    killed, sizes = 0, [0]
    while True:
        driver = start(source, output)
        if killed < NUM_KILLS:
            wait_for_growth(driver, output, rng.randrange(1, 40_000))
            if driver.poll() is None:
                driver.kill()
                killed += 1
        _, errors = driver.communicate(timeout=DEADLINE_S)
        if driver.returncode == 0:
            break
        assert driver.returncode == -9, errors.decode()
        sizes.append(output.stat().st_size)
    assert killed == NUM_KILLS
    assert sizes == sorted(set(sizes)), "every run went on where the last one ended"
    records = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert [record["line"] for record in records] == list(range(1, NUM_LINES + 1))
    assert [record["custom_id"] for record in records] == [str(i) for i in range(NUM_LINES)]
    for row, record in zip(rows, records, strict=True):
        assert (
            record["response"]["body"]["choices"][0]["text"] == row["prompt"][-row["max_tokens"] :]
        )
    assert sorted(tmp_path.iterdir()) == sorted([source, output, journal_path(output)])
