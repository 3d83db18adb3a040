"""``headrace config``: a deployment as it will be run."""

import argparse
import sys
from typing import cast

from .config import load_cluster_config
from .strict import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.Command."""
    add_config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of YAML")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of every command that runs a deployment."""
    parser.add_argument(
        "config", metavar="CONFIG", help="a YAML file, or the name of a packaged one"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change one key, e.g. decode.num_slots=16",
    )


def run(args: argparse.Namespace) -> int | dict[str, object]:
    """See cli.Command."""
    config = load_cluster_config(args.config, args.overrides)
    if args.json:
        return cast("dict[str, object]", plain(config))
    sys.stdout.write(config.resolved())
    return 0
