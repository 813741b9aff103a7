"""Runs the tests that need a GPU within a time limit, and reports the outcome of each: `make test-gpu`.

    python -m tools.gpu_tests kernels --seconds 120 build/gpu/kvpool_gpu_tests
    python -m tools.gpu_tests python --seconds 300 tests/gpu

A machine with a GPU may be had once, for minutes. So whatever ends a run, a test that hangs or a process that dies,
what was learnt by then is told: which tests passed, which failed, which was running, and which were not begun. The
status is 0 only when all have passed. Needs nothing but Python, and pytest for its tests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Run", "main", "read_progress", "run_kernels", "run_python"]

NO_GPU = 77  # of the program
PROGRESS = "KVPOOL_TEST_PROGRESS"  # where tests/gpu/conftest.py tells what it does
_GRACE_S = 5.0
_OUTPUT_END = 6000  # characters of what failed


@dataclass
class Run:
    """What became of the tests."""

    outcomes: dict[str, str] = field(default_factory=dict)  # "passed", "failed", "skipped", "not over"; of those begun
    left: list[str] = field(default_factory=list)  # not begun
    errors: list[str] = field(default_factory=list)  # what went wrong beside tests

    @property
    def good(self) -> bool:
        """Whether all tests there are have run, and none failed."""
        known = {"passed", "skipped"}
        return bool(self.outcomes) and not self.left and not self.errors and set(self.outcomes.values()) <= known

    def lines(self) -> Iterable[str]:
        """For a person, the worst last."""
        for name in self.left:
            yield f"  not run    {name}"
        for outcome in ("not over", "failed"):
            for name in self._of(outcome):
                yield f"  {outcome:9}  {name}"
        for error in self.errors:
            yield f"  {error}"
        counts = [f"{len(self._of(outcome))} {outcome}" for outcome in ("passed", "skipped", "failed", "not over")]
        total = len(self.outcomes) + len(self.left)
        yield f"{total} tests: {', '.join(counts)}, {len(self.left)} not run"

    def _of(self, outcome: str) -> list[str]:
        return [name for name, one in self.outcomes.items() if one == outcome]


def main(arguments: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="tools.gpu_tests", description="Runs the tests that need a GPU.")
    parser.add_argument("kind", choices=("kernels", "python"))
    parser.add_argument("--seconds", type=float, required=True, help="for all of them")
    parser.add_argument("what", help="the program, or the folder of tests")
    options = parser.parse_args(arguments)
    run = (run_kernels if options.kind == "kernels" else run_python)(options.what, options.seconds)
    for line in ("", *run.lines()):  # pytest may have been ended in the middle of a line
        print(line, flush=True)
    return 0 if run.good else 1


def run_kernels(program: str, seconds: float) -> Run:
    """Runs each test of the program in a separate process: one that hangs or dies does not stop the others.

    It has half of the time that is left, or all of it as the last one.
    """
    run = Run()
    until = time.monotonic() + seconds
    code, listed = _finish([program, "-ltc"], seconds)
    if code == NO_GPU:
        run.errors.append("no GPU: nothing was tested")
        return run
    names = _names_in(listed)
    if code != 0 or not names:
        run.errors.append(f"{program} does not say which tests it has ({_word(code)}): {listed.strip()[-500:]}")
        return run
    print(listed.partition("[doctest]")[0].strip(), flush=True)
    for number, name in enumerate(names):
        left_s = until - time.monotonic()
        if left_s <= 0:
            run.left = names[number:]
            break
        began = time.monotonic()
        last = number == len(names) - 1
        # A comma would separate two names.
        code, output = _finish([program, f"-tc={name.replace(',', '?')}"], left_s if last else left_s / 2)
        ran = not re.search(r"test cases:\s+0 ", output)  # a name that is not found is no failure to doctest
        outcome = "not over" if code is None else "passed" if code == 0 and ran else "failed"
        run.outcomes[name] = outcome
        print(f"{outcome:9} {time.monotonic() - began:6.1f} s  {name}", flush=True)
        if outcome != "passed":
            print(f"{output.strip()[-_OUTPUT_END:]}\n({_word(code)})", flush=True)
    return run


def run_python(folder: str, seconds: float) -> Run:
    """The tests of a folder, by one pytest, whose output goes where this one's does."""
    with tempfile.TemporaryDirectory() as place:
        progress = Path(place) / "progress.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder]
        code, _ = _finish(command, seconds, capture=False, environment={PROGRESS: str(progress)})
        run = read_progress(progress.read_text().splitlines() if progress.is_file() else [])
    if code is None:
        run.errors.append(f"not over after {seconds:.0f} s")
    elif code != 0 and "failed" not in run.outcomes.values():
        run.errors.append(f"pytest has failed ({_word(code)})")
    elif not run.outcomes:
        run.errors.append("no test has run")
    return run


def read_progress(lines: Iterable[str]) -> Run:
    """What tests/gpu/conftest.py has told. The last line may be cut."""
    run = Run()
    for line in lines:
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if "collected" in told:
            run.left = list(told["collected"])
        elif "begun" in told:
            run.outcomes[told["begun"]] = "not over"
        elif run.outcomes.get(told["ended"]) != "failed":
            run.outcomes[told["ended"]] = told["outcome"]
    run.left = [name for name in run.left if name not in run.outcomes]
    return run


def _names_in(listed: str) -> list[str]:
    """Of doctest's list, between two lines of equal signs."""
    return "".join(listed.split("\n=====")[1:2]).splitlines()[1:]


def _finish(
    command: Sequence[str], seconds: float, *, capture: bool = True, environment: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """The status, None when it was not over in time, and the output. Ends what the command has started, too."""
    with tempfile.TemporaryFile() as output:
        started = subprocess.Popen(
            command,
            stdout=output if capture else None,
            stderr=subprocess.STDOUT if capture else None,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = started.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(started)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _end(started: subprocess.Popen[bytes]) -> None:
    """The process and those that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(started.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(_GRACE_S)
            if number == signal.SIGKILL:
                return


def _word(code: int | None) -> str:
    if code is None:
        return "it was not over in its time"
    return f"status {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
