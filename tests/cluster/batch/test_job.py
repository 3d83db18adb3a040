"""Whole jobs against a fake cluster: answers, resumption, order, failures, pressure."""

import asyncio
import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from headrace.cluster.batch.command import drive
from headrace.cluster.batch.fakes import ByteCodec, EchoGenerator
from headrace.cluster.batch.job import BatchJob
from headrace.cluster.batch.runner import BatchStoppedError, Runner, RunnerConfig
from headrace.cluster.batch.source import Source
from headrace.cluster.batch.target import Target
from headrace.transfer.errors import (
    ConfigError,
    InvalidRequestError,
    PromptTooLongError,
    RankError,
)
from headrace.transfer.request import Request

CODEC = ByteCodec()


def plain(number: int, **fields: Any) -> bytes:
    line = {"id": f"id-{number}", "prompt": f"prompt {number}", "max_tokens": 4} | fields
    return json.dumps(line).encode() + b"\n"


def run(
    folder: Path,
    generator: EchoGenerator,
    *,
    ordered: bool = False,
    context_tokens: int = 1000,
    output: str | None = None,
    **config: Any,
) -> dict[str, Any]:
    settings = {"concurrency": 4, "model": "fake"} | config
    target = Target.of(output or str(folder / "out.jsonl"), folder / "work")
    with BatchJob(Source(str(folder / "in.jsonl")), target, {"model": "fake"}) as job:

        def answer() -> Runner:
            runner = job.runner(RunnerConfig(**settings), generator, CODEC)
            asyncio.run(job.answer(runner, CODEC, context_tokens))
            return runner

        return drive(job, answer, ordered=ordered)


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_bytes().splitlines()]


def lines(folder: Path) -> list[int]:
    return [record["line"] for record in read(folder)]


