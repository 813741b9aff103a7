"""A process that does what its input says: a JSON object a line, and one back. Runs in an engine's environment."""

from __future__ import annotations

import json
import os
import sys

__all__ = ["answer_lines"]


def answer_lines(commands: object) -> None:
    """Calls a method for each line, by its name under "do", and ends the process with its input.

    What an engine prints goes to the standard error, so that the output has answers alone.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            told = getattr(commands, command.pop("do"))(**command)
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(told) + "\n")
        out.flush()
    os._exit(0)
