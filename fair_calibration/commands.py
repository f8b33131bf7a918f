"""The command line: ``fair-calibration COMMAND``, also ``python -m fair_calibration COMMAND``.

Packages add commands as entry points of the group ``fair_calibration.commands``, each of which names a tuple of
`Command`. Their modules import only the standard library and this module at the top, and everything else inside
``run``. So ``--help`` works wherever the core is installed, and a command whose packages are missing names the extra to
install.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

PROGRAM = "fair-calibration"
GROUP = "fair_calibration.commands"
INTERRUPTED = 130
"""The exit status after Ctrl-C: 128 plus the number of the signal, as in shells."""


@dataclass(frozen=True)
class Command:
    """A command of the command line."""

    name: str
    help: str  # one line that says what the command does
    extra: str  # the extra of the distribution with the packages that it needs, such as "evaluation"
    add_arguments: Callable[[argparse.ArgumentParser], None]  # adds the command's arguments to its parser
    run: Callable[[argparse.Namespace], int | None]  # returns the exit status; None means 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, by default that of ``sys.argv``, and returns its exit status.

    Errors are printed as one line, with status 2; after Ctrl-C the status is 130.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    args = build_parser().parse_args(arguments)
    command: Command = args.command
    try:
        return command.run(args) or 0
    except KeyboardInterrupt as interrupt:
        return _stop(command, " ".join(["interrupted", *_notes(interrupt)]), INTERRUPTED)
    except ModuleNotFoundError as error:
        if error.name is None:
            return _stop(command, f"error: {_message(error)}", 2)
        missing = error.name.partition(".")[0]
        return _stop(
            command,
            f"error: the package {missing!r} is not installed, which this command needs: "
            f'pip install "{PROGRAM}[{command.extra}]"',
            2,
        )
    except (ImportError, MemoryError, OSError, TypeError, ValueError) as error:
        return _stop(command, f"error: {_message(error)}", 2)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all installed commands."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Finds out whether a dense encoder favours the beginning of documents, chooses settings that "
        "correct it, and encodes collections with them.",
        epilog=f"Begin with: {PROGRAM} reflection MODEL TEXTS --compare",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in find_commands():
        description = f"{command.help[:1].upper()}{command.help[1:]}."
        subparser = commands.add_parser(command.name, help=command.help, description=description)
        command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    return parser


def find_commands() -> list[Command]:
    """Returns the commands of all installed packages, in the order of their entry points' names."""
    found = sorted(entry_points(group=GROUP), key=lambda entry_point: entry_point.name)
    return [command for entry_point in found for command in entry_point.load()]


def integer_from(least: int) -> Callable[[str], int]:
    """Returns a function that converts an argument that has to be an integer of at least ``least``.

    It is for the ``type`` of `argparse.ArgumentParser.add_argument`.
    """

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
        return value

    return convert


positive_int = integer_from(1)


def strength(text: str) -> float:
    """Converts an argument that has to be a number from 0 to 1; for the ``type`` of `add_argument`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return value


def _message(error: BaseException) -> str:
    """Returns an error's message and notes as one line; without a message, the name of its class."""
    text = str(error) or type(error).__name__
    return " ".join(" ".join([text, *_notes(error)]).split())


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def _stop(command: Command, message: str, status: int) -> int:
    sys.stdout.flush()
    print(f"{PROGRAM} {command.name}: {message}", file=sys.stderr)
    return status
