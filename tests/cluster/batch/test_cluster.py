"""A batch on real ranks: killed with its cluster, started again, one document on standard output, nothing left."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.cluster.config import CONFIGS

ROWS = [
    *(
        {"id": f"plain-{i}", "prompt": "import os\n" * (i + 1), "max_tokens": 2 + 8 * i}
        for i in range(4)
    ),
    {
        "custom_id": "chat",
        "url": "/v1/chat/completions",
        "body": {
            "messages": [{"role": "user", "content": "What does os.path.join do?"}],
            "max_tokens": 8,
            "logprobs": True,
            "top_logprobs": 2,
            "prompt_logprobs": 1,
            "n": 2,
            "min_p": 0.05,
            "frequency_penalty": 0.5,
            "logit_bias": {"30": -100},
            "stop": ["\n\n\n"],
        },
    },
    {"id": "long", "prompt": "import os\n" * 100_000},
]
LIMIT_S = 240.0


def start(folder: Path) -> "subprocess.Popen[str]":
    arguments = [
        "batch",
        "local",
        "--input",
        str(folder / "in.jsonl"),
        "--output",
        str(folder / "out.jsonl"),
    ]
    arguments += ["--set", f"model.checkpoint={folder / 'checkpoint'}", "--ordered", "--json"]
    return subprocess.Popen(
        [sys.executable, "-m", "headrace.cluster.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        | {"RAY_raylet_start_wait_time_s": "120"},  # a busy machine takes its time
        start_new_session=True,
    )


@pytest.mark.timeout(3 * LIMIT_S)
def test_a_killed_batch_goes_on_and_ends_with_every_line(tmp_path: Path):
    shutil.copytree(CONFIGS / "checkpoints/tiny-v41", tmp_path / "checkpoint")
    lines = [json.dumps(row) for row in ROWS]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, "not json"]) + "\n")
    output = tmp_path / "out.jsonl"
    first = start(tmp_path)
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until and first.poll() is None:
        if (
            output.exists() and output.read_bytes().count(b"\n") > 2
        ):  # the two bad lines and an answer
            break
        time.sleep(0.02)
    first.kill()
    _, errors = first.communicate(timeout=60)
    assert first.returncode == -9, errors
    before = output.read_bytes()

    second = start(tmp_path)
    out, errors = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, errors
    assert "Traceback" not in errors
    report = json.loads(out)
    assert (report["requests"], report["answered"], report["failed"]) == (7, 5, 2)
    assert report["failures_by_code"] == {"context_length_exceeded": 1, "invalid_json": 1}
    assert report["requests_of_earlier_runs"] >= 3
    records = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert [record["line"] for record in records] == list(range(1, 8))
    kept = {line for line in before.splitlines(keepends=True) if line.endswith(b"\n")}
    assert kept <= set(output.read_bytes().splitlines(keepends=True))
    body = records[4]["response"]["body"]
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    for choice in body["choices"]:
        logprobs = choice["logprobs"]["content"]
        assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in logprobs)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoint", "in.jsonl", "out.jsonl", "out.jsonl.journal"]
