"""Schemas: what is accepted is enforced, what is not enforced is refused by name."""

import json
from typing import Any

import jsonschema
import pytest

from headrace.decode.grammar import GrammarState
from headrace.decode.grammar_schema import UNSUPPORTED, check_schema

from .grammar_support import accepts, language, text_of, write

INTEGER: dict[str, Any] = {"type": "integer"}
TWO: dict[str, Any] = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}


def tagged(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": name}, "x": INTEGER},
        "required": ["kind"],
    }


ENFORCED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (INTEGER | {"minimum": 4, "maximum": 10, "multipleOf": 3}, ["6", "9"], ["3", "12", "5", "6.0"]),
    ({"type": "number", "minimum": 0.1, "maximum": 0.3}, ["0.2"], ["0.05", "0.31", "1", "0"]),
    ({"type": ["integer", "null"], "minimum": 3}, ["null", "3"], ["2"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"éé"'], ['"a"', '"abcd"']),
    ({"type": "string", "pattern": "^[ab]{2}$"}, ['"ab"'], ['"abc"', '"a"']),
    ({"type": "string", "format": "date"}, ['"2020-01-02"'], ['"soon"']),
    ({"enum": ["a", 1, None]}, ['"a"', "1", "null"], ["2", '"b"']),
    (
        {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2},
        ["[1]", "[1,2]"],
        ["[]", "[1,2,3]"],
    ),
    ({"type": "array", "prefixItems": [INTEGER], "items": False}, ["[1]"], ["[1,2]", '["a"]']),
    (TWO | {"required": ["a"]}, ['{"a":1}', '{"a":1,"b":2}'], ['{"b":1}', '{"a":1,"c":2}', "{}"]),
    (TWO | {"minProperties": 1}, ['{"b":1}'], ["{}"]),
    (TWO | {"maxProperties": 1}, ['{"b":1}'], ['{"a":1,"b":2}']),
    (
        TWO | {"additionalProperties": {"type": "string"}},
        ['{"a":1,"c":"x"}'],
        ['{"c":"x","a":"y"}', '{"c":1}'],
    ),
    (
        {
            "type": "object",
            "propertyNames": {"pattern": "^[a-c]$"},
            "additionalProperties": INTEGER,
        },
        ['{"a":1}'],
        ['{"ab":1}', '{"a":"x"}'],
    ),
    ({"anyOf": [INTEGER, {"type": "string"}]}, ["1", '"a"'], ["true"]),
    (
        {"oneOf": [tagged("p"), tagged("q")]},
        ['{"kind":"p","x":1}', '{"kind":"q"}'],
        ['{"kind":"r"}'],
    ),
    (
        {
            "$defs": {"p": tagged("p"), "q": tagged("q")},
            "oneOf": [{"$ref": "#/$defs/p"}, {"$ref": "#/$defs/q"}],
        },
        ['{"kind":"p"}', '{"kind":"q","x":3}'],
        ["{}"],
    ),
    ({"allOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": INTEGER}, "title": "t"}, ["1"], ['"a"']),
    (
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                    "required": ["next"],
                }
            },
            "$ref": "#/$defs/node",
        },
        ['{"next":null}', '{"next":{"next":null}}'],
        ["{}", '{"next":{}}'],
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED, ids=lambda v: json.dumps(v)[:40])
def test_what_is_accepted_is_enforced(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    of = language("json_schema", schema)
    for text in good:
        jsonschema.validate(json.loads(text), schema)
        assert accepts(of, text), text
    for text in bad:
        assert not accepts(of, text), text


REFUSED: list[tuple[object, str]] = [
    *(
        ({keyword: {}}, rf"#: {keyword.replace('$', '.')} is not supported")
        for keyword in UNSUPPORTED
    ),
    ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "#/items: uniqueItems"),
    ({"minimum": 3}, 'minimum needs "type" beside it: integer or number'),
    ({"minLength": 3}, 'minLength needs "type" beside it: string'),
    ({"properties": {"a": {"$ref": "#", "minimum": 3}}}, r"#/properties/a: minimum beside \$ref"),
    ({"enum": [1, 2], "minimum": 2}, "minimum beside enum"),
    ({"enum": [1, "a"], "type": "integer"}, "enum holds 'a', which type excludes"),
    ({"const": 1, "type": "string"}, "const holds 1"),
    (TWO | {"anyOf": [{"required": ["a"]}]}, "properties beside anyOf|required names"),
    ({"type": "object", "required": ["a"]}, "required names 'a'; declare it"),
    (TWO | {"propertyNames": {"pattern": "a"}}, "propertyNames is not supported beside"),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "branches 0 and 1 of oneOf"),
    ({"oneOf": [TWO, tagged("p")]}, "branches 0 and 1 of oneOf"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=lambda v: json.dumps(v)[:40])
def test_what_would_be_ignored_is_refused(schema: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_schema(json.dumps(schema))


def test_text_that_is_no_schema_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the schema is not JSON: .* line 1 column 2"):
        check_schema("{")
    with pytest.raises(ValueError, match="nested too deep"):
        check_schema('{"items":' * 100_000 + "{}" + "}" * 100_000)


def test_annotations_and_properties_of_any_name_are_no_keywords() -> None:
    names = {"not": INTEGER, "if": INTEGER, "minimum": INTEGER, "$ref": INTEGER}
    check_schema(json.dumps({"type": "object", "properties": names, "title": "t", "default": {}}))
    check_schema(json.dumps({"type": "array", "uniqueItems": False}))
    check_schema("true")


def test_strings_of_limited_length_hold_no_control_characters() -> None:
    of = language("json_schema", {"type": "string", "minLength": 1, "maxLength": 5})
    assert accepts(of, '"a b"')
    for raw in ("\x05", "\t", "\x1f"):
        assert not accepts(of, f'"a{raw}b"')


PATTERNS = [
    ("^[a-z]{1,2000}$", True),
    (r"^\d{3}-\w+\.$", True),
    ("^.{0,100}$", True),
    ('^["a]$', True),
    ('^a"b$', False),
    (r"^\n$", False),
    ('^.*"$', False),
]


@pytest.mark.parametrize(("pattern", "is_fine"), PATTERNS)
def test_patterns_that_would_give_broken_strings_are_refused(pattern: str, is_fine: bool) -> None:
    schema = {"type": "object", "properties": {"p": {"type": "string", "pattern": pattern}}}
    if is_fine:
        state = GrammarState(language("json_schema", schema | {"required": ["p"]}))
        ids = write(state, seed=1)
        assert ids is not None
        jsonschema.validate(json.loads(text_of(ids)), schema)
    else:
        with pytest.raises(ValueError, match="#/properties/p: pattern"):
            language("json_schema", schema)
