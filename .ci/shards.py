"""Runs the C++ tests in parts, some at a time, each with a report: build/reports/cpp-asan-1of6.txt and so on.

python .ci/shards.py build/reports/cpp-asan PARTS AT_ONCE SECONDS COMMAND...

Prints the report of each part when it ends. A part that takes longer than SECONDS is killed, and its report says so.
The status is 0 only if every part passed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def run_part(report: Path, part: int, parts: int, seconds: float, command: list[str]) -> bool:
    """Whether the part passed."""
    began = time.monotonic()
    with report.open("w") as out:
        # A group of processes, so that what the tests have started ends with them.
        child = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "KVPOOL_SHARD": f"{part}/{parts}"},
            start_new_session=True,
        )
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.terminate()  # it says which test was running
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            status = -signal.SIGKILL
            out.write(f"\nkilled after {seconds:.0f} s\n")
        if status < 0:
            out.write(f"\nended by signal {-status}\n")
    took = time.monotonic() - began
    print(f"-- part {part} of {parts}, {took:.0f} s, status {status}\n{report.read_text(errors='replace')}", flush=True)
    return status == 0


def main(arguments: list[str]) -> int:
    """Runs all parts, whatever the first ones say."""
    prefix, parts, at_once, seconds = arguments[0], int(arguments[1]), int(arguments[2]), float(arguments[3])

    def run(part: int) -> bool:
        return run_part(Path(f"{prefix}-{part}of{parts}.txt"), part, parts, seconds, arguments[4:])

    for old in Path(prefix).parent.glob(f"{Path(prefix).name}-*of*.txt"):
        old.unlink()
    with ThreadPoolExecutor(at_once) as pool:
        return 0 if all(list(pool.map(run, range(1, parts + 1)))) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
