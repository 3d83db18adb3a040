"""The flags for structured answers: what they ask for, and an answer that belongs to it."""

import argparse
import json
import re
from pathlib import Path

import pytest

from headrace.cluster.generate import add_arguments, run
from headrace.cluster.grammar_flags import add_grammar_arguments, grammar_of
from headrace.tests.pools import CHECKPOINT
from headrace.transfer.errors import ConfigError, GrammarError, InvalidRequestError
from headrace.transfer.request import Grammar


def parsed(*flags: str) -> Grammar | None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_grammar_arguments(parser)
    return grammar_of(parser.parse_args(flags))


def generate(*flags: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    common = [str(CHECKPOINT), "--prompt", "x", "--max-tokens", "40", "--json"]
    document = run(parser.parse_args([*common, *flags]))
    assert document is not None
    return document


def test_texts_and_files(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "null"}')
    assert parsed() is None
    assert parsed("--json-schema", str(file)) == Grammar(
        kind="json_schema", text='{"type": "null"}'
    )
    assert parsed("--json-schema", "true") == Grammar(kind="json_schema", text="true")
    assert parsed("--json-object") == Grammar(kind="json_object")
    assert parsed("--regex", "a+") == Grammar(kind="regex", text="a+")
    wanted = Grammar(kind="ebnf", text='root ::= "a"', trigger="So:")
    assert parsed("--ebnf", 'root ::= "a"', "--trigger", "So:") == wanted


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--trigger .So:. .* add --json-schema"):
        parsed("--trigger", "So:")
    with pytest.raises(InvalidRequestError, match="grammar text"):
        parsed("--regex", "")
    with pytest.raises(argparse.ArgumentError, match="not allowed with argument"):
        parsed("--regex", "a", "--json-object")
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="latin cannot be read"):
        parsed("--ebnf", str(tmp_path / "latin"))
    with pytest.raises(GrammarError, match="parenthesis is not closed"):
        generate("--regex", "(a")


def test_answers_belong_to_the_language() -> None:
    answer = generate("--regex", "[0-9]{2}-(yes|no)!", "--temperature", "1")
    assert re.fullmatch("[0-9]{2}-(yes|no)!", str(answer["text"]))
    assert answer["finish_reason"] == "stop"
    schema = json.dumps(
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    )
    assert json.loads(str(generate("--json-schema", schema)["text"]))["a"] in (True, False)
