"""What all tests written in Python share: Hypothesis profiles, groups of tests, and the hooks of fair_skips.py."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import hypothesis
import pytest
from fair_skips import TRACES, pytest_make_collect_report, pytest_runtest_makereport, skip_is_fair  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]

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
