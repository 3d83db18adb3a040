"""Structured answers: from a line to its grammar and prompt, from an answer to its message."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.cluster.batch.answers import response_body
from headrace.cluster.batch.codec import TokenizerCodec
from headrace.cluster.batch.fields import ChatPrompt
from headrace.cluster.batch.lines import BadLine, BatchRequest, parse_line
from headrace.cluster.batch.preparation import Prepared
from headrace.model.config import load_config
from headrace.model.tokenizer import Tokenizer
from headrace.transfer.request import Completion, Grammar, Request
from headrace.transfer.timeline import Timeline

DIRECTORY = Path(__file__).parents[3] / "configs" / "checkpoints" / "tiny-v41"
CODEC = TokenizerCodec.of(Tokenizer(DIRECTORY, load_config(DIRECTORY)))
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def tool(name: str, **function: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **function}}


def parse(**fields: object) -> BatchRequest | BadLine:
    body = {"messages": [{"role": "user", "content": "Some JSON, please."}], **fields}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return parse_line(3, json.dumps(line).encode())


def good(**fields: object) -> BatchRequest:
    line = parse(**fields)
    assert isinstance(line, BatchRequest), line
    return line


def grammar_of(**fields: object) -> Grammar | None:
    return good(**fields).sampling.params.grammar


def prompt_of(line: BatchRequest) -> str:
    return CODEC.tokenizer.decode(CODEC.encode(line.prompt), skip_special_tokens=False)


def message_of(line: BatchRequest, text: str, reason: str = "stop") -> dict[str, Any]:
    ids = (*CODEC.tokenizer.encode(text), *([CODEC.eos] if reason == "stop" else []))
    request = Request(
        request_id="job-3", prompt_ids=CODEC.encode(line.prompt), sampling=line.sampling.params
    )
    answer = Completion(
        request_id="job-3", ids=ids, finish_reason=reason, timeline=Timeline(arrived=0.0)
    )
    body = response_body(
        Prepared(line=line, requests=(request,)), [answer], CODEC, job_id="job", model="m"
    )
    (choice,) = body["choices"]  # type: ignore[misc]
    return choice


def test_response_format() -> None:
    assert grammar_of(response_format={"type": "text"}) is None
    assert grammar_of(response_format={"type": "json_object"}) == Grammar(kind="json_object")
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    found = grammar_of(response_format=shape)
    assert found is not None
    assert (found.kind, json.loads(found.text), found.trigger) == ("json_schema", SCHEMA, "")
    assert '"x"' in prompt_of(good(response_format=shape))
    assert '"x"' not in prompt_of(good())


def test_behind_thinking() -> None:
    fields = {"response_format": {"type": "json_object"}, "thinking": {"type": "enabled"}}
    assert grammar_of(**fields) == Grammar(kind="json_object", trigger="</think>")


@pytest.mark.parametrize(
    ("name", "value", "kind", "text"),
    [
        ("json", json.dumps(SCHEMA), "json_schema", json.dumps(SCHEMA)),
        ("regex", "a+", "regex", "a+"),
        ("grammar", 'root ::= "a"', "ebnf", 'root ::= "a"'),
        ("choice", ["yes", 'n"o\\'], "ebnf", r'root ::= "yes" | "n\U00000022o\U0000005c"'),
    ],
)
def test_both_generations_of_names(name: str, value: object, kind: str, text: str) -> None:
    wanted = Grammar(kind=kind, text=text)
    assert grammar_of(structured_outputs={name: value}) == wanted
    assert grammar_of(**{f"guided_{name}": value}) == wanted


def test_plain_lines_have_grammars_too() -> None:
    line = parse_line(1, b'{"id": "a", "prompt": "b", "guided_choice": ["x", "y"]}')
    assert isinstance(line, BatchRequest)
    assert line.sampling.params.grammar == Grammar(kind="ebnf", text='root ::= "x" | "y"')


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"response_format": {"type": "yaml"}}, "body.response_format"),
        ({"response_format": {"type": "json_schema"}}, "body.response_format"),
        ({"response_format": "json"}, "body.response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "body.structured_outputs"),
        ({"structured_outputs": {"lark": "a"}}, "body.structured_outputs"),
        ({"guided_choice": []}, "body.guided_choice"),
        ({"guided_choice": ["a", 1]}, "body.guided_choice"),
        ({"guided_json": 3}, "body.guided_json"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "take one out"),
        ({"guided_regex": "a", "tools": [tool("f")]}, "take one out"),
        ({"tools": [{"type": "function"}]}, r"body.tools\[0\]"),
        ({"tools": "f"}, "body.tools"),
        ({"tools": [tool("f")], "tool_choice": "always"}, "body.tool_choice"),
        ({"tool_choice": "required"}, "body.tool_choice"),
        (
            {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "body.tool_choice",
        ),
        ({"guided_regex": "a" * (1 << 20) + "a"}, "grammar length"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    line = parse(**fields)
    assert isinstance(line, BadLine)
    assert re.search(reason, line.reason), line.reason


def test_tools_that_may_be_called() -> None:
    line = good(tools=[tool("f", description="does it")], tool_choice="auto")
    grammar = line.sampling.params.grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.text)) == ("tool_call", {"tools": [tool("f")]})
    assert "does it" in prompt_of(line)
    assert not prompt_of(line).endswith("calls>\n")
    assert grammar_of(tools=[tool("f")], tool_choice="none") is None
    single = grammar_of(tools=[tool("f")], parallel_tool_calls=False)
    assert single is not None
    assert json.loads(single.text)["parallel_tool_calls"] is False
    assert grammar_of(tools=[]) is None


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "g"}}], ids=["any", "named"]
)
def test_tools_that_must_be_called(choice: object) -> None:
    line = good(tools=[tool("f"), tool("g")], tool_choice=choice)
    grammar = line.sampling.params.grammar
    assert grammar is not None
    names = [each["function"]["name"] for each in json.loads(grammar.text)["tools"]]
    assert (grammar.kind, names) == (
        "tool_call_required",
        ["f", "g"] if choice == "required" else ["g"],
    )
    assert prompt_of(line).endswith("</think>\n\n<｜DSML｜ calls>\n")


def call(name: str, x: int) -> str:
    return (
        f'<｜DSML｜ invoke name="{name}">\n<｜DSML｜ parameter name="x" string="false">{x}</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n"
    )


def calls_in(choice: dict[str, Any]) -> Sequence[tuple[str, str, dict[str, Any]]]:
    return [
        (each["id"], each["function"]["name"], json.loads(each["function"]["arguments"]))
        for each in choice["message"]["tool_calls"]
    ]


def test_calls_become_a_message() -> None:
    two = f"{call('f', 1)}{call('g', 2)}</｜DSML｜ calls>"
    wanted = [("call-job-3-0", "f", {"x": 1}), ("call-job-3-1", "g", {"x": 2})]
    required = message_of(good(tools=[tool("f"), tool("g")], tool_choice="required"), two)
    assert calls_in(required) == wanted
    assert required["finish_reason"] == "tool_calls"
    free = message_of(good(tools=[tool("f"), tool("g")]), f"Let me see.\n\n<｜DSML｜ calls>\n{two}")
    assert calls_in(free) == wanted
    assert free["message"]["content"] == "Let me see."
    thinking = good(tools=[tool("f")], thinking={"type": "enabled"})
    thought = message_of(thinking, f"Hm.</think>\n\n<｜DSML｜ calls>\n{two}")
    assert thought["message"]["reasoning_content"] == "Hm."
    assert calls_in(thought) == wanted


def test_an_answer_without_calls_is_a_plain_one() -> None:
    choice = message_of(good(tools=[tool("f")]), "No need.")
    assert choice["message"] == {"role": "assistant", "content": "No need."}
    assert choice["finish_reason"] == "stop"


def test_a_conversation_with_calls_goes_on() -> None:
    messages = [
        {"role": "user", "content": "x?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 42}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "the result"},
    ]
    line = good(messages=messages, tools=[tool("f")])
    assert isinstance(line.prompt, ChatPrompt)
    text = prompt_of(line)
    assert call("f", 42).strip() in text
    assert "the result" in text
