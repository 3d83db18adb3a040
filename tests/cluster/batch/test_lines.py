"""What a line may say, and what is said about one that may not."""

import json
from typing import Any

import pytest

from headrace.cluster.batch.fields import ChatPrompt, IdsPrompt, TextPrompt
from headrace.cluster.batch.lines import (
    BadLine,
    BatchRequest,
    Endpoint,
    parse_line,
    parse_row,
    seed_of,
)
from headrace.transfer.request import MAX_TOP_LOGPROBS

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**body: Any) -> bytes:
    body = {"model": "any", "messages": MESSAGES} | body
    return json.dumps(
        {"custom_id": "a", "method": "POST", "url": Endpoint.CHAT, "body": body}
    ).encode()


def completion(**body: Any) -> bytes:
    body = {"model": "any", "prompt": "hi"} | body
    return json.dumps({"custom_id": "a", "url": Endpoint.COMPLETIONS, "body": body}).encode()


def good(raw: bytes) -> BatchRequest:
    parsed = parse_line(1, raw)
    assert isinstance(parsed, BatchRequest), parsed
    return parsed


def bad(raw: bytes) -> str:
    parsed = parse_line(7, raw)
    assert isinstance(parsed, BadLine), parsed
    assert parsed.line == 7
    return parsed.reason


def test_a_chat_line_with_the_defaults_of_the_api():
    line = good(chat())
    assert line.endpoint is Endpoint.CHAT
    assert isinstance(line.prompt, ChatPrompt)
    assert (line.prompt.thinking, line.prompt.effort) == (False, None)
    assert [(turn.role, turn.content) for turn in line.prompt.messages] == [("user", "hi")]
    sampling = line.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.top_logprobs) == (
        1.0,
        1.0,
        0,
        0,
    )
    assert sampling.seed == seed_of("a")
    assert not line.has_max_tokens
    assert line.num_logprobs is None


def test_every_sampling_field_is_read():
    sampling = good(
        chat(
            max_completion_tokens=9,
            max_tokens=5,
            temperature=0,
            top_p=0.5,
            top_k=3,
            seed=11,
            ignore_eos=True,
        )
    ).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (
        9,
        0.0,
        0.5,
        3,
    )
    assert (sampling.seed, sampling.ignore_eos) == (11, True)


def test_a_plain_line_takes_the_same_fields_at_its_top_level():
    line = good(b'{"id": 12, "prompt": "hi", "max_tokens": 4, "temperature": 0}')
    assert (line.custom_id, line.endpoint) == ("12", Endpoint.COMPLETIONS)
    assert line.prompt == TextPrompt(text="hi")
    assert (line.sampling.max_tokens, line.sampling.temperature) == (4, 0.0)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", TextPrompt(text="text")),
        (["text"], TextPrompt(text="text")),
        ([1, 2], IdsPrompt(ids=(1, 2))),
        ([[1, 2]], IdsPrompt(ids=(1, 2))),
    ],
)
def test_shapes_of_a_prompt(prompt: object, expected: object):
    assert good(completion(prompt=prompt)).prompt == expected


@pytest.mark.parametrize(
    "prompt", ["", [], ["a", "b"], [1, "a"], [True], [-1], 3, {"a": 1}, [[1], [2]], [1.5]]
)
def test_a_prompt_of_another_shape_is_refused(prompt: object):
    assert "body.prompt" in bad(completion(prompt=prompt))


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({"reasoning_effort": "high"}, True, "high"),
        ({"reasoning_effort": "none"}, False, None),
        ({"thinking": {"type": "enabled"}}, True, None),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False, None),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "max"}, True, "max"),
    ],
)
def test_thinking(fields: dict[str, Any], thinking: bool, effort: str | None):
    prompt = good(chat(**fields)).prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.thinking, prompt.effort) == (thinking, effort)


def test_content_may_come_in_text_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    prompt = good(chat(messages=[{"role": "developer", "content": parts}])).prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.messages[0].role, prompt.messages[0].content) == ("system", "ab")


