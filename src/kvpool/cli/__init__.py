"""The command `kvpool`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvpool import _core
from kvpool.cli import cluster, info, router, sim, top
from kvpool.errors import Error

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvpool", description="The memory layer under LLM serving.")
    parser.add_argument("--version", action="version", version=f"kvpool {_core.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    info.add_parser(commands)
    cluster.add_parser(commands)
    router.add_parser(commands)
    sim.add_parser(commands)
    top.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0, or 2 if it failed.

    Args:
        arguments: Replace those of the process.
    """
    parsed = _parser().parse_args(arguments)
    try:
        parsed.run(parsed)
    except Error as error:
        print(f"kvpool: {error}", file=sys.stderr)
        return 2
    return 0
