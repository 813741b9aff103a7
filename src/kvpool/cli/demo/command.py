"""The arguments of `kvpool demo`."""

from __future__ import annotations

import argparse
from typing import Any

from kvpool.cli.demo.story import run

__all__ = ["add_parser"]

_QUESTIONS_MAX = 1000


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    parser = commands.add_parser(
        "demo",
        help="see the cache at work: NumPy only, two processes, some seconds",
        description="A small transformer in NumPy answers prompts with the cache off and on; then a second process "
        "is sent what the first one has cached. Checks that every answer is the same. With OpenBLAS, which NumPy's "
        "wheels bring, each process computes with one thread.",
    )
    parser.add_argument(
        "--prompts", type=_questions, default=6, metavar="N", help="how many are answered, from 2 (default 6)"
    )
    parser.set_defaults(run=_run)


def _questions(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 2 <= number <= _QUESTIONS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 2 to {_QUESTIONS_MAX}")
    return number


def _run(arguments: argparse.Namespace) -> None:
    run(lambda line: print(line, flush=True), arguments.prompts)
