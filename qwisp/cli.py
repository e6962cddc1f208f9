"""What qwisp's command lines have in common: exit codes, the model's option, how a command ends."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from qwisp.errors import QwispError

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def run_command(name: str, command: Callable[[], int]) -> int:
    """Run a command and return its exit status; what goes wrong by name is one line on stderr.

    Args:
        name: what that line starts with.
        command: returns the exit status of a command that came to its end.
    """
    try:
        status = command()
        sys.stdout.flush()
    except QwispError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Nobody reads any more; without this the interpreter complains once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return status


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the option that says which model."""
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="model folder (default: the embedded model)"
    )


def try_capacity(word: str) -> int | Literal["auto"] | None:
    """The capacity that a word spells: a whole number from 1 on, or "auto"; None if neither."""
    if word == "auto":
        return "auto"
    return int(word) if word.isdecimal() and int(word) > 0 else None