def test_answers_in_the_batch_format(tmp_path: Path):
    chat = {
        "custom_id": "chat",
        "url": "/v1/chat/completions",
        "body": {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 3,
            "logprobs": True,
            "top_logprobs": 2,
        },
    }
    (tmp_path / "in.jsonl").write_bytes(plain(1, logprobs=1) + json.dumps(chat).encode())
    report = run(tmp_path, EchoGenerator(), ordered=True)
    first, second = read(tmp_path)
    assert set(first) == {"id", "custom_id", "response", "error", "line", "timing"}
    assert (first["custom_id"], first["error"], first["line"]) == ("id-1", None, 1)
    response = first["response"]
    assert response["status_code"] == 200
    body = response["body"]
    assert (body["object"], body["model"]) == ("text_completion", "fake")
    assert body["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 4,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("pt 1", "length")
    assert choice["logprobs"]["tokens"] == ["p", "t", " ", "1"]
    assert choice["logprobs"]["token_logprobs"] == [-1.0] * 4
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    body = second["response"]["body"]
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hi\n"}
    entry = choice["logprobs"]["content"][0]
    assert (entry["token"], entry["logprob"], entry["bytes"], len(entry["top_logprobs"])) == (
        "h",
        -1.0,
        [104],
        2,
    )
    assert (report["requests"], report["answered"], report["failed"]) == (2, 2, 0)
    assert (report["prompt_tokens"], report["output_tokens"]) == (8 + 9, 4 + 3)
    assert report["ttft_p50_s"] > 0


def test_bad_lines_are_error_lines_and_the_rest_goes_on(tmp_path: Path):
    (tmp_path / "in.jsonl").write_bytes(
        plain(1)
        + b"\xff\n"
        + b"not json\n"
        + plain(1)
        + plain(5, prompt="x" * 2000)
        + plain(6, prompt=[300])
        + plain(7, max_tokens=5000)
        + plain(8)
    )
    report = run(tmp_path, EchoGenerator())
    errors = {record["line"]: record["error"] for record in read(tmp_path) if record["error"]}
    assert {line: error["code"] for line, error in errors.items()} == {
        2: "invalid_json",
        3: "invalid_json",
        4: "duplicate_custom_id",
        5: "context_length_exceeded",
        6: "invalid_request",
        7: "context_length_exceeded",
    }
    assert "line 2: not UTF-8" in errors[2]["message"]
    assert "2000 tokens" in errors[5]["message"]
    assert "1000 tokens" in errors[5]["message"]
    assert "token id 300" in errors[6]["message"]
    assert sorted(lines(tmp_path)) == list(range(1, 9))
    assert (report["answered"], report["failed"]) == (2, 6)


def test_a_line_without_max_tokens_gets_the_default_and_never_more_than_the_context(tmp_path: Path):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    chat = {"custom_id": "chat", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_bytes(plain(1, max_tokens=None) + json.dumps(chat).encode())
    generator = EchoGenerator()
    run(tmp_path, generator)
    asked = {len(request.prompt_ids): request.sampling.max_tokens for request in generator.requests}
    assert asked == {8: 16, 9: 1000 - 9}


def test_a_finished_job_asks_nothing_again(tmp_path: Path):
    (tmp_path / "in.jsonl").write_bytes(plain(1) + b"\n" + plain(3))
    run(tmp_path, EchoGenerator())
    before = (tmp_path / "out.jsonl").read_bytes()
    generator = EchoGenerator()
    report = run(tmp_path, generator)
    assert generator.requests == []
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert (report["requests"], report["requests_of_earlier_runs"]) == (2, 2)
    assert report["prompt_tokens"] == 16


def test_a_changed_input_or_model_is_refused(tmp_path: Path):
    (tmp_path / "in.jsonl").write_bytes(plain(1))
    run(tmp_path, EchoGenerator())
    (tmp_path / "in.jsonl").write_bytes(plain(2))
    with pytest.raises(ConfigError, match="input_digest"):
        run(tmp_path, EchoGenerator())


def test_a_stopped_run_leaves_a_good_prefix_and_the_next_one_finishes(tmp_path: Path):
    (tmp_path / "in.jsonl").write_bytes(b"".join(plain(i) for i in range(1, 41)))
    alive = 11

    def dies(_: Request) -> Exception | None:
        return RankError("decode is gone") if len(generator.requests) > alive else None

    generator = EchoGenerator(failure=dies)
    with pytest.raises(BatchStoppedError, match=r"no request has succeeded.*decode is gone"):
        run(tmp_path, generator, give_up_s=0.2)
    assert len(lines(tmp_path)) == alive
    assert not any(record["error"] for record in read(tmp_path))
    run(tmp_path, EchoGenerator(), ordered=True)
    assert lines(tmp_path) == list(range(1, 41))


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_dead_cluster_does_not_turn_the_input_into_error_lines(tmp_path: Path, concurrency: int):
    (tmp_path / "in.jsonl").write_bytes(b"".join(plain(i) for i in range(1, 9)))
    generator = EchoGenerator(failure=lambda _: RankError("all gone"))
    with pytest.raises(BatchStoppedError, match="all gone"):
        run(tmp_path, generator, concurrency=concurrency, attempts=1, give_up_s=0.2)
    assert lines(tmp_path) == []


def test_the_last_request_is_accounted_for_though_nothing_else_can_succeed(tmp_path: Path):
    (tmp_path / "in.jsonl").write_bytes(plain(1))
    report = run(tmp_path, EchoGenerator(failure=lambda _: RankError("poison")), attempts=2)
    assert report["failures_by_code"] == {"cluster_error": 1}


def test_duplicates_are_told_apart_the_same_way_after_a_restart(tmp_path: Path):
    """The first line of an id is answered whether it or the later one was written before the restart."""
    rows = [plain(1), plain(1), plain(2), plain(2)]
    (tmp_path / "in.jsonl").write_bytes(b"".join(rows))
    run(tmp_path, EchoGenerator())
    whole = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    for missing in range(4):
        (tmp_path / "out.jsonl").write_bytes(b"".join(whole[:missing] + whole[missing + 1 :]))
        run(tmp_path, EchoGenerator())
        kinds = {record["line"]: record["error"] is None for record in read(tmp_path)}
        assert kinds == {1: True, 2: False, 3: True, 4: False}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PromptTooLongError("too long for the cache"), "context_length_exceeded"),
        (InvalidRequestError("no such token"), "invalid_request"),
        (RankError("lost three times"), "cluster_error"),
        (RuntimeError("a bug"), "cluster_error"),
    ],
)
def test_a_failing_request_costs_its_own_line_only(tmp_path: Path, error: Exception, code: str):
    (tmp_path / "in.jsonl").write_bytes(b"".join(plain(i) for i in range(1, 9)))
    generator = EchoGenerator(
        failure=lambda request: error if request.request_id.endswith("-3") else None
    )
    report = run(tmp_path, generator, attempts=2)
    errors = [record for record in read(tmp_path) if record["error"]]
    assert [(record["custom_id"], record["error"]["code"]) for record in errors] == [("id-3", code)]
    assert str(error) in errors[0]["error"]["message"]
    assert report["failures_by_code"] == {code: 1}
    assert len(generator.requests) == (8 if code != "cluster_error" else 9)


