"""The command `kvpool`."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, TextIO, cast

from kvpool import _core
from kvpool.errors import Error

__all__ = ["main"]

_COMMANDS: Final = ("demo", "info", "bench", "cluster", "top", "router", "sim")
_INTERRUPTED: Final = 130  # 128 and the number of SIGINT, as shells have it


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvpool", description="The memory layer under LLM serving.")
    parser.add_argument("--version", action="version", version=f"kvpool {_core.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        # Not before: these imports take a while, and Ctrl-C meanwhile must end like any other one.
        import_module(f"kvpool.cli.{command}").add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0; 2 if it failed; 130 if Ctrl-C ended it.

    Args:
        arguments: Replace those of the process.
    """
    output = _Output(sys.stdout)
    try:
        with contextlib.redirect_stdout(cast(TextIO, output)):
            _run(arguments)
    except Error as error:
        print(f"kvpool: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvpool: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except OSError as error:
        if output.failed is not None:
            return _lost_output(output.failed)
        where = f": {error.filename}" if error.filename else ""
        print(f"kvpool: {error.strerror or error}{where}", file=sys.stderr)
        return 2
    return 0


def _run(arguments: Sequence[str] | None) -> None:
    try:
        parsed = _parser().parse_args(arguments)
        parsed.run(parsed)
    except SystemExit:  # of --help, whose text may still have to be written
        sys.stdout.flush()
        raise
    sys.stdout.flush()


class _Output:
    """Standard output, which remembers the error by which it could not be written.

    Python has None for one that was closed before the start, and print then says nothing.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.failed: OSError | None = None

    def write(self, text: str) -> int:
        try:
            if self._stream is None:
                raise OSError(errno.EBADF, "it is closed")
            return self._stream.write(text)
        except OSError as error:
            self.failed = error
            raise

    def flush(self) -> None:
        try:
            if self._stream is not None:
                self._stream.flush()
        except OSError as error:
            self.failed = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _lost_output(error: OSError) -> int:
    """The exit status when standard output cannot be written."""
    if sys.stdout is not None:  # nothing more can be written there, and Python must not try again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # the reader of a pipe, such as `head`, has what it wants
        return 0
    print(f"kvpool: standard output cannot be written: {error.strerror}", file=sys.stderr)
    return 2
