"""What answers say: texts and stops, logprobs, several choices."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.cluster.batch.fakes import THINKING_END, EchoGenerator
from headrace.transfer.errors import InvalidRequestError, RankError
from headrace.transfer.request import Completion, Request

from .test_job import lines, plain, read, run


def answer_of(folder: Path, ids: Sequence[int], reason: str, **body: Any) -> dict[str, Any]:
    """The response body of a line that is answered with ``ids``."""

    class Fixed(EchoGenerator):
        async def generate(self, request: Request) -> Completion:
            return replace(
                await super().generate(request),
                ids=tuple(ids),
                finish_reason=reason,
                logprobs=tuple(-0.5 - at for at in range(len(ids))),
            )

    (folder / "in.jsonl").write_bytes(plain(1, **body))
    run(folder, Fixed())
    (record,) = read(folder)
    return record["response"]["body"]


@pytest.mark.parametrize(
    ("ids", "reason", "body", "text"),
    [
        (b"one STOP", "stop", {"stop": "STOP"}, "one "),
        (
            b"one STOP",
            "stop",
            {"stop": ["x", "STOP"], "include_stop_str_in_output": True},
            "one STOP",
        ),
        (b"one STOPx", "stop", {"stop": "STOP"}, "one "),
        (b"one ST", "length", {"stop": "STOP"}, "one ST"),
        (b"a.b.", "stop", {"stop": ".", "min_tokens": 2}, "a.b"),
        ("é.b.".encode(), "stop", {"stop": ".", "min_tokens": 1}, "é"),
        ("é.b.".encode(), "stop", {"stop": "é", "min_tokens": 1}, ""),
        (b"one;", "stop", {"stop_token_ids": [ord(";")]}, "one"),
        (
            b"one;",
            "stop",
            {"stop_token_ids": [ord(";")], "include_stop_str_in_output": True},
            "one;",
        ),
        (b"one;", "length", {"stop_token_ids": [ord(";")]}, "one;"),
        ((*b"one", 257), "stop", {}, "one"),
        ((*b"one", 257), "stop", {"include_stop_str_in_output": True}, "one"),
    ],
)
def test_texts_end_before_what_ended_them_and_ids_do_not(
    tmp_path: Path, ids: Sequence[int], reason: str, body: dict[str, Any], text: str
):
    found = answer_of(tmp_path, ids, reason, max_tokens=50, **body)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, reason)
    assert found["usage"]["completion_tokens"] == len(ids)


def test_logprobs_are_those_of_the_chosen_tokens(tmp_path: Path):
    (choice,) = answer_of(tmp_path, b"ab", "length", logprobs=0)["choices"]
    assert choice["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"a": -0.5}, {"b": -1.5}],
        "text_offset": [0, 1],
    }


def test_prompt_logprobs_have_the_form_of_vllm(tmp_path: Path):
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 1,
        "prompt_logprobs": 2,
        "n": 2,
    }
    chat = {"custom_id": "chat", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_bytes(
        plain(1, prompt="ab", prompt_logprobs=0) + json.dumps(chat).encode()
    )
    generator = EchoGenerator()
    run(tmp_path, generator, ordered=True)
    first, second = read(tmp_path)
    (choice,) = first["response"]["body"]["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {"98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}},
    ]
    found = second["response"]["body"]["prompt_logprobs"]
    (ids,) = {request.prompt_ids for request in generator.requests[1:]}
    assert len(found) == len(ids) and found[0] is None
    assert set(found[1]) == {str(ids[1]), "0"}


def test_choices_have_seeds_of_their_own_and_one_line(tmp_path: Path):
    last = 2**63 - 1
    (tmp_path / "in.jsonl").write_bytes(
        plain(1, n=3, seed=7) + plain(2, n=2, seed=last) + plain(3, n=1, seed=5)
    )
    generator = EchoGenerator()
    report = run(tmp_path, generator, ordered=True)
    first = read(tmp_path)[0]["response"]["body"]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert first["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 12,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    seeds = sorted(request.sampling.seed for request in generator.requests)
    assert seeds == [0, 5, 7, 8, 9, last]
    assert len({request.request_id for request in generator.requests}) == 6
    assert (report["answered"], report["output_tokens"]) == (3, 6 * 4)


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_choices_count_as_requests_in_flight(tmp_path: Path, concurrency: int):
    (tmp_path / "in.jsonl").write_bytes(b"".join(plain(i, n=4) for i in range(6)))
    generator = EchoGenerator(delay_s=0.002)
    run(tmp_path, generator, concurrency=concurrency)
    assert sorted(lines(tmp_path)) == list(range(1, 7))
    assert (generator.most_in_flight, len(generator.requests)) == (concurrency, 24)


@pytest.mark.parametrize(
    ("error", "code"),
    [(InvalidRequestError("no"), "invalid_request"), (RankError("lost"), "cluster_error")],
)
def test_a_line_of_several_choices_is_answered_whole_or_not_at_all(
    tmp_path: Path, error: Exception, code: str
):
    (tmp_path / "in.jsonl").write_bytes(plain(1) + plain(2, n=3) + plain(3))
    generator = EchoGenerator(failure=lambda r: error if r.request_id.endswith("-2.1") else None)
    report = run(tmp_path, generator, attempts=2)
    (failed,) = [record for record in read(tmp_path) if record["error"]]
    assert (failed["custom_id"], failed["error"]["code"]) == ("id-2", code)
    assert (report["answered"], report["failed"]) == (2, 1)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"logit_bias": {"258": 1}}, "logit_bias id = 258 is not allowed: an id from 0 to 257"),
        ({"stop_token_ids": [300]}, "stop_token_ids id = 300"),
        ({"max_tokens": None, "min_tokens": 993}, "exceed the context"),
    ],
)
def test_what_the_vocabulary_or_context_cannot_hold_is_refused(
    tmp_path: Path, body: dict[str, Any], said: str
):
    (tmp_path / "in.jsonl").write_bytes(plain(1, **body))
    run(tmp_path, EchoGenerator())
    (record,) = read(tmp_path)
    assert said in record["error"]["message"]


def test_a_stop_string_cuts_an_answer_in_thinking_mode(tmp_path: Path):
    class Thinker(EchoGenerator):
        async def generate(self, request: Request) -> Completion:
            ids = (*b"hm", THINKING_END, *b"yes.") if request.sampling.seed else (*b"hm.",)
            return replace(await super().generate(request), ids=ids, finish_reason="stop")

    rows = [
        {
            "custom_id": str(seed),
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": "hi"}],
                "reasoning_effort": "high",
                "stop": ".",
                "seed": seed,
            },
        }
        for seed in range(2)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    run(tmp_path, Thinker(), ordered=True)
    messages = [record["response"]["body"]["choices"][0]["message"] for record in read(tmp_path)]
    assert [(m["reasoning_content"], m["content"]) for m in messages] == [("hm", ""), ("hm", "yes")]