def test_a_failure_that_passes_is_never_seen(tmp_path: Path):
    (tmp_path / "in.jsonl").write_bytes(plain(1) + plain(2))
    seen: list[str] = []

    def once(request: Request) -> Exception | None:
        seen.append(request.request_id)
        return RankError("restarting") if seen.count(request.request_id) == 1 else None

    report = run(tmp_path, EchoGenerator(failure=once))
    assert (report["answered"], report["failed"]) == (2, 0)


def test_the_number_of_requests_in_flight_is_bounded(tmp_path: Path):
    (tmp_path / "in.jsonl").write_bytes(b"".join(plain(i) for i in range(50)))
    generator = EchoGenerator(delay_s=0.005)
    run(tmp_path, generator, concurrency=7)
    assert generator.most_in_flight == 7


def test_the_input_is_read_no_further_than_there_is_room(tmp_path: Path):
    (tmp_path / "in.jsonl").write_bytes(b"".join(plain(i) for i in range(50)))
    taken: list[int] = []

    async def scenario() -> None:
        target = Target.of(str(tmp_path / "out.jsonl"), tmp_path)
        with BatchJob(Source(str(tmp_path / "in.jsonl")), target, {}) as job:
            runner = job.runner(
                RunnerConfig(concurrency=3, model="fake"), EchoGenerator(delay_s=60), CODEC
            )

            def counted():
                for line in job.lines(CODEC, 1000):
                    taken.append(1)
                    yield line

            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await runner.run(counted())

    asyncio.run(scenario())
    assert len(taken) == 3


def test_an_answer_in_thinking_mode_is_split(tmp_path: Path):
    from headrace.cluster.batch.fakes import EOS, THINKING_END
    from headrace.transfer.request import Completion
    from headrace.transfer.timeline import Timeline

    class Thinker:
        async def generate(self, request: Request) -> Completion:
            ids = (*b"hm", THINKING_END, *b"yes", EOS)
            return Completion(
                request_id=request.request_id, ids=ids, finish_reason="stop", timeline=Timeline()
            )

    body = {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "high"}
    line = {"custom_id": "a", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    run(tmp_path, Thinker())  # pyright: ignore[reportArgumentType]
    (record,) = read(tmp_path)
    (choice,) = record["response"]["body"]["choices"]
    assert choice["message"] == {"role": "assistant", "reasoning_content": "hm", "content": "yes"}
    assert choice["finish_reason"] == "stop"
    assert record["response"]["body"]["usage"]["completion_tokens"] == 7


def test_a_local_output_may_be_a_uri(tmp_path: Path):
    (tmp_path / "in.jsonl").write_bytes(plain(1))
    run(tmp_path, EchoGenerator(), output=f"file://{tmp_path}/out.jsonl")
    assert lines(tmp_path) == [1]


def test_a_remote_output_is_built_here_and_copied_when_complete(tmp_path: Path):
    (tmp_path / "in.jsonl").write_bytes(plain(1) + plain(2))
    uri = f"memory://{tmp_path.name}/out.jsonl"
    with pytest.raises(BatchStoppedError):
        run(tmp_path, EchoGenerator(failure=lambda _: RankError("gone")), output=uri, give_up_s=0)
    assert not fsspec.filesystem("memory").exists(uri)
    run(tmp_path, EchoGenerator(), output=uri, ordered=True)
    written = fsspec.filesystem("memory").cat_file(uri)
    assert [json.loads(line)["line"] for line in written.splitlines()] == [1, 2]
    with pytest.raises(ConfigError, match="exists already"):
        Target.of(uri, tmp_path / "elsewhere")
    generator = EchoGenerator()
    run(tmp_path, generator, output=uri)
    assert generator.requests == []


def test_a_remote_input_is_known_again(tmp_path: Path):
    uri = f"memory://{tmp_path.name}/in.jsonl"
    fsspec.filesystem("memory").pipe_file(uri, plain(1))
    assert [line.number for line in Source(uri).lines()] == [1]
    assert Source(uri).identity == Source(uri).identity
    with pytest.raises(ConfigError, match="does not exist"):
        Source(f"memory://{tmp_path.name}/other.jsonl")


def test_an_output_that_cannot_be(tmp_path: Path):
    with pytest.raises(ConfigError, match="is a directory"):
        Target.of(str(tmp_path), tmp_path)
    (tmp_path / "in.jsonl").write_bytes(plain(1))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be written"):
        run(tmp_path, EchoGenerator(), output=str(tmp_path / "file" / "out.jsonl"))
