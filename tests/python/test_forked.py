"""The forks that tests start: each begins as a new interpreter does, and the test learns how it ends."""

from __future__ import annotations

import os
import signal
import subprocess

import forked
import pytest
from kit import run_script
from transfer.kit import Child


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return forked.run(code, timeout=60, environment=os.environ | variables)


def test_the_output_and_exit_of_a_fork_are_reported():
    said = run("import sys\nprint(__name__)\nprint('oh', file=sys.stderr)\nsys.exit(3)")
    assert (said.returncode, said.stdout, said.stderr) == (3, "__main__\n", "oh\n")
    said = run("import atexit\natexit.register(print, 'over')\n1 / 0")
    assert (said.returncode, said.stdout) == (1, "over\n")
    assert "ZeroDivisionError" in said.stderr
    assert run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)").returncode == -signal.SIGKILL
    assert "DeprecationWarning: old" in run("import warnings\nwarnings.warn('old', DeprecationWarning)").stderr
    with pytest.raises(AssertionError, match="left"):
        run_script("raise SystemExit('left')")


def test_a_fork_that_takes_too_long_is_killed():
    with pytest.raises(subprocess.TimeoutExpired) as late:
        forked.run("import time\nprint('begun', flush=True)\ntime.sleep(60)", timeout=0.5, environment=dict(os.environ))
    assert late.value.output in ("begun\n", "")


LOOK = """
import os, threading, kvpool
here = os.listdir("/proc/self/fd")
print(len(here), threading.active_count(), len(os.listdir("/proc/self/task")))
print(os.environ["FORKED"], os.environ.get("KVPOOL_LONG"), os.getcwd())
"""


def test_a_fork_shares_nothing_with_those_that_run_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = f"4 1 1\nmine None {tmp_path}\n"  # the fourth is of the look itself
    environment = {name: value for name, value in os.environ.items() if name != "KVPOOL_LONG"} | {"FORKED": "mine"}
    child = Child()
    pool = child("pool = small_pool(); pool.peers.listen(address_of('shm'))")
    assert pool.startswith("unix:")
    seen = forked.run(LOOK, timeout=60, environment=environment)
    assert (seen.stdout, seen.stderr) == (expected, "")
    assert child("os.environ.get('FORKED')") is None
    child.close()
    assert child.process.returncode == 0


def test_a_killed_child_has_ended_and_its_pid_is_reported():
    child = Child()
    assert child("os.getpid()") == child.process.pid
    assert child.process.poll() is None
    child.kill()
    assert child.process.poll() == -signal.SIGKILL
    child.kill(signal.SIGCONT)  # does nothing
    child.close()
    for _ in range(3):  # imports and changes of one are not there for the next
        assert run("import sys, kvpool\nassert 'wave' not in sys.modules\nimport wave\nkvpool.changed = 1").stderr == ""
        assert run("import kvpool\nassert not hasattr(kvpool, 'changed')").stderr == ""
