"""`headrace config show|schema|check`."""

import argparse
from pathlib import Path

from headrace.engine.config import describe_schema, effective_toml, load_config, read_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="show|schema|check", required=True)
    show = actions.add_parser("show", help="print every key with the value that is in force, as TOML")
    check = actions.add_parser("check", help="say whether a run would accept the settings (model and data aside)")
    actions.add_parser("schema", help="print every key with its default, what it may be and what it is for")
    for action in (show, check):
        action.add_argument("file", nargs="?", type=Path, metavar="FILE", help="a TOML file; without it the defaults")


def run(args: argparse.Namespace) -> int:
    """Run the action; 0 unless the configuration is refused.

    Raises:
        UsageError: There is no such method.
        ConfigError: The configuration is refused. `show` does not ask whether settings fit each other, so that an
            unfinished file can be looked at; `check` looks for neither model nor data, which may be on another host.
    """
    match args.action:
        case "schema":
            print(describe_schema(), end="")
        case "show":
            print(effective_toml(read_config(args.file, args.overrides)), end="")
        case _:
            from headrace.engine.hub.early import load_algorithm  # numpy and more, which the other actions do not need

            load_algorithm(load_config(args.file, args.overrides))
            print(f"{args.file or 'the defaults with these overrides'}: ok")
    return 0
