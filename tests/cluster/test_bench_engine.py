"""``headrace bench engine``: one document with the promised keys; wrong sizes are refused by name."""

import json

import pytest

from headrace.cluster.bench.engine import Engine, code_prompts, make_requests
from headrace.cluster.cli import EXIT_USER, main
from headrace.cluster.config import load_cluster_config

FAST = ["--set", "decode.profile_s=0.05", "--threads", "1", "--repeats", "1"]


def test_the_document(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "engine", "local", "--batch", "3", "--prompt-tokens", "40"]
    assert main([*command, "--output-tokens", "12", "--json", *FAST]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["batch"] == 3
    for name in ("output_tokens_per_s", "prompt_tokens_per_s", "step_ms_p50", "planner_us_p50"):
        assert document[name] > 0
    assert 1.0 <= document["mean_accepted"] <= 6.0


def test_answers_are_full_and_prompts_differ() -> None:
    config = load_cluster_config("local", ["decode.profile_s=0"])
    prompts = code_prompts(config, 4, 30)
    assert len(set(prompts)) == 4 and {len(ids) for ids in prompts} == {30}
    with Engine(config, 4, 40).session() as session:
        found = session.run(make_requests(prompts, 10, temperature=1.0))
    assert [len(ids) for ids in found.ids] == [10] * 4
    assert found.stats["tokens"] == 40 and found.prefill_s > 0 and found.decode_s > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch 0 is not allowed"),
        (["--output-tokens", "-1"], "--output-tokens -1 is not allowed"),
        (["--prompt-tokens", "20000"], "do not fit into the context of 16384"),
    ],
)
def test_wrong_sizes(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "local", *arguments, *FAST]) == EXIT_USER
    assert message in capfd.readouterr().err
