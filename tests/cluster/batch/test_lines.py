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
    sampling = line.sampling.params
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.top_logprobs) == (
        1.0,
        1.0,
        0,
        0,
    )
    assert sampling.seed == seed_of("a")
    assert not line.sampling.has_max_tokens
    assert line.sampling.num_logprobs is None
    assert (line.sampling.num_choices, line.sampling.include_stop) == (1, False)


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
            min_p=0.1,
            presence_penalty=-2,
            frequency_penalty=0.5,
            repetition_penalty=1.1,
            logit_bias={"50": -100, "7": 2.5},
            stop=["a", "bc"],
            stop_token_ids=[4, 5],
            min_tokens=2,
            prompt_logprobs=3,
            n=4,
            include_stop_str_in_output=True,
        )
    ).sampling
    assert (sampling.num_choices, sampling.include_stop) == (4, True)
    sampling = sampling.params
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (
        9,
        0.0,
        0.5,
        3,
    )
    assert (sampling.seed, sampling.ignore_eos) == (11, True)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2.0, 0.5)
    assert sampling.logit_bias == ((50, -100.0), (7, 2.5))
    assert (sampling.stop, sampling.stop_token_ids) == (("a", "bc"), (4, 5))
    assert (sampling.min_tokens, sampling.prompt_logprobs) == (2, 3)


def test_a_stop_may_be_one_string_or_nothing():
    assert good(chat(stop="\n")).sampling.params.stop == ("\n",)
    for nothing in ("", [], None):
        assert good(chat(stop=nothing)).sampling.params.stop == ()


def test_min_tokens_without_max_tokens_asks_for_at_least_so_many():
    sampling = good(chat(min_tokens=30)).sampling
    assert (sampling.params.min_tokens, sampling.has_max_tokens) == (30, False)


def test_a_plain_line_takes_the_same_fields_at_its_top_level():
    line = good(b'{"id": 12, "prompt": "hi", "max_tokens": 4, "temperature": 0}')
    assert (line.custom_id, line.endpoint) == ("12", Endpoint.COMPLETIONS)
    assert line.prompt == TextPrompt(text="hi")
    assert (line.sampling.params.max_tokens, line.sampling.params.temperature) == (4, 0.0)


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


@pytest.mark.parametrize(
    ("raw", "number"),
    [
        (chat(logprobs=True, top_logprobs=2), 2),
        (chat(logprobs=True), 0),
        (chat(logprobs=False), None),
        (completion(logprobs=0), 0),
        (completion(logprobs=5), 5),
        (completion(), None),
    ],
)
def test_logprobs_ask_for_the_chosen_token_and_as_many_alternatives_as_shown(
    raw: bytes, number: int | None
):
    sampling = good(raw).sampling
    assert sampling.num_logprobs == number
    assert sampling.params.logprobs == (number is not None)
    assert sampling.params.top_logprobs == (number or 0)


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
        ({"n": 0}, "body.n = 0 is not allowed: an integer from 1 to 128"),
        ({"n": 129}, "body.n = 129"),
        ({"n": 1.0}, "body.n"),
        ({"best_of": 3}, "body.best_of"),
        ({"stream": True}, "body.stream = True"),
        ({"stop": ["a", 3]}, "body.stop = ['a', 3] is not allowed: a string or a list of strings"),
        ({"stop": {"a": 1}}, "body.stop"),
        ({"stop": ["a", ""]}, "up to 64 strings of 1 to 1024 characters"),
        ({"stop": ["a"] * 65}, "up to 64 strings"),
        ({"stop_token_ids": [1, "2"]}, "body.stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "body.logit_bias"),
        ({"logit_bias": {"5": "1"}}, "body.logit_bias"),
        ({"logit_bias": {"-5": 1}}, "body.logit_bias"),
        ({"logit_bias": [5]}, "body.logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias of 5 = 101.0 is not allowed"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "at most 1024"),
        ({"min_p": 1.5}, "min_p = 1.5 is not allowed: a number from 0 to 1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens = 5"),
        ({"min_tokens": -1}, "min_tokens = -1"),
        ({"repetition_penalty": 0}, "repetition_penalty = 0.0"),
        ({"frequency_penalty": -2.1}, "frequency_penalty = -2.1 is not allowed: a number from -2"),
        (
            {"prompt_logprobs": 21},
            "body.prompt_logprobs = 21 is not allowed: an integer from 0 to 20",
        ),
        ({"prompt_logprobs": True}, "body.prompt_logprobs"),
        ({"include_stop_str_in_output": 1}, "body.include_stop_str_in_output"),
        ({"tools": [{"type": "function"}]}, "body.tools"),
        ({"response_format": {"type": "xml"}}, "body.response_format"),
        ({"presence_penalty": 2.5}, "presence_penalty = 2.5 is not allowed: a number from -2 to 2"),
        ({"presence_penalty": "0"}, "body.presence_penalty"),
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
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].tool_call_id"),
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
    parsed = parse_line(3, chat(stop=7))
    assert isinstance(parsed, BadLine)
    assert (parsed.custom_id, parsed.code) == ("a", "invalid_request")


def test_a_parquet_row_may_hold_its_body_as_json_text():
    parsed = parse_row(
        1, {"custom_id": "a", "url": Endpoint.CHAT, "body": json.dumps({"messages": MESSAGES})}
    )
    assert isinstance(parsed, BatchRequest)


def test_the_seed_of_a_line_depends_on_its_id_only():
    assert good(chat()).sampling.params.seed == good(completion()).sampling.params.seed
    assert seed_of("a") != seed_of("b")


def test_a_line_says_how_its_prompt_is_treated():
    line = good(completion(priority=-3, deadline_s=2, exact=True, cache_salt="tenant"))
    handling = line.handling
    assert (handling.priority, handling.deadline_s) == (-3, 2.0)
    assert (handling.exact, handling.cache_salt) == (True, "tenant")
    assert good(completion()).handling == good(chat(priority=None)).handling


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"priority": 101}, "body.priority = 101 is not allowed: an integer from -100 to 100"),
        ({"priority": 1.5}, "body.priority = 1.5 is not allowed"),
        ({"deadline_s": 0}, "body.deadline_s = 0 is not allowed: seconds above 0"),
        ({"deadline_s": "1"}, "body.deadline_s = '1' is not allowed"),
        ({"exact": 1}, "body.exact = 1 is not allowed: true or false"),
        ({"cache_salt": "x" * 257}, "a string of up to 256 characters"),
    ],
)
def test_a_wrong_treatment_is_named(wrong: dict[str, Any], said: str):
    assert said in bad(completion(**wrong))
