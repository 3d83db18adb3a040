"""200 random schemas: whatever a model that knows nothing writes under the masks parses and validates."""

import json
import random
from typing import Any

import jsonschema

from headrace.decode.grammar import GrammarState

from .grammar_support import language, text_of, write

NUM_SCHEMAS = 200


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of the kinds that callers send: nested objects and arrays, bounds, enums, unions."""
    leaves = [_integer, _number, _string, _enum, _constant, _plain]
    nodes = [_object, _object, _array, _union]
    kinds = leaves if depth >= 3 or (depth and chance.random() < 0.5) else nodes
    return chance.choice(kinds)(chance, depth)


def _plain(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": chance.choice(["boolean", "null", "string", "integer"])}


def _integer(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randint(-1000, 1000)
    bounds = {"minimum": low, "maximum": low + chance.randint(0, 5000)}
    return {"type": "integer"} | chance.choice(
        [bounds, {}, {"exclusiveMinimum": low}, {"minimum": low}]
    )


def _number(chance: random.Random, depth: int) -> dict[str, Any]:
    low = round(chance.uniform(-10, 10), chance.randint(0, 3))
    return {"type": "number"} | chance.choice(
        [{}, {"minimum": low, "maximum": round(low + 2.5, 3)}]
    )


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randint(0, 5)
    return {"type": "string"} | chance.choice(
        [
            {},
            {"minLength": low, "maxLength": low + chance.randint(0, 9)},
            {"pattern": chance.choice(["^[a-z]{2,5}$", "^(yes|no)$", r"^\d{3}-\d{2}$"])},
            {"format": chance.choice(["date", "time", "uuid", "email"])},
        ]
    )


def _enum(chance: random.Random, depth: int) -> dict[str, Any]:
    values = ["a", "ab", 'q"uote', "é", "", 1, -2.5, None, True, [1], {"k": "v"}]
    return {"enum": chance.sample(values, chance.randint(1, 5))}


def _constant(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"const": chance.choice(["x", 7, None, False, [1, "b"], {"a": [None]}])}


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    schema = {"type": "array", "items": random_schema(chance, depth + 1)}
    low = chance.randint(0, 2)
    bounds = {"minItems": low, "maxItems": low + chance.randint(0, 3)}
    head = {"prefixItems": [random_schema(chance, depth + 1) for _ in range(2)]}
    return schema | chance.choice([{}, bounds, head])


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(["id", "name", "größe", "a b", 'q"', "list", "x"], chance.randint(1, 4))
    properties = {name: random_schema(chance, depth + 1) for name in names}
    required = [name for name in names if chance.random() < 0.6]
    schema = {"type": "object", "properties": properties, "required": required}
    more = {"additionalProperties": chance.choice([False, {"type": "integer"}])}
    return schema | chance.choice([{}, more])


def _union(chance: random.Random, depth: int) -> dict[str, Any]:
    if chance.random() < 0.5:
        return {"type": chance.sample(["integer", "null", "boolean"], 2)}
    return {"anyOf": [random_schema(chance, depth + 1) for _ in range(chance.randint(2, 3))]}


def test_every_answer_validates() -> None:
    finished = 0
    for seed in range(NUM_SCHEMAS):
        schema = random_schema(random.Random(seed))
        ids = write(GrammarState(language("json_schema", schema)), seed)
        if ids is not None:
            finished += 1
            text = text_of(ids)
            jsonschema.validate(
                json.loads(text), schema, format_checker=jsonschema.FormatChecker(["date", "email"])
            )
    assert finished >= 0.95 * NUM_SCHEMAS
