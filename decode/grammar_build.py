"""A grammar's text to XGrammar's compiled form: the one place that knows XGrammar's compiler.

The process that tries a grammar out and the rank that uses it compile alike. Importing XGrammar takes more than a
second, so it is imported when it is first needed.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..transfer.request import GRAMMAR_KINDS
from .grammar_schema import UNSAFE, check_schema, is_plain_pattern

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, TokenizerInfo

#: What the prompt has already opened when a call is required; the library's format begins with it.
CALLS_OPENING = "\n\n<｜DSML｜ calls>\n"
_MODEL = "deepseek_v4_1"
#: Characters between two signs of JSON: small models fall into endless rows of them.
_MAX_WHITESPACE = 20
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_SOURCE_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ")
_MAX_REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabularies:
    """What a compiler must know of the tokenizer: all of it, and what JSON is made of.

    JSON strings of limited length are compiled to let control characters through, which JSON forbids. As it needs none
    outside strings but line ends, tokens with others are left out.
    """

    text: "TokenizerInfo"
    json: "TokenizerInfo"


def open_vocabularies(pieces: Sequence[bytes], stop_ids: Sequence[int]) -> Vocabularies:
    """pieces: bytes of every id; an id without bytes is never allowed. stop_ids: ids that end an answer."""
    from xgrammar import TokenizerInfo, VocabType

    def info(some: Sequence[bytes]) -> TokenizerInfo:
        return TokenizerInfo(
            list(some), VocabType.RAW, vocab_size=len(some), stop_token_ids=list(stop_ids)
        )

    return Vocabularies(
        text=info(pieces), json=info([b"" if _CONTROL.search(p) else p for p in pieces])
    )


def build(vocabularies: Vocabularies, kind: str, text: str) -> "CompiledGrammar":
    """Compile on the calling thread, without the interpreter's lock.

    Raises ValueError or RuntimeError for a text that is no grammar of its kind, MemoryError where memory is limited.
    """
    from xgrammar import GrammarCompiler

    info = vocabularies.json if kind.startswith("json") else vocabularies.text
    compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
    builders: dict[str, Callable[[], CompiledGrammar]] = {
        "json_schema": lambda: _schema(compiler, text),
        "json_object": lambda: _schema(compiler, '{"type": "object"}'),
        "regex": lambda: compiler.compile_regex(text),
        "ebnf": lambda: compiler.compile_grammar(text),
        "tool_call": lambda: compiler.compile_structural_tag(_calls(text, "auto")),
        "tool_call_required": lambda: compiler.compile_structural_tag(_calls(text, "required")),
    }
    assert builders.keys() == set(GRAMMAR_KINDS)
    return builders[kind]()


def readable(error: BaseException | str) -> str:
    """The reason in an error of the library, without places in its source, on one line, not too long."""
    text = " ".join(_SOURCE_PLACE.sub("", str(error)).split()) or type(error).__name__
    return (
        text if len(text) <= _MAX_REASON_CHARACTERS else text[: _MAX_REASON_CHARACTERS - 3] + "..."
    )


def _schema(compiler: Any, text: str) -> "CompiledGrammar":
    for place, pattern in check_schema(text):
        if not _is_json_pattern(pattern):
            raise ValueError(
                f"{place}: pattern is too large, or needs a character that JSON escapes; use ranges without {UNSAFE}"
            )
    return compiler.compile_json_schema(text, max_whitespace_cnt=_MAX_WHITESPACE)


def _is_json_pattern(pattern: str) -> bool:
    """Whether strings of this pattern are JSON strings; the compiler gives that up where it cannot be had."""
    from xgrammar import Grammar

    if is_plain_pattern(pattern):
        return True
    grammar = Grammar.from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    return "json_string=true" in str(grammar)


def _calls(text: str, choice: Literal["auto", "required"]) -> dict[str, Any]:
    """The structural tag of DeepSeek-V4.1 tool calls. text: JSON with the fields of Chat Completions about them."""
    from xgrammar import get_model_structural_tag

    fields: dict[str, Any] = json.loads(text)
    tools: list[Any] = fields["tools"]
    for tool in tools:
        function = tool["function"]
        if function.get("strict") and function.get("parameters") is not None:
            check_schema(json.dumps(function["parameters"]))
    tag = get_model_structural_tag(
        _MODEL,
        tools=tools,
        tool_choice=choice,
        reasoning=False,
        max_whitespace_cnt=_MAX_WHITESPACE,
        parallel_tool_calls=fields.get("parallel_tool_calls", True),
    )
    plain: dict[str, Any] = tag.model_dump()
    if choice == "required":
        opening, *rest = plain["format"]["elements"]
        if opening != {"type": "const_string", "value": CALLS_OPENING}:
            raise RuntimeError(f"tool calls open with {opening}, expected {CALLS_OPENING!r}")
        plain["format"]["elements"] = rest
    return plain
