"""The tests of the local API and of transfer, unchanged, with HBM on a GPU: which files, and what may be skipped.

They run in a separate process, with the fake driver here (`make test`) and with a real one in `make test-gpu`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["LOCAL", "STREAMS", "TRANSFER", "Outcome", "run_on_gpu"]

TESTS = Path(__file__).resolve().parent

# What looks at HBM through NumPy is not for a GPU, nor is what measures memory of the machine.
LOCAL = [
    "test_swap.py",
    "test_swap_async.py",
    "test_prompt_cache.py",
    "test_prompt_cache_removal.py",
    "test_alloc.py",
    "test_events.py",
    "test_state_machine.py",
    "disk/test_medium.py",
    "disk/test_restart.py",
    "disk/test_limits.py",
    "storage/test_storage.py",
    "storage/test_storage_faults.py",
]
STREAMS = ["cuda/test_streams.py"]
TRANSFER = [
    f"transfer/test_{name}.py"
    for name in (
        *("arguments", "blocks", "failed_connects", "insert", "layouts", "limits", "parting", "peers", "regressions"),
        *("routes", "waiting"),
    )
]

# The tests that pools on a GPU have no use for, and why. All others run: one that skips fails, and so does one of these
# that runs.
NOT_ON_GPU = {
    "transfer/test_parting.py": {
        "test_blocks_of_a_killed_tcp_peer_are_released_when_it_wrote_by_ucx": "ucx",
    },
    "transfer/test_routes.py": {
        "test_ucx_writes_by_the_lane_of_the_routes_name": "ucx",
        "test_adopted_memory_travels_by_the_routes_that_reach_it": "cma",
        "test_without_ucx_the_error_says_what_to_install": "ucx",
    },
}  # fmt: skip
NO_NCCL = "NCCL is not installed"


@dataclass
class Outcome:
    """What came of the tests of one file."""

    code: int  # of pytest
    output: str
    passed: int = 0
    skipped: dict[str, set[str]] = field(default_factory=dict)  # functions, by the reason that they gave
    failures: list[str] = field(default_factory=list)  # the message of every test that failed in its body

    def check(self, file: str, *, nccl: bool, all_of_it: bool = True) -> None:
        """Fails unless every test has passed but those that are known not to be for a GPU.

        `nccl`: whether NCCL must have been used. `all_of_it`: no test was left out by name.
        """
        assert self.code == 0, self.output
        assert self.passed > 0, self.output
        expected = {name: f"not for a GPU: {what}" for name, what in NOT_ON_GPU.get(file, {}).items()}
        for reason, names in self.skipped.items():
            if reason == NO_NCCL and not nccl:
                continue
            for name in names:
                known = expected.pop(name, None)
                assert reason.startswith(known or "no reason"), f"{name} was skipped: {reason}"
        assert not (expected and all_of_it), f"these are not for a GPU, and ran: {sorted(expected)}"


def run_on_gpu(file: str, *, timeout: float, only: str = "", **variables: str) -> Outcome:
    """Runs a file of tests/python with HBM on cuda:0. `only`: as pytest's -k; `variables`: of the environment."""
    environment = os.environ | {
        "KVPOOL_TEST_DEVICE": "cuda:0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    } | variables  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-u", "-m", "pytest", "-v", "-p", "no:cacheprovider", f"--junitxml={report}"]
        try:
            done = subprocess.run(
                [*command, *(("-k", only) if only else ()), str(TESTS / file)],
                cwd=TESTS.parents[1], env=environment, capture_output=True, text=True, timeout=timeout, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            said = b"".join(part for part in (late.stdout, late.stderr) if isinstance(part, bytes))
            return Outcome(-1, f"{file} was not over after {timeout} s: {_so_far(said.decode(errors='replace'))}")
        outcome = Outcome(done.returncode, f"{file}\n{done.stdout[-8000:]}{done.stderr[-4000:]}")
        if report.is_file():
            _count(ElementTree.parse(report), outcome)
        return outcome


def _so_far(said: str) -> str:
    """What had become of the tests, of what `pytest -v` had said."""
    collected = re.search(r"collected (\d+) item", said)
    ends = re.findall(r"^\S+::(.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", said, re.MULTILINE)
    begun = re.findall(r"^\S+::(\S+)", said, re.MULTILINE)
    counts = ", ".join(f"{sum(how == one for _, how in ends)} {one.lower()}" for one in ("PASSED", "FAILED", "SKIPPED"))
    running = begun[-1] if len(begun) > len(ends) else "none"
    return f"{counts} of {collected[1] if collected else '?'} tests; {running} was running\n{said[-5000:]}"


def _count(report: ElementTree.ElementTree, outcome: Outcome) -> None:
    for case in report.iter("testcase"):
        name = case.get("name", "").partition("[")[0]
        skip, failure = case.find("skipped"), case.find("failure")
        if failure is not None:
            outcome.failures.append(failure.get("message", ""))
        elif skip is not None:
            outcome.skipped.setdefault(skip.get("message", ""), set()).add(name)
        elif case.find("error") is None:
            outcome.passed += 1
