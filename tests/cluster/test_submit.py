"""What is sent to a cluster, without one."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from headrace.cluster.batch.lines import BatchRequest, parse_line
from headrace.cluster.batch.source import RawLine, Source
from headrace.cluster.config import CONFIGS, load_cluster_config
from headrace.cluster.shipping import stage_package
from headrace.cluster.submit import parse_command, stage_job
from headrace.transfer.errors import ConfigError

DEMO = CONFIGS / "demo/prompts.jsonl"


def test_a_mistake_in_the_command_shows_before_anything_is_sent():
    with pytest.raises(ConfigError, match="after --"):
        parse_command([])
    with pytest.raises(ConfigError, match="after --"):
        parse_command(["--", "fly"])
    with pytest.raises(ConfigError, match=r"output out\.jsonl"):
        parse_command(["--", "batch", "local", "--input", "in.jsonl", "--output", "out.jsonl"])
    with pytest.raises(SystemExit):
        parse_command(["--", "batch", "local", "--wings", "2"])


def test_a_job_takes_its_configuration_and_input_along(tmp_path: Path):
    (tmp_path / "requests.jsonl").write_text("{}\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more/notes.txt").write_text("x")
    words = [
        "--",
        "batch",
        "local",
        "--set",
        "decode.num_slots=9",
        "--ordered",
        "--concurrency",
        "3",
    ]
    words += ["--input", str(tmp_path / "requests.jsonl"), "--output", "/shared/out.jsonl"]
    asked = parse_command(words)
    config = load_cluster_config(asked.config, asked.overrides)
    command, work = stage_job(asked, config, tmp_path / "stage", tmp_path / "more")
    assert sorted(path.name for path in work.iterdir()) == [
        "config.yaml",
        "notes.txt",
        "requests.jsonl",
    ]
    sent = load_cluster_config(work / "config.yaml")
    assert sent == config
    assert sent.decode.num_slots == 9
    assert shlex.split(command)[3:] == [
        *("batch", "config.yaml", "--input", "requests.jsonl", "--output", "/shared/out.jsonl"),
        *("--ordered", "--concurrency", "3"),
    ]


def test_a_checkpoint_beside_the_file_comes_along(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text("{}")
    document = yaml.safe_load((CONFIGS / "local.yaml").read_text())
    document["model"]["checkpoint"] = "mine"
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "in.jsonl").write_text("{}\n")
    words = [
        "batch",
        str(tmp_path / "my.yaml"),
        "--input",
        str(tmp_path / "in.jsonl"),
        "--output",
        "s3://b/out",
    ]
    asked = parse_command(words)
    _, work = stage_job(asked, load_cluster_config(asked.config), tmp_path / "stage", None)
    assert (work / "checkpoint/config.json").read_text() == "{}"
    assert load_cluster_config(work / "config.yaml").model.checkpoint == str(work / "checkpoint")


def test_inputs_that_cannot_come_along(tmp_path: Path):
    words = ["batch", "local", "--input", str(tmp_path / "nothing"), "--output", "/out.jsonl"]
    asked = parse_command(words)
    with pytest.raises(ConfigError, match="is not a file here"):
        stage_job(asked, load_cluster_config("local"), tmp_path / "stage", None)
    asked.input = "s3://bucket/in.jsonl"
    command, _ = stage_job(asked, load_cluster_config("local"), tmp_path / "stage2", None)
    assert "--input s3://bucket/in.jsonl" in command


def test_the_package_that_is_sent_is_whole(tmp_path: Path):
    package = stage_package(tmp_path)
    assert package.name == "headrace"
    assert (package / "cluster/batch/command.py").is_file()
    assert (package / "configs/local.yaml").is_file()
    assert not (package / "tests").exists()


def test_every_line_of_the_demonstration_is_a_good_one():
    lines = [line for line in Source(str(DEMO)).lines() if isinstance(line, RawLine)]
    parsed = [parse_line(line.number, line.data) for line in lines]
    assert all(isinstance(line, BatchRequest) for line in parsed)
    assert len({line.custom_id for line in parsed}) == len(parsed) >= 64
    urls = {json.loads(line.data).get("url") for line in lines}
    assert urls == {"/v1/chat/completions", "/v1/completions", None}
