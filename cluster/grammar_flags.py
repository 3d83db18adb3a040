"""Structured answers on the command line: the flags of ``headrace generate``, and the Grammar they make."""

import argparse
from pathlib import Path

from ..transfer.errors import ConfigError
from ..transfer.request import Grammar


def add_grammar_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    language = parser.add_mutually_exclusive_group()
    language.add_argument(
        "--json-schema", metavar="FILE|TEXT", help="the answer is JSON of this schema"
    )
    language.add_argument("--json-object", action="store_true", help="the answer is a JSON object")
    language.add_argument("--regex", metavar="TEXT", help="all of the answer matches it")
    language.add_argument(
        "--ebnf", metavar="FILE|TEXT", help="the answer belongs to this grammar's rule root"
    )
    parser.add_argument(
        "--trigger", metavar="TEXT", default="", help="the answer is free until this text is in it"
    )


def grammar_of(args: argparse.Namespace) -> Grammar | None:
    """What the flags ask for. Raises ConfigError for a trigger alone, InvalidRequestError for a value out of range."""
    if args.json_schema is not None:
        return Grammar(kind="json_schema", text=_content(args.json_schema), trigger=args.trigger)
    if args.json_object:
        return Grammar(kind="json_object", trigger=args.trigger)
    if args.regex is not None:
        return Grammar(kind="regex", text=args.regex, trigger=args.trigger)
    if args.ebnf is not None:
        return Grammar(kind="ebnf", text=_content(args.ebnf), trigger=args.trigger)
    if args.trigger:
        raise ConfigError(
            f"--trigger {args.trigger!r} is nothing without what follows it: add --json-schema, --json-object, --regex"
            " or --ebnf"
        )
    return None


def _content(value: str) -> str:
    """The text itself, or that of the file it names."""
    try:
        return Path(value).read_text(encoding="utf-8") if Path(value).is_file() else value
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{value} cannot be read: {error}") from error
