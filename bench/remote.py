"""Runs the measured code in a separate process, and sends it requests.

Each bench gets a fresh process, so that no bench sees the heap, the caches or the garbage of another, and a peer can
live in its own virtual environment. While one process is asked the others wait for their next question, so subjects
can take turns.

The process runs `python -m bench.remote MODULE`, where MODULE has a class `Subject`; a question names one of its
methods. Questions and answers are JSON, one a line.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
ANSWER_S_MAX = 600.0


class RemoteError(RuntimeError):
    """The process died, did not answer in time, or answered with an error."""


class Remote:
    """One process, from the parent's side. Use it in a `with`, or close it."""

    def __init__(
        self,
        module: str,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        answer_s_max: float = ANSWER_S_MAX,
    ) -> None:
        """Starts the process and does not wait for it.

        Args:
            module: With the class `Subject`.
            python: The interpreter, which may be that of another virtual environment.
            environment: Variables to add.
            answer_s_max: How long an answer may take.
        """
        self.module = module
        self._answer_s_max = answer_s_max
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._process = subprocess.Popen(
            [python, "-m", "bench.remote", module],
            cwd=_ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._ready = False
        self._closed = False

    def ready(self) -> None:
        """Waits until its module is imported. The first question does it too."""
        if not self._ready:
            self._answer()
            self._ready = True

    def ask(self, operation: str, /, **arguments: Any) -> Any:
        """Calls a method of the Subject and returns what it returns.

        Raises:
            RemoteError: With the end of what the process wrote to its standard error.
        """
        self.ready()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([operation, arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RemoteError(f"{self.module} died: {self._error_text()}") from None
        return self._answer()

    def _answer(self) -> Any:
        output = self._process.stdout
        assert output is not None
        # The parent never reads ahead: it asks one question and reads one line, so select sees all there is.
        if not select.select([output], [], [], self._answer_s_max)[0]:
            raise RemoteError(f"{self.module} did not answer for {self._answer_s_max:.0f} s")
        line = output.readline()
        if not line:
            raise RemoteError(f"{self.module} died: {self._error_text()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RemoteError(f"{self.module}: {answer['error']}")
        return answer["value"]

    def _error_text(self) -> str:
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        return text[-500:] or "it wrote no message"

    def close(self) -> None:
        """Ends the process. Idempotent."""
        if self._closed:
            return
        self._closed = True
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # it leaves by itself when there are no more questions
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(module: str) -> None:
    """The child: answers until the parent closes the pipe."""
    # Libraries print as they like; only answers may reach the parent.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        subject = importlib.import_module(module).Subject()
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}")
        return
    gc.freeze()  # what was imported stays; a collection between two questions need not walk it
    answer(value=None)
    for line in sys.stdin:
        operation, arguments = json.loads(line)
        try:
            answer(value=getattr(subject, operation)(**arguments))
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer(error=f"{operation}: {type(error).__name__}: {error}")
    os._exit(0)  # a tree of millions of Python objects takes seconds to tear down, and nobody waits for that


if __name__ == "__main__":
    _serve(sys.argv[1])
