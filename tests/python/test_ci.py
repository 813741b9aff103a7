"""The guards of continuous integration: a skip without a good reason fails, and so does a run that ran nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUMMARY = ROOT / ".ci" / "summary.py"

SKIPPING = """
import pytest
def test_unfair():
    pytest.skip("not today")
def test_fair():
    pytest.skip("Python 3.99 and newer")
@pytest.mark.xfail
def test_known():
    assert False
def test_good():
    pass
"""


def run_pytest(folder: Path, content: str, **environment: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(content)
    base = {name: value for name, value in os.environ.items() if not name.startswith(("KVPOOL_", "PYTEST_"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)],
        capture_output=True,
        text=True,
        env={**base, **environment},
        cwd=folder,
        check=False,
    )


def test_a_skip_without_a_good_reason_fails_in_ci(tmp_path):
    run = run_pytest(tmp_path, SKIPPING, KVPOOL_CI="1")
    assert run.returncode == 1
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed" in run.stdout
    assert "not in FAIR_SKIPS" in run.stdout
    assert "not today" in run.stdout


def test_a_file_that_is_skipped_whole_fails_in_ci(tmp_path):
    content = "import pytest\npytest.importorskip('no_such_module')"
    assert run_pytest(tmp_path, content).returncode == 5
    run = run_pytest(tmp_path, content, KVPOOL_CI="1")
    assert run.returncode not in (0, 5)
    assert "no_such_module" in run.stdout


def test_a_skip_passes_on_a_developers_machine(tmp_path):
    run = run_pytest(tmp_path, SKIPPING)
    assert run.returncode == 0
    assert "1 passed, 2 skipped, 1 xfailed" in run.stdout


CPP = "[doctest] test cases:  {} |  {} passed | {} failed | 0 skipped\n"
PYTHON = '<testsuites><testsuite errors="0" failures="{}" skipped="2" tests="9"></testsuite></testsuites>'


@pytest.fixture
def reports(tmp_path):
    for name in ("cpp-release.txt", "cpp-asan.txt", "cpp-tsan.txt"):
        (tmp_path / name).write_text(CPP.format(5, 5, 0))
    (tmp_path / "python.xml").write_text(PYTHON.format(0))
    return tmp_path


def summary(folder):
    run = subprocess.run([sys.executable, SUMMARY, folder], capture_output=True, text=True, check=False)
    return run.returncode, run.stdout.strip(), run.stderr


def test_the_summary_adds_up_all_reports(reports):
    assert summary(reports) == (0, "22 passed, 0 failed, 2 skipped", "")


def test_the_summary_fails_with_a_failed_test(reports):
    (reports / "python.xml").write_text(PYTHON.format(1))
    assert summary(reports)[:2] == (1, "21 passed, 1 failed, 2 skipped")


@pytest.mark.parametrize("name", ["cpp-release.txt", "cpp-asan.txt", "cpp-tsan.txt", "python.xml"])
def test_the_summary_fails_when_a_report_is_missing_or_cut_short(reports, name):
    (reports / name).write_text("")
    assert summary(reports)[0] == 1
    (reports / name).unlink()
    status, _, errors = summary(reports)
    assert status == 1
    assert name in errors


def test_the_summary_fails_when_no_test_ran(reports):
    (reports / "cpp-asan.txt").write_text(CPP.format(0, 0, 0))
    assert summary(reports)[0] == 1


DOCTEST = """[doctest] run with "--help" for options
card fuzz: KVPOOL_SEED=7
===============================================================================
card_test.cpp:3:
TEST CASE:  a card is read

card_test.cpp:4: ERROR: CHECK( one == two ) is NOT correct!
card fuzz: KVPOOL_SEED=8
===============================================================================
card_test.cpp:9:
TEST CASE:  a card that speaks

card_test.cpp:10: MESSAGE: nothing to see
===============================================================================
[doctest] test cases: 3 | 2 passed | 1 failed | 0 skipped
[doctest] Status: FAILURE!
"""


def failures(folder: Path) -> str:
    script = ROOT / ".ci" / "failures.py"
    return subprocess.run([sys.executable, script, folder], capture_output=True, text=True, check=True).stdout


def test_what_failed_in_cpp_is_told_again(tmp_path):
    (tmp_path / "cpp-release.txt").write_text(DOCTEST)
    told = failures(tmp_path)
    assert "== cpp-release.txt: 1 failed" in told
    assert "a card is read" in told
    assert "CHECK( one == two ) is NOT correct!" in told
    assert "a card that speaks" not in told
    assert "KVPOOL_SEED" not in told


def test_a_cpp_run_that_died_shows_its_last_words(tmp_path):
    (tmp_path / "cpp-asan.txt").write_text("card fuzz: KVPOOL_SEED=7\nSegmentation fault\n")
    assert failures(tmp_path).strip() == "== cpp-asan.txt: 1 failed\nSegmentation fault"


def test_what_failed_in_python_is_told_again(tmp_path):
    run = run_pytest(
        tmp_path, SKIPPING, KVPOOL_CI="1", PYTEST_ADDOPTS=f"--junitxml={tmp_path / 'reports' / 'python.xml'}"
    )
    assert run.returncode == 1
    told = failures(tmp_path / "reports")
    assert "== python.xml: 1 failed\ntest_it::test_unfair\n" in told
    assert "not in FAIR_SKIPS" in told


def test_a_run_without_failures_is_silent(tmp_path):
    (tmp_path / "cpp-release.txt").write_text("[doctest] Status: SUCCESS!\n")
    (tmp_path / "python.xml").write_text(PYTHON.format(0))
    assert failures(tmp_path) == ""
