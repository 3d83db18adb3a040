"""From plain YAML values to frozen dataclasses, strictly: no unknown key, no silent conversion.

A section is a keyword-only dataclass that lives beside what it configures. Its annotations say which values are
allowed, its ``__post_init__`` raises ConfigError for one outside a range, the string under a field says what it means.
Allowed annotations: bool, int, float, str, Literal of strings, X | None, tuple[X, ...], Mapping[str, X], a dataclass.
"""

import ast
import dataclasses
import difflib
import inspect
import itertools
import textwrap
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml

from ..transfer.errors import ConfigError

Section = TypeVar("Section")


class _StrictYaml(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice."""


def _mapping(loader: _StrictYaml, node: yaml.MappingNode) -> dict[object, object]:
    seen: set[object] = set()
    for key_node, _ in node.value:
        key = cast(object, loader.construct_object(key_node, deep=True))
        if key in seen:
            line = key_node.start_mark.line + 1
            raise ConfigError(f"line {line}: key {key!r} is written twice; keep one of them")
        seen.add(key)
    return cast(dict[object, object], loader.construct_mapping(node, deep=True))


_StrictYaml.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(text: str) -> object:
    """The plain value of a YAML text. Raises ConfigError for bad syntax and for a key written twice."""
    try:
        return cast(object, _StrictYaml(text).get_single_data())
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}") from error


def build_section(cls: type[Section], value: object, path: str = "") -> Section:
    """An instance of dataclass ``cls`` from a plain mapping; ``path`` is the dotted path of the mapping.

    Raises ConfigError that names the dotted path, the value and what is allowed.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path or 'the file'} = {value!r} is not allowed: a mapping of keys")
    given = cast(Mapping[object, object], value)
    fields = {f.name: f for f in dataclasses.fields(cast(Any, cls))}
    for key in given:
        if key not in fields:
            raise ConfigError(_unknown(_join(path, key), str(key), sorted(fields)))
    hints = get_type_hints(cls)
    values: dict[str, object] = {}
    for name, spec in fields.items():
        here = _join(path, name)
        if name in given:
            values[name] = _convert(hints[name], given[name], here)
        elif not has_default(spec):
            raise ConfigError(f"{here} is missing: {describe(hints[name])}")
    try:
        return cls(**values)
    except ConfigError as error:
        whole = not path or str(error).startswith(f"{path}.")
        raise ConfigError(str(error) if whole else f"{path}.{error}") from error


def has_default(spec: "dataclasses.Field[Any]") -> bool:
    """Whether the field may be left out."""
    return (
        spec.default is not dataclasses.MISSING or spec.default_factory is not dataclasses.MISSING
    )


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _unknown(path: str, key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"the nearest key is {path[: len(path) - len(key)]}{near[0]}; " if near else ""
    return f"{path} is not a known key: {hint}allowed are {', '.join(known)}"


def _convert(hint: Any, value: object, path: str) -> object:
    """``value`` if it is what ``hint`` allows; an integer also serves where a float is asked for."""
    if dataclasses.is_dataclass(hint):
        return build_section(cast(type[object], hint), value, path)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (inner,) = (a for a in args if a is not type(None))
        try:
            return _convert(inner, value, path)
        except ConfigError:
            if dataclasses.is_dataclass(inner):
                raise
            raise _refuse(path, value, hint) from None
    if origin is Literal:
        if isinstance(value, str) and value in args:
            return value
    elif origin is tuple:
        if isinstance(value, list):
            items = cast(list[object], value)
            return tuple(_convert(args[0], item, f"{path}[{i}]") for i, item in enumerate(items))
    elif origin is not None and issubclass(origin, Mapping):
        if isinstance(value, dict):
            items = cast(dict[object, object], value)
            return {str(k): _convert(args[1], item, _join(path, k)) for k, item in items.items()}
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif type(value) is hint:
        return value
    raise _refuse(path, value, hint)


def _refuse(path: str, value: object, hint: Any) -> ConfigError:
    return ConfigError(f"{path} = {value!r} is not allowed: {describe(hint)}")


def describe(hint: Any) -> str:
    """What values an annotation allows, in words."""
    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return "a mapping of keys"
    if origin in (Union, types.UnionType):
        return " or ".join("null" if a is type(None) else describe(a) for a in args)
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in args)
    if origin is tuple:
        return f"a list, each {describe(args[0])}"
    if origin is not None and issubclass(origin, Mapping):
        return f"a mapping of names, each to {describe(args[1])}"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
    return words[hint]


def meanings(cls: type[object]) -> dict[str, str]:
    """Field name -> the string written under the field, white space joined; base classes first."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if dataclasses.is_dataclass(owner):
            found.update(_own_meanings(owner))
    return found


def _own_meanings(cls: type[object]) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = cast(ast.ClassDef, tree.body[0]).body
    found: dict[str, str] = {}
    for field, after in itertools.pairwise(body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[field.target.id] = " ".join(str(after.value.value).split())
    return found


def plain(value: object) -> object:
    """The inverse of build_section: dataclasses become dicts, tuples lists, everything else stays."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [plain(item) for item in cast(Sequence[object], value)]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in cast(Mapping[str, object], value).items()}
    return value


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise ConfigError in the common wording unless ``ok``."""
    if not ok:
        raise ConfigError(f"{name} = {value!r} is not allowed: {allowed}")
