"""Writes docs/configuration.md from the configuration classes: ``python -m headrace.scripts.config_reference``."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any, cast, get_type_hints

from ..cluster.config import PACKAGE_ROOT, ClusterConfig
from ..cluster.strict import describe, has_default, meanings, plain

TARGET = PACKAGE_ROOT / "docs" / "configuration.md"
HEAD = """# Configuration

One YAML file describes one deployment; `configs/` holds complete ones. An unknown key is an error with its path, and so
is a value of the wrong type or outside its range. `headrace config CONFIG` prints a deployment with every default
filled in, and `--set decode.ranks=4` changes one key.

This file is written by `python -m headrace.scripts.config_reference` from the classes that are configured.
"""


def render() -> str:
    """The whole document."""
    return HEAD + "".join(_section(path, cls) for path, cls in _sections("", ClusterConfig))


def _sections(path: str, cls: type[object]) -> Iterator[tuple[str, type[object]]]:
    """Every mapping of the file, outermost first, with its dotted path."""
    yield path, cls
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _sections(f"{path}.{name}" if path else name, cast(type[object], hint))


def _section(path: str, cls: type[object]) -> str:
    rows = "".join(_rows(cls))
    purpose = (cls.__doc__ or "").split("\n\n", maxsplit=1)[0]
    title = f"`{path}`" if path else "The file"
    table = f"| key | value | default | meaning |\n|---|---|---|---|\n{rows}"
    return f"\n## {title}\n\n{' '.join(purpose.split())}\n\n{table}"


def _rows(cls: type[object]) -> Iterator[str]:
    hints, words = get_type_hints(cls), meanings(cls)
    for spec in dataclasses.fields(cast(Any, cls)):
        if spec.name not in words:
            raise SystemExit(
                f"{cls.__name__}.{spec.name} has no meaning: write a string under the field"
            )
        yield f"| `{spec.name}` | {describe(hints[spec.name])} | {_default(spec)} | {words[spec.name]} |\n"


def _default(spec: "dataclasses.Field[Any]") -> str:
    if not has_default(spec):
        return "required"
    value = spec.default
    if spec.default_factory is not dataclasses.MISSING:
        value = spec.default_factory()
    return "see below" if dataclasses.is_dataclass(value) else f"`{json.dumps(plain(value))}`"


def main() -> None:
    """Write the file."""
    TARGET.write_text(render(), encoding="utf-8")
    sys.stdout.write(f"{TARGET}\n")


if __name__ == "__main__":
    main()
