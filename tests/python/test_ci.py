"""The guards of continuous integration: a skip without a good reason fails, and so does a run that ran nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ci_kit import DOCTEST, ROOT

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
SKIPPED_WHOLE = "import pytest\npytest.importorskip('no_such_module')"


def run_pytest(
    folder: Path, *options: str, files: dict[str, str], **environment: str
) -> subprocess.CompletedProcess[str]:
    for shared in (ROOT / "tests" / "conftest.py", ROOT / "tests" / "python" / "fair_skips.py"):
        shutil.copy(shared, folder)
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, content in files.items():
        (folder / name).write_text(content)
    base = {name: value for name, value in os.environ.items() if not name.startswith(("KVPOOL_", "PYTEST_"))}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(folder),
            *options,
            str(folder),
        ],
        capture_output=True,
        text=True,
        env={**base, **environment},
        cwd=folder,
        check=False,
    )


# One run each: a pytest takes a second of a processor to start, and each of its workers another.
WAYS = pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "workers"])
FILES = {"test_it.py": SKIPPING, "test_whole.py": SKIPPED_WHOLE}


@WAYS
def test_a_skip_without_a_good_reason_fails_in_ci_and_is_reported_again(tmp_path, options):
    """One of a test, and one of a whole file."""
    report = tmp_path / "reports" / "python.xml"
    options = ("--continue-on-collection-errors", f"--junitxml={report}", *options)
    run = run_pytest(tmp_path, *options, files=FILES, KVPOOL_CI="1")
    assert run.returncode == 1
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error" in run.stdout
    assert run.stdout.count("skipped for a reason that is not in FAIR_SKIPS") >= 2
    assert "not today" in run.stdout
    assert "no_such_module" in run.stdout
    told = failures(report.parent)
    assert "== python.xml: 2 failed\n" in told
    assert "test_it::test_unfair\n" in told
    assert "not in FAIR_SKIPS" in told


def test_a_skip_fails_in_an_engines_environment_as_well(tmp_path):
    """Which has no Hypothesis, so it reads no conftest.py and names the plugin."""
    plugin = ("-p", "fair_skips", "--noconftest", "--continue-on-collection-errors")
    run = run_pytest(tmp_path, *plugin, files=FILES, KVPOOL_CI="1", PYTHONPATH=str(ROOT / "tests" / "python"))
    assert run.returncode == 1
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error" in run.stdout
    assert "not in FAIR_SKIPS" in run.stdout


def test_a_skip_passes_on_a_developers_machine(tmp_path):
    run = run_pytest(tmp_path, files=FILES)
    assert run.returncode == 0
    assert "1 passed, 3 skipped, 1 xfailed" in run.stdout


def test_a_test_with_an_address_in_its_name_is_refused(tmp_path):
    content = "import pytest\n@pytest.mark.parametrize('it', [1], ids=[repr(object())])\ndef test_it(it):\n    pass\n"
    run = run_pytest(tmp_path, files={"test_it.py": content})
    assert run.returncode == 4
    assert "must be the same in every process" in run.stdout + run.stderr


CPP = "shard {} of 2: {} of 9 test cases\n[doctest] test cases:  {} |  {} passed | {} failed | 0 skipped\n"
PYTHON = '<testsuites><testsuite errors="0" failures="{}" skipped="2" tests="9"></testsuite></testsuites>'
NAMES = ["cpp-plain", "cpp-asan", "cpp-tsan", "python.xml", "python-alone.xml", "engines.xml"]
CPP_REPORTS = [f"cpp-{name}-{part}of2.txt" for name in ("plain", "asan", "tsan") for part in (1, 2)]
PYTHON_REPORTS = [name for name in NAMES if name.endswith(".xml")]


@pytest.fixture
def reports(tmp_path):
    for name in ("plain", "asan", "tsan"):
        (tmp_path / f"cpp-{name}-1of2.txt").write_text(CPP.format(1, 5, 5, 5, 0))
        (tmp_path / f"cpp-{name}-2of2.txt").write_text(CPP.format(2, 4, 4, 4, 0))
    for name in PYTHON_REPORTS:
        (tmp_path / name).write_text(PYTHON.format(0))
    return tmp_path


def summary(folder):
    run = subprocess.run([sys.executable, SUMMARY, folder, *NAMES], capture_output=True, text=True, check=False)
    return run.returncode, run.stdout.strip(), run.stderr


def test_the_summary_adds_up_all_reports(reports):
    assert summary(reports) == (0, "48 passed, 0 failed, 6 skipped", "")


def test_the_summary_fails_with_a_failed_test(reports):
    (reports / "python.xml").write_text(PYTHON.format(1))
    assert summary(reports)[:2] == (1, "47 passed, 1 failed, 6 skipped")


@pytest.mark.parametrize("name", [*CPP_REPORTS, *PYTHON_REPORTS])
def test_the_summary_fails_when_a_report_is_missing_or_cut_short(reports, name):
    (reports / name).write_text("")
    assert summary(reports)[0] == 1
    (reports / name).unlink()
    status, _, errors = summary(reports)
    assert status == 1
    assert re.split(r"-\d", name)[0] in errors


def test_the_summary_fails_when_no_test_ran(reports):
    for part in (1, 2):
        (reports / f"cpp-asan-{part}of2.txt").write_text(CPP.format(part, 0, 0, 0, 0).replace("of 9", "of 0"))
    assert summary(reports)[0] == 1


@pytest.mark.parametrize(
    "said",
    [
        CPP.format(2, 4, 3, 3, 0),  # one of its cases was not run
        CPP.format(2, 3, 3, 3, 0),  # one case is in no part
        CPP.format(1, 4, 4, 4, 0),  # the same part twice
        CPP.format(2, 4, 4, 4, 0).replace("of 2:", "of 3:"),
        CPP.format(2, 4, 4, 4, 0).replace("of 9", "of 8"),
        CPP.format(2, 4, 4, 4, 0).partition("\n")[2],  # ran without a shard
    ],
)
def test_the_summary_fails_when_a_test_case_was_in_no_part(reports, said):
    (reports / "cpp-tsan-2of2.txt").write_text(said)
    status, _, errors = summary(reports)
    assert status == 1
    assert "cpp-tsan" in errors


# A program in place of kvpool_tests: it says which part it is, and follows the test.
PROGRAM = """#!/bin/sh
echo "shard $KVPOOL_SHARD"
{}
"""


def run_parts(folder, line, *, parts=3, seconds=60):
    program = folder / "program"
    program.write_text(PROGRAM.format(line))
    program.chmod(0o755)
    prefix = folder / "reports" / "cpp-it"
    prefix.parent.mkdir(exist_ok=True)
    script = ROOT / ".ci" / "shards.py"
    run = subprocess.run(
        [sys.executable, script, prefix, str(parts), "2", str(seconds), program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return run, {path.name: path.read_text() for path in prefix.parent.iterdir()}


def test_every_part_is_run_and_reported(tmp_path):
    run, reports = run_parts(tmp_path, "exit 0", parts=5)
    run, reports = run_parts(tmp_path, "exit 0")  # the reports of five parts do not stay
    assert run.returncode == 0
    assert reports == {f"cpp-it-{part}of3.txt": f"shard {part}/3\n" for part in (1, 2, 3)}


def test_a_failed_part_does_not_stop_the_others(tmp_path):
    run, reports = run_parts(tmp_path, 'test "$KVPOOL_SHARD" != 1/3')
    assert run.returncode == 1
    assert len(reports) == 3
    assert all(f"shard {part}/3" in run.stdout for part in (1, 2, 3))


def test_a_part_that_dies_says_so(tmp_path):
    run, reports = run_parts(tmp_path, 'test "$KVPOOL_SHARD" != 2/3 || kill -SEGV $$')
    assert run.returncode == 1
    assert "ended by signal 11" in reports["cpp-it-2of3.txt"]


def test_a_part_that_hangs_is_killed_with_its_children(tmp_path):
    hangs = 'test "$KVPOOL_SHARD" != 2/3 || { trap "echo it was here; exit 0" TERM; sleep 600 & wait; }'
    run, reports = run_parts(tmp_path, hangs, seconds=3)
    assert run.returncode == 1
    assert "it was here\n\nkilled" in reports["cpp-it-2of3.txt"]  # told to end first, it can say where it hangs
    assert "killed after 3 s" in reports["cpp-it-2of3.txt"]


def failures(folder: Path) -> str:
    script = ROOT / ".ci" / "failures.py"
    return subprocess.run([sys.executable, script, folder], capture_output=True, text=True, check=True).stdout


def test_cpp_failures_are_repeated(tmp_path):
    (tmp_path / "cpp-asan-1of2.txt").write_text(DOCTEST)
    told = failures(tmp_path)
    assert "== cpp-asan-1of2.txt: 1 failed" in told
    assert "a case is read" in told
    assert "CHECK( one == two ) is NOT correct!" in told
    assert "a case that speaks" not in told
    assert "KVPOOL_SEED" not in told


def test_a_cpp_run_that_died_shows_its_last_words(tmp_path):
    (tmp_path / "cpp-asan-2of2.txt").write_text("case fuzz: KVPOOL_SEED=7\nSegmentation fault\n")
    assert failures(tmp_path).strip() == "== cpp-asan-2of2.txt: 1 failed\nSegmentation fault"


def test_a_run_without_failures_is_silent(tmp_path):
    (tmp_path / "cpp-asan-1of2.txt").write_text("[doctest] Status: SUCCESS!\n")
    (tmp_path / "python.xml").write_text(PYTHON.format(0))
    assert failures(tmp_path) == ""
