"""The summary of `make test-gpu`: the machine, and the tests that ran."""

from __future__ import annotations

import ctypes
import json
import os

import pytest
from gpu_memory import driver
from transfer.kit import nccl_setting


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The suites first: they matter most when a session is cut short."""
    items.sort(key=lambda item: "test_suites" not in item.nodeid)


def _tell(**what: object) -> None:
    """To tools/gpu_tests.py, which says it when this run is ended from outside."""
    where = os.environ.get("KVPOOL_TEST_PROGRESS")
    if where:
        with open(where, "a") as file:
            file.write(json.dumps(what) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    _tell(collected=[item.nodeid for item in session.items])


def pytest_runtest_logstart(nodeid: str) -> None:
    _tell(begun=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _tell(ended=report.nodeid, outcome=report.outcome)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("on the GPU")
    version, count = ctypes.c_int(), ctypes.c_int()
    code = driver().cuInit(0)
    driver().cuDriverGetVersion(ctypes.byref(version))
    if code == 0:
        driver().cuDeviceGetCount(ctypes.byref(count))
    terminalreporter.line(f"{count.value} GPUs, CUDA driver {version.value // 1000}.{version.value % 1000 // 10}, "
                          f"NCCL: {nccl_setting() or 'none, so its route was not tested'}")  # fmt: skip
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        said = dict(report.user_properties)
        if report.when == "call" and said:
            terminalreporter.line(f"{said['file']:28} {said['passed']} passed, {said['skipped']} skipped as they may")
