"""The command `headrace`.

A command is a module with two functions, `add_arguments(parser)` and `run(args) -> int`. It is imported only when it is
asked for, so that `headrace --help` is quick and a command whose extra is not installed does not break the others.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import cast

import msgspec

from headrace.engine.errors import HeadraceError, UsageError
from headrace.engine.plugins import missing_module


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One command.

    Attributes:
        module: Where its two functions are.
        summary: One line for the list of commands.
        takes_overrides: Whether `--section.key=value` may follow; they arrive as `args.overrides`, a list of strings.
    """

    module: str
    summary: str
    takes_overrides: bool = False


COMMANDS = {
    "train": Command(
        module="headrace.clients.cli.train", summary="train a model as a TOML file describes", takes_overrides=True
    ),
    "config": Command(
        module="headrace.clients.cli.config",
        summary="show or check a configuration, or print every key",
        takes_overrides=True,
    ),
    "reward": Command(module="headrace.clients.cli.reward", summary="serve or check a reward server"),
    "weights": Command(
        module="headrace.clients.cli.weights", summary="inspect, verify or compare checkpoints and weight changes"
    ),
    "bench": Command(module="headrace.clients.cli.bench", summary="measure this installation on this machine"),
}

EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; blocks until it has ended.

    Args:
        argv: Arguments without the program's name. None takes those of the process, and makes modules of the current
            folder importable, as `python -m` does.

    Returns:
        0; 2 when what was given cannot be used; 1 when something went wrong while running; 130 after Ctrl-C.
    """
    if argv is None:
        argv = sys.argv[1:]
        if not {"", os.getcwd()} & set(sys.path):
            sys.path.insert(0, os.getcwd())
    rest, debug = _take_debug(argv)
    try:
        return _run(rest, debug)
    except HeadraceError as error:
        return _fail(error, str(error), error.exit_code, debug)
    except KeyboardInterrupt as error:
        return _fail(error, "interrupted", EXIT_INTERRUPTED, debug)
    except BrokenPipeError:
        # The reader of our output is gone (`headrace config schema | head`). Python flushes once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as end:  # argparse's way of leaving after --help and after a wrong option
        return end.code if isinstance(end.code, int) else 2
    except ModuleNotFoundError as error:
        return _fail(error, f"this command {missing_module(error)}", 2, debug)
    except Exception as error:
        text = f"{type(error).__name__}: {error} (this is a defect; --debug shows where it happened)"
        return _fail(error, text, 1, debug)


def _run(argv: Sequence[str], debug: bool) -> int:
    name = next((argument for argument in argv if not argument.startswith("-")), None)
    rest, overrides = _take_overrides(argv)
    parser, subparsers = _parser()
    if name not in COMMANDS:
        parser.parse_args(rest)  # leaves with the help or with the list of commands
        parser.print_help()
        return 2
    command = COMMANDS[name]
    add_arguments, run = _functions(name, command)
    add_arguments(subparsers[name])
    args, unknown = parser.parse_known_args(rest)
    if unknown or (overrides and not command.takes_overrides):
        _refuse(subparsers[name], [*unknown, *overrides], command.takes_overrides)
    if command.takes_overrides:
        args.overrides = overrides
    args.debug = debug
    return run(args)


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="An asynchronous actor runtime for RL post-training of language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    made: dict[str, argparse.ArgumentParser] = {}
    for name, command in COMMANDS.items():
        made[name] = commands.add_parser(
            name,
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
            allow_abbrev=False,
            conflict_handler="resolve",  # a command may describe --debug in its own words
            epilog="--section.key=VALUE overrides a key; `headrace config schema` lists them."
            if command.takes_overrides
            else None,
        )
        made[name].add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser, made


class _Version(argparse.Action):
    """Reads the installed version only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from headrace import __version__

        print(f"headrace {__version__}")
        parser.exit()


def _functions(
    name: str, command: Command
) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    try:
        module = import_module(command.module)
    except ModuleNotFoundError as error:
        if error.name == command.module:
            raise UsageError(f"headrace {name} is not part of this installation") from error
        raise
    add_arguments = cast(Callable[[argparse.ArgumentParser], None], module.add_arguments)
    return add_arguments, cast(Callable[[argparse.Namespace], int], module.run)


def _take_debug(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Split off `--debug`, so that it may stand anywhere and counts even where parsing fails."""
    end = argv.index("--") if "--" in argv else len(argv)
    rest = [argument for argument in argv[:end] if argument != "--debug"]
    return [*rest, *argv[end:]], len(rest) < end


def _take_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off `--section.key=value`, which argparse would have to know one by one."""
    if not any(argument.startswith("--") and "." in argument for argument in argv):
        return list(argv), []
    from headrace.engine.config.overrides import is_override

    end = argv.index("--") if "--" in argv else len(argv)
    overrides = [argument for argument in argv[:end] if is_override(argument)]
    rest = [argument for argument in argv[:end] if not is_override(argument)]
    return [*rest, *argv[end:]], overrides


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str], takes_overrides: bool) -> None:
    """Leave with exit code 2, and say which key an option was probably meant to be."""
    first = unknown[0]
    name = first.partition("=")[0]
    if takes_overrides and name.startswith("--"):
        from headrace.engine.config.suggest import unknown_key

        raise UsageError(f"there is no option {name}; {unknown_key(name.removeprefix('--'))}")
    parser.error(f"unknown argument {first}")


def _fail(error: BaseException, text: str, exit_code: int, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    print(f"error: {text}" if exit_code != EXIT_INTERRUPTED else text, file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
