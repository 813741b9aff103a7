"""The command `kvpool`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

from kvpool import _core
from kvpool.cli import bench, cluster, demo, info, router, sim, top
from kvpool.errors import Error

__all__ = ["main"]

_INTERRUPTED: Final = 130  # 128 and the number of SIGINT, as shells have it


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvpool", description="The memory layer under LLM serving.")
    parser.add_argument("--version", action="version", version=f"kvpool {_core.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, info, bench, cluster, top, router, sim):
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0; 2 if it failed; 130 if Ctrl-C ended it.

    Args:
        arguments: Replace those of the process.
    """
    parsed = _parser().parse_args(arguments)
    try:
        parsed.run(parsed)
        sys.stdout.flush()
    except Error as error:
        print(f"kvpool: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvpool: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
