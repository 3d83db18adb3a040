"""The replay of traces through a prefix cache, on literal traces."""

import gzip
import json
from pathlib import Path

import pytest

from headrace.cluster.bench.cache import replay
from headrace.cluster.cli import main
from headrace.cluster.traces.trace import TraceRequest, load_trace, make_chats
from headrace.transfer.errors import ConfigError
from headrace.transfer.tiers.eviction import POLICIES


def request_of(*blocks: int, at_s: float = 0.0) -> TraceRequest:
    tokens = 128 * len(blocks) + 5
    return TraceRequest(at_s=at_s, input_tokens=tokens, output_tokens=1, blocks=blocks)


@pytest.mark.parametrize("policy", POLICIES)
def test_leading_blocks_that_are_held_are_hits(policy: str) -> None:
    requests = [request_of(1, 2, 3), request_of(1, 2, 4), request_of(9, 2), request_of(1, 2, 3)]
    assert replay(requests, 100, policy)[0] == 128 * (0 + 2 + 0 + 3)
    assert replay([request_of(1, 2)] * 3, 2, policy) == (4 * 128, pytest.approx(2 / 3))


def test_the_head_of_a_prompt_outlives_its_end() -> None:
    requests = [request_of(1, 2, 3, 4), request_of(8, 9), request_of(1, 2, 3, 4)]
    assert replay(requests, 4, "lru")[0] == 2 * 128


def test_mooncake_lines_become_blocks_of_128_tokens(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    lines = [
        {"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [0, 7]},
        {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [0]},
    ]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    first, second = load_trace(path)
    assert (first.at_s, first.blocks) == (0.0, (0, 1, 2, 3))
    assert (second.at_s, second.blocks, second.output_tokens) == (3.0, (0, 1, 2, 3, 28), 9)
    assert len(load_trace(path, 1)) == 1


def test_sessions_share_nothing_with_each_other(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    request = {"t": 1.5, "input_length": 300, "output_length": 4, "hash_runs": [[1, 3], [9, 2]]}
    session = {"session": "a", "block_size": 64, "requests": [request, request | {"t": 4}]}
    path.write_text("".join(json.dumps(session) + "\n" for _ in range(2)))
    requests = load_trace(path)
    assert len(requests) == 4
    assert {tuple(block & 0xFF for block in request.blocks) for request in requests} == {(2, 9)}
    assert len({request.blocks for request in requests}) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no request"),
        ("{]\n", "is not JSON"),
        ("[1]\n", "line 1 is not a JSON object"),
        ('{"timestamp": 1}\n', "line 1 is no request of a trace"),
        ('{"block_size": 64, "requests": [{}]}\n', "line 1 is no request of a trace"),
    ],
)
def test_a_file_that_is_no_trace_is_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_trace(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trace(tmp_path / "absent.jsonl")


def test_the_command_compares_all_policies(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cache", "--limit", "300", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["requests"] == 300
    assert document["bytes_per_token"] == 890.81
    best = document["infinite"]["hit_rate"]
    assert 0.1 < best < 1.0
    rates = [row["hit_rate"] for row in document["replays"]]
    assert len(rates) == 4 * len(POLICIES)
    assert 0 <= min(rates) < max(rates) <= best
    assert main(["bench", "cache", "--limit", "300"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "hit rate of an infinite cache" in shown


def test_made_up_chats_are_the_same_in_every_run() -> None:
    assert make_chats(5, 3) == make_chats(5, 3)
    assert len(make_chats(5, 3)) >= 5
