"""Structured answers in a request body: the grammar that they must belong to, and the tools they may call.

Read are OpenAI's ``response_format``, ``tools`` and ``tool_choice``, vLLM's ``structured_outputs`` and its older names
``guided_json``, ``guided_regex``, ``guided_grammar`` and ``guided_choice``. Only one of them may constrain an answer.
With thinking the grammar begins behind the thinking.
"""

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from ...transfer.request import Grammar
from .fields import ChatPrompt, Fields, Prompt, is_bool, is_dict, is_list, is_str

THINKING_END = "</think>"
_FORMAT = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": ...}}'
_TOOL = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
_CHOICE = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}} of a tool'


def read_structured(fields: Fields, prompt: Prompt) -> tuple[Prompt, Grammar | None]:
    """Take the fields. Returns the prompt with what its chat format shows of them, and the grammar, if any.

    Raises InvalidRequestError for a field that is malformed, or for two that constrain the answer. Whether a grammar
    can be compiled is found out by who compiles it.
    """
    given = {
        name: grammar
        for name, grammar in (
            ("structured_outputs", _read_outputs(fields)),
            *((f"guided_{key}", _read_guided(fields, key)) for key in _READERS),
        )
        if grammar is not None
    }
    shape = fields.take_as("response_format", _FORMAT, is_dict)
    if shape is not None and (grammar := _read_format(fields, shape)) is not None:
        given["response_format"] = grammar
    if isinstance(prompt, ChatPrompt):
        if "response_format" in given:
            prompt = replace(prompt, response_format=shape)
        prompt, grammar = _read_tools(fields, prompt)
        if grammar is not None:
            given["tools"] = grammar
    if len(given) > 1:
        first, second = list(given)[:2]
        raise fields.error(second, "...", f"{first} constrains the answer already; take one out")
    grammar = next(iter(given.values()), None)
    if grammar is not None and isinstance(prompt, ChatPrompt) and prompt.thinking:
        grammar = replace(grammar, trigger=THINKING_END)
    return prompt, grammar


def _read_format(fields: Fields, shape: dict[str, object]) -> Grammar | None:
    match shape.get("type"), shape.get("json_schema"):
        case "text", None:
            return None
        case "json_object", None:
            return Grammar(kind="json_object")
        case "json_schema", {"schema": schema} if is_dict(schema) or is_bool(schema):
            return Grammar(kind="json_schema", text=_json(schema))
        case _:
            raise fields.error("response_format", shape, _FORMAT)


def _read_outputs(fields: Fields) -> Grammar | None:
    allowed = f"an object with one of {', '.join((*_READERS, 'json_object'))}"
    outputs = fields.take_as("structured_outputs", allowed, is_dict)
    if outputs is None:
        return None
    given = {key: value for key, value in outputs.items() if value not in (None, False)}
    if len(given) == 1:
        ((key, value),) = given.items()
        if key == "json_object":
            return Grammar(kind="json_object")
        if key in _READERS and (grammar := _READERS[key](value)) is not None:
            return grammar
    raise fields.error("structured_outputs", outputs, allowed)


def _read_guided(fields: Fields, key: str) -> Grammar | None:
    name = f"guided_{key}"
    value = fields.take(name)
    if value is None:
        return None
    if (grammar := _READERS[key](value)) is None:
        raise fields.error(name, value, _ALLOWED[key])
    return grammar


def _json_grammar(value: object) -> Grammar | None:
    if is_str(value) and value:
        return Grammar(kind="json_schema", text=value)
    return Grammar(kind="json_schema", text=_json(value)) if is_dict(value) else None


def _regex_grammar(value: object) -> Grammar | None:
    return Grammar(kind="regex", text=value) if is_str(value) and value else None


def _ebnf_grammar(value: object) -> Grammar | None:
    return Grammar(kind="ebnf", text=value) if is_str(value) and value else None


def _choice_grammar(value: object) -> Grammar | None:
    if not is_list(value) or not value:
        return None
    choices = [item for item in value if is_str(item)]
    if len(choices) < len(value):
        return None
    return Grammar(kind="ebnf", text="root ::= " + " | ".join(map(_literal, choices)))


_READERS = {
    "json": _json_grammar,
    "regex": _regex_grammar,
    "grammar": _ebnf_grammar,
    "choice": _choice_grammar,
}
_ALLOWED = {
    "json": "a JSON schema, as an object or as text",
    "regex": "a regular expression",
    "grammar": "an EBNF grammar with a rule named root",
    "choice": "a list of at least one string",
}


def _literal(text: str) -> str:
    """A string of an EBNF grammar."""
    plain = (
        char if char.isprintable() and char not in '"\\' else f"\\U{ord(char):08x}" for char in text
    )
    return f'"{"".join(plain)}"'


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _read_tools(fields: Fields, prompt: ChatPrompt) -> tuple[ChatPrompt, Grammar | None]:
    tools = fields.take_as("tools", f"a list of tools, each {_TOOL}", is_list) or []
    choice = fields.take("tool_choice")
    parallel = fields.take_as("parallel_tool_calls", "true or false", is_bool)
    names = [_tool_name(fields, index, tool) for index, tool in enumerate(tools)]
    wanted = _wanted_tool(choice)
    if choice not in (None, "none", "auto", "required") and wanted not in names:
        raise fields.error("tool_choice", choice, _CHOICE)
    if not tools and choice == "required":
        raise fields.error("tool_choice", choice, "there must be tools beside it")
    if not tools or choice == "none":
        return prompt, None
    if wanted is not None:
        tools = [tool for tool, name in zip(tools, names, strict=True) if name == wanted]
    chosen = "auto" if choice in (None, "auto") else "required"
    kind = "tool_call" if chosen == "auto" else "tool_call_required"
    shown = tuple(tool for tool in tools if is_dict(tool))
    about: dict[str, object] = {"tools": [_plain_tool(tool) for tool in shown]}
    if parallel is not None:
        about["parallel_tool_calls"] = parallel
    prompt = replace(prompt, tools=shown, tool_choice=chosen)
    return prompt, Grammar(kind=kind, text=_json(about))


def _plain_tool(tool: Mapping[str, object]) -> dict[str, object]:
    """What a grammar needs to know of a tool."""
    function = tool["function"]
    assert is_dict(function)
    keys = ("name", "parameters", "strict")
    return {
        "type": "function",
        "function": {key: function[key] for key in keys if function.get(key) is not None},
    }


def _tool_name(fields: Fields, index: int, tool: object) -> str:
    if (
        is_dict(tool)
        and tool.get("type") == "function"
        and is_dict(function := tool.get("function"))
    ):
        name, parameters = function.get("name"), function.get("parameters")
        if is_str(name) and name and (parameters is None or is_dict(parameters)):
            return name
    raise fields.error(f"tools[{index}]", tool, _TOOL)


def _wanted_tool(choice: object) -> str | None:
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case _:
            return None
