"""The ``headrace`` command.

A command is a module with ``add_arguments(parser)`` and ``run(args)``; only the module of the command that was asked
for is imported. ``run`` returns an exit status, or a document (a list only with ``--json``): with ``--json`` that
document is all that reaches standard output, whatever ray or a library prints meanwhile.

Exit status: 0 done, 1 failed, 2 something the user can mend, 130 interrupted, 143 terminated.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Generator, Sequence
from typing import Protocol, TextIO, cast

from .. import __version__
from ..transfer.errors import ConfigError, HeadraceError, RequestError

EXIT_FAILED, EXIT_USER, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143

# command -> (what it does, its module); a space in a name makes a group
COMMANDS = {
    "generate": ("continue one prompt in this process, without a cluster", ".generate"),
    "batch": ("answer a file of requests", ".batch.command"),
    "submit": ("run a command as a job on a Ray cluster", ".submit"),
    "bench transfer": ("measure how fast a handoff crosses", ".bench.transfer"),
    "bench exchange": ("measure the expert exchange of one instance", ".bench.exchange"),
    "bench engine": ("measure one prefill and one decode rank by themselves", ".bench.engine"),
    "bench cache": ("replay a trace through a prefix cache", ".bench.cache"),
    "bench tiers": ("measure how fast blocks are stored and loaded", ".bench.tiers"),
    "bench eplb": ("compare rebalancing plans on the same loads", ".bench.eplb"),
    "eplb plan": ("plan the placement of experts for a saved load", ".eplb.commands.plan"),
    "eplb replay": ("rebalance over a saved load as a deployment would", ".eplb.commands.replay"),
    "eplb record": ("run a batch and save which experts it uses", ".eplb.commands.record"),
    "eplb show": ("show where experts lie and how even the load is", ".eplb.commands.show"),
    "eplb make-load": ("save a synthetic load", ".eplb.commands.make_load"),
    "cache stat": ("show what a folder of stored blocks holds", ".cache.stat"),
    "cache verify": ("read every stored block of a folder and list broken ones", ".cache.verify"),
    "cache clear": ("remove the stored blocks of a folder", ".cache.clear"),
    "config": ("print a deployment with every default filled in", ".show_config"),
}
GROUPS = {
    "cache": "look after folders of stored blocks",
    "bench": "measure parts of the cluster",
    "eplb": "see and plan how the load is spread over ranks that share experts",
}


class Command(Protocol):
    """What a command's module holds."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the command's own arguments."""

    def run(
        self, args: argparse.Namespace
    ) -> int | dict[str, object] | list[dict[str, object]] | None:
        """Does it: returns an exit status (None is 0) or a document."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, chosen = _build_parser(arguments)
    args = parser.parse_args(arguments)
    if chosen is None:
        parser.print_help()
        return EXIT_USER
    terminated = _interrupt_on_sigterm()
    try:
        if getattr(args, "json", False):
            with _result_stream() as stream:
                return _report(chosen.run(args), stream, as_json=True)
        return _report(chosen.run(args), sys.stdout, as_json=False)
    except KeyboardInterrupt:
        return EXIT_TERMINATED if terminated else EXIT_INTERRUPTED
    except HeadraceError as error:
        if args.debug:
            raise
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER if isinstance(error, ConfigError | RequestError) else EXIT_FAILED
    except BrokenPipeError:  # the reader of our output has gone, as in `headrace ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (
        Exception
    ) as error:  # a bug of ours; the user still gets one line, and the way to the rest
        if args.debug:
            raise
        sys.stderr.write(f"error: {type(error).__name__}: {error} (--debug shows where)\n")
        return EXIT_FAILED


def _build_parser(arguments: Sequence[str]) -> tuple[argparse.ArgumentParser, Command | None]:
    """The parser, complete for the command that the arguments name, and that command's module."""
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="Disaggregated prefill/decode cluster on Ray for DeepSeek-V4.1-Flash.",
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(metavar="COMMAND")
    levels = {"": commands}
    for group, text in GROUPS.items():
        inner = commands.add_parser(group, help=text, description=text.capitalize() + ".")
        levels[group] = inner.add_subparsers(metavar="WHAT", required=True)
    words = [word for word in arguments if not word.startswith("-")]
    chosen: Command | None = None
    for name, (text, module) in COMMANDS.items():
        group, _, rest = name.rpartition(" ")
        sub = levels[group].add_parser(rest, help=text, description=text.capitalize() + ".")
        if words[: len(name.split())] == name.split():
            chosen = cast("Command", importlib.import_module(module, __package__))
            chosen.add_arguments(sub)
            sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
    version = commands.add_parser("version", help="print the version")
    if words[:1] == ["version"]:
        version.add_argument("--json", action="store_true", help="print a JSON document")
        chosen = _Version()
    return parser, chosen


class _Version:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""

    def run(self, args: argparse.Namespace) -> dict[str, object]:
        """See Command."""
        del args
        return {"version": __version__}


def _report(
    result: int | dict[str, object] | list[dict[str, object]] | None,
    stream: TextIO,
    *,
    as_json: bool,
) -> int:
    if isinstance(result, list):
        stream.write(json.dumps(result, allow_nan=False) + "\n")
        stream.flush()
        return 0
    if not isinstance(result, dict):
        return result or 0
    status = cast("int", result.pop("exit_status", 0))
    if as_json:
        stream.write(json.dumps(result, allow_nan=False) + "\n")
    else:
        stream.writelines(f"{key}: {value}\n" for key, value in result.items())
    stream.flush()
    return status


@contextlib.contextmanager
def _result_stream() -> Generator[TextIO]:
    """The real standard output, for one document; everything else that is printed goes to standard error meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    before = sys.stdout
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        with os.fdopen(kept, "w", encoding="utf-8", closefd=False) as stream:
            yield stream
    finally:
        sys.stdout = before
        os.dup2(kept, 1)
        os.close(kept)


def _interrupt_on_sigterm() -> list[int]:
    """Makes SIGTERM (`ray job stop`, a batch system) end a command as Ctrl-C does; the list tells that it came."""
    came: list[int] = []

    def handle(number: int, frame: object) -> None:
        del frame
        came.append(number)
        signal.raise_signal(signal.SIGINT)

    with contextlib.suppress(ValueError):  # not the main thread: the caller's own affair
        signal.signal(signal.SIGTERM, handle)
    return came


if __name__ == "__main__":
    sys.exit(main())
