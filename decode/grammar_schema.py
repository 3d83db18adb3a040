"""Which JSON schemas the compiler enforces completely. What it would ignore in silence is refused here, by name.

The compiler says itself where it gives up on a keyword with a warning; this file knows the rest.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, Final, cast

UNSUPPORTED: Final = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "$dynamicRef",
    "$recursiveRef",
)
_NUMBERS: Final = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_STRINGS: Final = {"minLength", "maxLength", "pattern", "format"}
_ARRAYS: Final = {"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"}
_OBJECTS: Final = {
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "unevaluatedProperties",
}
_CHOICES: Final = ("anyOf", "oneOf", "allOf")
#: Each of these is compiled alone: what stands beside it would be ignored.
_ALONE: Final = ("$ref", "const", "enum", *_CHOICES)
_ASSERTIONS: Final = _NUMBERS | _STRINGS | _ARRAYS | _OBJECTS | {"type", *_ALONE}
_MAX_REFERENCES: Final = 32

#: What JSON escapes in strings.
UNSAFE: Final = '" and \\ and control characters'
#: Such characters, `.`, negated classes, and escapes that may stand for one.
_UNSAFE: Final = re.compile(r'["\x00-\x1f.]|\[\^|\\[^dw.*+?()\[\]{}|^$/-]')
_RANGE: Final = re.compile(r"(.)-(.)", re.DOTALL)

Schema = dict[str, Any]


def check_schema(text: str) -> list[tuple[str, str]]:
    """Raise ValueError, naming place and keyword, for a schema of which a part would not be enforced.

    `text` is JSON. Whether references resolve and values have the right types is left to the compiler. Returns the
    patterns, each after its place.
    """
    try:
        root: object = json.loads(text)
    except RecursionError:
        raise ValueError("the schema is nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the schema is not JSON: {error}") from None
    patterns: list[tuple[str, str]] = []
    waiting: list[tuple[str, object]] = [("#", root)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict):
            schema = cast("Schema", value)
            _check(place, schema, root)
            waiting.extend(_children(place, schema))
            patterns.extend(_patterns(place, schema))
    return patterns


def is_plain_pattern(pattern: str) -> bool:
    """Whether a pattern names what its strings are made of, and nothing in it needs an escape in JSON."""
    ranges = ((ord(low), ord(high)) for low, high in _RANGE.findall(pattern))
    return not (
        _UNSAFE.search(pattern)
        or any(low <= unsafe <= high for low, high in ranges for unsafe in (0x1F, 0x22, 0x5C))
    )


def _children(place: str, schema: Schema) -> Iterator[tuple[str, object]]:
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(named := schema.get(key), dict):
            for name, child in cast("Schema", named).items():
                yield f"{place}/{key}/{name}", child
    for key in ("prefixItems", *_CHOICES):
        if isinstance(listed := schema.get(key), list):
            for index, child in enumerate(cast("list[object]", listed)):
                yield f"{place}/{key}/{index}", child
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield f"{place}/{key}", schema[key]
    if isinstance(names := schema.get("propertyNames"), dict):
        yield f"{place}/propertyNames", {"type": "string"} | cast("Schema", names)


def _patterns(place: str, schema: Schema) -> Iterator[tuple[str, str]]:
    if isinstance(pattern := schema.get("pattern"), str):
        yield place, pattern
    if isinstance(properties := schema.get("patternProperties"), dict):
        for pattern in cast("Schema", properties):
            yield f"{place}/patternProperties", pattern


def _check(place: str, schema: Schema, root: object) -> None:
    for key in UNSUPPORTED:
        if key in schema and schema[key] is not False:
            raise ValueError(f"{place}: {key} is not supported; take it out")
    present = _ASSERTIONS & schema.keys()
    for key in _ALONE:
        if key in present:
            _check_alone(place, schema, key, present - {key})
    if "oneOf" in schema:
        _check_disjoint(place, schema["oneOf"], root)
    types = _types(schema)
    for keys, wanted in ((_NUMBERS, {"integer", "number"}), (_STRINGS - {"format"}, {"string"})):
        if types is None and (found := sorted(keys & present)):
            allowed = " or ".join(sorted(wanted))
            raise ValueError(f'{place}: {found[0]} needs "type" beside it: {allowed}')
    required, declared = schema.get("required"), schema.get("properties", {})
    if isinstance(required, list) and isinstance(declared, dict):
        for name in cast("list[object]", required):
            if name not in declared:
                raise ValueError(f"{place}: required names {name!r}; declare it in properties")
    if "propertyNames" in schema and declared:
        raise ValueError(f"{place}: propertyNames is not supported beside properties")


def _check_alone(place: str, schema: Schema, key: str, beside: set[str]) -> None:
    types = _types(schema)
    if key in ("const", "enum") and types is not None:
        values: list[object] = [schema[key]] if key == "const" else schema[key]
        for value in values:
            if not any(_has_type(value, kind) for kind in types):
                raise ValueError(f"{place}: {key} holds {value!r}, which type excludes")
        beside = beside - {"type"}
    if key in _CHOICES and all(
        isinstance(branch, dict) and cast("Schema", branch).get("type") == schema.get("type")
        for branch in cast("Sequence[object]", schema[key])
    ):
        beside = beside - {"type"}
    if beside:
        other = min(beside)
        raise ValueError(f"{place}: {other} beside {key} is not supported; move it into {key}")


def _check_disjoint(place: str, branches: object, root: object) -> None:
    """oneOf is compiled as anyOf, which is the same where no value fits two branches."""
    if not isinstance(branches, list):
        return
    known = [_resolved(branch, root) for branch in cast("list[object]", branches)]
    for (i, one), (j, other) in combinations(enumerate(known), 2):
        if not _are_disjoint(one, other, root):
            raise ValueError(
                f"{place}: a value may fit branches {i} and {j} of oneOf; use anyOf, or tell them apart by their types"
                " or by a required property with other constants"
            )


def _are_disjoint(one: Schema, other: Schema, root: object) -> bool:
    if _are_constants_disjoint(one, other):
        return True
    types, others = _types(one), _types(other)
    if types is not None and others is not None and not _overlap(types, others):
        return True
    if types != {"object"} or others != {"object"}:
        return False
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    return any(
        _are_constants_disjoint(
            _resolved(one.get("properties", {}).get(name), root),
            _resolved(other.get("properties", {}).get(name), root),
        )
        for name in shared
    )


def _are_constants_disjoint(one: Schema, other: Schema) -> bool:
    values, others = _constants(one), _constants(other)
    return values is not None and others is not None and not values & others


def _constants(schema: Schema) -> set[str] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return {json.dumps(value, sort_keys=True) for value in cast("list[object]", values)}


def _resolved(schema: object, root: object) -> Schema:
    """The schema behind local references; an empty one where that cannot be said."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        reference = cast("Schema", schema).get("$ref")
        if reference is None:
            return cast("Schema", schema)
        if not isinstance(reference, str) or not reference.startswith("#"):
            return {}
        schema = root
        for part in reference.removeprefix("#").removeprefix("/").split("/"):
            if part and isinstance(schema, dict):
                schema = cast("Schema", schema).get(part.replace("~1", "/").replace("~0", "~"))
    return {}


def _types(schema: Schema) -> set[str] | None:
    value = schema.get("type")
    if value is None:
        return None
    return {value} if isinstance(value, str) else set(value)


def _overlap(types: set[str], others: set[str]) -> bool:
    numbers = {"integer", "number"}
    return bool(types & others) or bool(types & numbers and others & numbers)


def _has_type(value: object, kind: str) -> bool:
    match value:
        case None:
            return kind == "null"
        case bool():
            return kind == "boolean"
        case int() | float():
            return kind == "number" or (kind == "integer" and float(value).is_integer())
        case str():
            return kind == "string"
        case list():
            return kind == "array"
        case _:
            return kind == "object"
