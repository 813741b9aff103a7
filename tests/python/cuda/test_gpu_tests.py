"""The report of `make test-gpu` when its time is over, or a process dies: with programs in place of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import gpu_suites
import pytest

ROOT = Path(__file__).resolve().parents[3]
LINE = "=" * 79
NAMES = ["a copy is right", "a kernel, that never ends", "a test that dies", "a test that is wrong", "the last"]

# Answers as a doctest program; the name of a test says what it does.
PROGRAM = f"""\
#!{sys.executable}
import os, signal, sys, time
names = {NAMES!r}
print("NVIDIA, sm_90")
if sys.argv[1] == "-ltc":
    print('[doctest] doctest version is "2.4.12"', "[doctest] listing all test case names", {LINE!r}, *names, {LINE!r},
          "[doctest] unskipped test cases passing the current filters: 5", sep="\\n")
    sys.exit()
(name,) = (name for name in names if name.replace(",", "?") == sys.argv[1].removeprefix("-tc="))
if "never" in name and os.environ.get("HANGS"):
    print("begins to wait", flush=True)
    time.sleep(600)
if "dies" in name and os.environ.get("DIES"):
    os.kill(os.getpid(), signal.SIGSEGV)
failed = "wrong" in name and bool(os.environ.get("FAILS"))
if failed:
    print("7 is not 8")
print(f"[doctest] test cases: 1 | {{1 - failed}} passed | {{int(failed)}} failed | 4 skipped")
sys.exit(failed)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "kvpool_gpu_tests"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    return path


def run_tool(kind: str, what: Path, seconds: float, **variables: str) -> tuple[int, str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables
    command = [sys.executable, "-m", "tools.gpu_tests", kind, "--seconds", str(seconds), str(what)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert ran.stderr == ""
    return ran.returncode, ran.stdout


def test_all_tests_of_the_program_pass(program):
    code, said = run_tool("kernels", program, 60)
    assert code == 0, said
    assert said.splitlines()[0] == "NVIDIA, sm_90"
    assert said.splitlines()[-1] == "5 tests: 5 passed, 0 skipped, 0 failed, 0 not over, 0 not run"
    assert all(name in said for name in NAMES)


def test_a_test_that_hangs_dies_or_fails_costs_no_other_and_is_named(program):
    code, said = run_tool("kernels", program, 12, HANGS="1", DIES="1", FAILS="1")
    assert code == 1
    assert said.splitlines()[-1] == "5 tests: 2 passed, 0 skipped, 2 failed, 1 not over, 0 not run"
    end = said.splitlines()[-4:-1]
    assert end == [f"  not over   {NAMES[1]}", f"  failed     {NAMES[2]}", f"  failed     {NAMES[3]}"]
    assert "begins to wait" in said
    assert "SIGSEGV" in said
    assert "7 is not 8" in said


def test_tests_that_did_not_begin_in_time_are_named(program):
    slow = program.with_name("slow")
    slow.write_text(PROGRAM.replace("failed = ", "time.sleep(600)\nfailed = "))
    slow.chmod(0o755)
    began = time.monotonic()
    code, said = run_tool("kernels", slow, 3)
    assert code == 1
    assert time.monotonic() - began < 60
    assert "not over" in said
    last = said.splitlines()[-1]
    assert last.startswith("5 tests: 0 passed")


def test_a_machine_without_a_gpu_has_tested_nothing(tmp_path):
    program = tmp_path / "none"
    program.write_text(f"#!{sys.executable}\nimport sys\nprint('no CUDA GPU')\nsys.exit(77)\n")
    program.chmod(0o755)
    code, said = run_tool("kernels", program, 60)
    assert (code, said.splitlines()[:2]) == (1, ["", "  no GPU: nothing was tested"])
    assert said.splitlines()[-1].startswith("0 tests: ")


FOLDER = """
    import os, time

    def test_first():
        pass

    def test_second():
        if os.environ.get("FAILS"):
            assert 7 == 8

    def test_third():
        if os.environ.get("HANGS"):
            time.sleep(600)
        if os.environ.get("DIES"):
            os._exit(3)

    def test_fourth():
        pass
"""


@pytest.fixture
def folder(tmp_path):
    """Tests beside the very conftest.py of tests/gpu, without what that one asks of a GPU."""
    hooks = (ROOT / "tests" / "gpu" / "conftest.py").read_text().partition("\ndef pytest_terminal_summary")[0]
    kept = [line for line in hooks.splitlines() if not line.startswith(("from gpu_memory", "from transfer"))]
    (tmp_path / "conftest.py").write_text("\n".join(kept))
    (tmp_path / "test_it.py").write_text(textwrap.dedent(FOLDER))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def test_the_python_tests_pass(folder):
    code, said = run_tool("python", folder, 100)
    assert code == 0, said
    assert said.splitlines()[-1] == "4 tests: 4 passed, 0 skipped, 0 failed, 0 not over, 0 not run"


@pytest.mark.parametrize(("end", "word"), [("HANGS", "not over after 10 s"), ("DIES", "(status 3)")])
def test_python_tests_that_do_not_finish_report_what_had_passed_and_what_was_left(folder, end, word):
    code, said = run_tool("python", folder, 10, **{end: "1"})
    assert code == 1
    lines = said.splitlines()
    assert lines[-1] == "4 tests: 2 passed, 0 skipped, 0 failed, 1 not over, 1 not run"
    assert "test_fourth" in lines[-4]
    assert lines[-4].startswith("  not run")
    assert "test_third" in lines[-3]
    assert lines[-3].startswith("  not over")
    assert word in lines[-2]


def test_a_python_test_that_fails_is_named_and_the_others_run(folder):
    code, said = run_tool("python", folder, 100, FAILS="1")
    assert code == 1
    assert said.splitlines()[-1] == "4 tests: 3 passed, 0 skipped, 1 failed, 0 not over, 0 not run"
    assert "test_second" in said.splitlines()[-2]


def test_an_unfinished_suite_reports_what_had_passed():
    said = "\n".join([
        "collected 4 items", "", "tests/python/test_x.py::test_one PASSED [ 25%]",
        "tests/python/test_x.py::test_two[a b] FAILED [ 50%]", "tests/python/test_x.py::test_three ",
    ])  # fmt: skip
    assert gpu_suites._so_far(said).startswith("1 passed, 1 failed, 0 skipped of 4 tests; test_three was running")


def test_truncated_progress_is_read_as_far_as_it_goes():
    code = (
        "import json; from tools.gpu_tests import read_progress\n"
        'run = read_progress([\'{"collected": ["a", "b"]}\', \'{"begun": "a"}\', \'{"ended": "a", "outc\'])\n'
        "print(json.dumps([run.outcomes, run.left, run.good]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [{"a": "not over"}, ["b"], False]
