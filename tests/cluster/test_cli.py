"""The command line from outside: statuses, one line of error, one document on standard output."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace import __version__
from headrace.cluster import cli
from headrace.cluster.batch.journal import Journal
from headrace.cluster.config import CONFIGS


def headrace(*arguments: str, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "headrace.cluster.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_help_is_fast_and_imports_nothing_heavy():
    code = (
        "import sys\nfrom headrace.cluster import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'ray', 'numpy', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    for command in cli.COMMANDS:
        assert command.split()[0] in done.stdout


def test_version():
    assert headrace("--version").stdout.split() == ["headrace", __version__]
    assert json.loads(headrace("version", "--json").stdout) == {"version": __version__}


def test_config_prints_what_loads_again(tmp_path: Path):
    shown = headrace("config", "local", "--set", "decode.num_slots=9")
    assert shown.returncode == 0
    (tmp_path / "again.yaml").write_text(shown.stdout)
    document = json.loads(headrace("config", str(tmp_path / "again.yaml"), "--json").stdout)
    assert document["decode"]["num_slots"] == 9


@pytest.mark.parametrize(
    "command", [[], ["fly"], ["bench"], ["batch"], ["batch", "local", "--input", "x"]]
)
def test_a_wrong_command_line_is_status_2(command: list[str]):
    done = headrace(*command)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def _batch(
    tmp_path: Path, *more: str, config: str = "local", source: bytes | None = None
) -> list[str]:
    if source is not None:
        (tmp_path / "in.jsonl").write_bytes(source)
    return [
        "batch",
        config,
        "--input",
        str(tmp_path / "in.jsonl"),
        "--output",
        str(tmp_path / "out.jsonl"),
        *more,
    ]


@pytest.mark.parametrize(
    ("more", "source", "said"),
    [
        ((), b"", "holds no line"),
        ((), None, "does not exist"),
        (("--set", "decode.num_slotz=9"), b"{}\n", "decode.num_slotz"),
        (("--set", "decode.num_slots=many"), b"{}\n", "decode.num_slots"),
        (("--set", "model.checkpoint=/no/such/place"), b"{}\n", "/no/such/place"),
        (("--concurrency", "0"), b"{}\n", "--concurrency = 0"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_starts_nothing(
    tmp_path: Path, more: tuple[str, ...], source: bytes | None, said: str
):
    begun = time.monotonic()
    done = headrace(*_batch(tmp_path, *more, "--json", source=source))
    assert time.monotonic() - begun < 30
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_an_unknown_config_file_names_the_packaged_ones(tmp_path: Path):
    done = headrace(*_batch(tmp_path, config="nowhere", source=b"{}\n"))
    assert done.returncode == 2
    assert "local" in done.stderr


def test_debug_shows_where():
    assert "Traceback" in headrace("config", "nowhere", "--debug").stderr


def test_a_second_driver_of_one_output_is_refused(tmp_path: Path):
    journal = Journal.open(tmp_path / "out.jsonl", {})
    done = headrace(*_batch(tmp_path, source=b"{}\n"))
    journal.close()
    assert "another driver" in done.stderr
    assert done.returncode == 2


def test_a_truncated_checkpoint_is_named_before_anything_starts(tmp_path: Path):
    shutil.copytree(CONFIGS / "checkpoints/tiny-v41", tmp_path / "cut")
    (shard,) = (tmp_path / "cut").glob("*.safetensors")
    os.truncate(shard, shard.stat().st_size // 2)
    done = headrace(
        *_batch(tmp_path, "--set", f"model.checkpoint={tmp_path / 'cut'}", source=b"{}\n")
    )
    assert done.returncode == 2
    assert shard.name in done.stderr
    assert done.stderr.startswith("error: ")
    assert not (tmp_path / "out.jsonl").exists()


FAKE = """
import sys, types, time, signal, os
from headrace.cluster import cli
from headrace.transfer.errors import *
module = types.ModuleType("headrace.cluster.fake")
def add_arguments(parser):
    parser.add_argument("--json", action="store_true")
    parser.add_argument("words", nargs="*")
def run(args):
    print("chatter")
    os.write(1, b"more chatter\\n")
    os.system("echo chatter of a child")
    {body}
module.add_arguments, module.run = add_arguments, run
sys.modules[module.__name__] = module
cli.COMMANDS["fake"] = ("a fake", ".fake")
sys.exit(cli.main(["fake", *sys.argv[1:]]))
"""


def fake(body: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", FAKE.format(body=body), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_with_json_only_the_document_reaches_standard_output():
    driver = fake("return {'latency_s': 1.5, 'exit_status': 3}", "--json")
    out, err = driver.communicate(timeout=30)
    assert out == '{"latency_s": 1.5}\n'
    assert driver.returncode == 3
    assert err.count("chatter") == 3


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("raise ConfigError('mend this')", 2, "error: mend this"),
        ("raise PromptTooLongError('too long')", 2, "error: too long"),
        ("raise RankError('it died')", 1, "error: it died"),
        ("raise KeyError('oops')", 1, "error: KeyError: 'oops'"),
        ("return 0", 0, ""),
        ("return None", 0, ""),
    ],
)
def test_statuses(body: str, status: int, said: str):
    driver = fake(body, "--json")
    out, err = driver.communicate(timeout=30)
    assert driver.returncode == status
    assert out == ""
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_cleans_up(tmp_path: Path, number: signal.Signals, status: int):
    body = (
        "open(sys.argv[-1], 'w').close()\n"
        "    try:\n        time.sleep(30)\n"
        "    finally:\n        os.remove(sys.argv[-1])"
    )
    marker = tmp_path / "running"
    driver = fake(body, "--json", str(marker))
    while not marker.exists():
        assert driver.poll() is None
        time.sleep(0.01)
    driver.send_signal(number)
    out, err = driver.communicate(timeout=30)
    assert driver.returncode == status
    assert out == ""
    assert "Traceback" not in err
    assert not marker.exists()