def test_logprobs_ask_the_cluster_for_all_alternatives_so_that_the_drawn_token_is_among_them():
    line = good(chat(logprobs=True, top_logprobs=2))
    assert (line.num_logprobs, line.sampling.top_logprobs) == (2, MAX_TOP_LOGPROBS)
    assert good(chat(logprobs=True)).num_logprobs == 0
    assert good(chat(logprobs=False)).num_logprobs is None
    assert good(completion(logprobs=0)).num_logprobs == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "x"},
        {"n": 1, "stream": False, "stop": None, "tools": [], "response_format": {"type": "text"}},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tool_choice": "auto"},
    ],
)
def test_fields_that_change_nothing_are_accepted(fields: dict[str, Any]):
    assert good(chat(**fields)) == good(chat())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2}, "body.n = 2"),
        ({"stream": True}, "body.stream = True"),
        ({"stop": ["\n"]}, "body.stop"),
        ({"tools": [{"type": "function"}]}, "body.tools"),
        ({"response_format": {"type": "json_object"}}, "body.response_format"),
        ({"presence_penalty": 0.5}, "body.presence_penalty"),
        ({"wings": 2}, "body.wings"),
        ({"prompt": "both"}, "body.prompt"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "body.temperature = 'hot'"),
        ({"temperature": True}, "body.temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "body.max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"logprobs": True, "top_logprobs": 21}, "body.top_logprobs = 21"),
        ({"top_logprobs": 2}, "logprobs must be true"),
        ({"reasoning_effort": "enormous"}, "body.reasoning_effort"),
        ({"thinking": True}, "body.thinking"),
        ({"messages": []}, "body.messages"),
        ({"messages": "hi"}, "body.messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "pope", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
        ),
        (
            {"messages": [{"role": "user", "content": "", "reasoning_content": "x"}]},
            "reasoning_content",
        ),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], named: str):
    reason = bad(chat(**fields))
    assert named in reason
    assert len(reason) < 400


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"custom_id": "a"', "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"{}", "custom_id"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": 1e999}', "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"custom_id": "\\ud800"}', "not valid JSON"),
        (b'{"custom_id": "\\ud800abcdefgh"}', "not valid JSON"),
        (b'{"custom_id": "a\xff"}', "not UTF-8: byte 0xff at offset 16"),
        (b"[" * 1_000_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        ('{"custom_id": "a"}'.encode("utf-16"), "not UTF-8"),
        (b'{"custom_id": "", "url": "/v1/completions", "body": {}}', "custom_id"),
        (b'{"custom_id": 5, "url": "/v1/completions", "body": {}}', "custom_id = 5"),
        (b'{"custom_id": "a", "url": "/v1/embeddings", "body": {}}', "url = '/v1/embeddings'"),
        (b'{"custom_id": "a", "url": ["x"], "body": {}}', "url"),
        (b'{"custom_id": "a", "url": "/v1/completions"}', "body"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": []}', "body"),
        (
            b'{"custom_id": "a", "url": "/v1/completions", "body": "{"}',
            "body is text but not valid JSON",
        ),
        (b'{"custom_id": "a", "url": "/v1/completions", "method": "GET", "body": {}}', "method"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {}, "wings": 1}', "wings"),
        (b'{"id": "a", "prompt": "hi", "wings": 1}', "wings"),
        (b'{"id": true, "prompt": "hi"}', "id = True"),
    ],
)
def test_hostile_and_broken_lines_become_reasons(raw: bytes, said: str):
    assert said in bad(raw)


def test_a_bad_line_keeps_its_id_where_it_has_one():
    parsed = parse_line(3, chat(stop="x"))
    assert isinstance(parsed, BadLine)
    assert (parsed.custom_id, parsed.code) == ("a", "invalid_request")


def test_a_parquet_row_may_hold_its_body_as_json_text():
    parsed = parse_row(
        1, {"custom_id": "a", "url": Endpoint.CHAT, "body": json.dumps({"messages": MESSAGES})}
    )
    assert isinstance(parsed, BatchRequest)


def test_the_seed_of_a_line_depends_on_its_id_only():
    assert good(chat()).sampling.seed == good(completion()).sampling.seed
    assert seed_of("a") != seed_of("b")
