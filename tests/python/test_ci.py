"""The guards of continuous integration: a skip without a good reason fails, and so does a run that ran nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import planted_bugs
from tools.planted_list import BUGS, Bug

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


SKIPPED_WHOLE = "import pytest\npytest.importorskip('no_such_module')"


def run_pytest(
    folder: Path, *options: str, files: dict[str, str], **environment: str
) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
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
def test_a_skip_without_a_good_reason_fails_in_ci_and_is_told_again(tmp_path, options):
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
CPP_REPORTS = [f"cpp-{name}-{part}of2.txt" for name in ("plain", "asan", "tsan") for part in (1, 2)]

PYTHON_REPORTS = ["python.xml", "python-waiting.xml", "python-alone.xml"]


@pytest.fixture
def reports(tmp_path):
    for name in ("plain", "asan", "tsan"):
        (tmp_path / f"cpp-{name}-1of2.txt").write_text(CPP.format(1, 5, 5, 5, 0))
        (tmp_path / f"cpp-{name}-2of2.txt").write_text(CPP.format(2, 4, 4, 4, 0))
    for name in PYTHON_REPORTS:
        (tmp_path / name).write_text(PYTHON.format(0))
    return tmp_path


def summary(folder):
    run = subprocess.run([sys.executable, SUMMARY, folder], capture_output=True, text=True, check=False)
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


# A program in place of kvpool_tests: it says which part it is, and does what is told.
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


def test_a_part_that_fails_keeps_no_other_from_running(tmp_path):
    run, reports = run_parts(tmp_path, 'test "$KVPOOL_SHARD" != 1/3')
    assert run.returncode == 1
    assert len(reports) == 3
    assert all(f"shard {part}/3" in run.stdout for part in (1, 2, 3))


def test_a_part_that_dies_says_so(tmp_path):
    run, reports = run_parts(tmp_path, 'test "$KVPOOL_SHARD" != 2/3 || kill -SEGV $$')
    assert run.returncode == 1
    assert "ended by signal 11" in reports["cpp-it-2of3.txt"]


def test_a_part_that_hangs_is_killed_with_what_it_started(tmp_path):
    run, reports = run_parts(tmp_path, 'test "$KVPOOL_SHARD" != 2/3 || { sleep 600 & wait; }', seconds=3)
    assert run.returncode == 1
    assert "killed after 3 s" in reports["cpp-it-2of3.txt"]


DOCTEST = """[doctest] run with "--help" for options
card fuzz: KVPOOL_SEED=7
===============================================================================
peer_metadata_test.cpp:3:
TEST CASE:  a card is read

peer_metadata_test.cpp:4: ERROR: CHECK( one == two ) is NOT correct!
card fuzz: KVPOOL_SEED=8
===============================================================================
peer_metadata_test.cpp:9:
TEST CASE:  a card that speaks

peer_metadata_test.cpp:10: MESSAGE: nothing to see
===============================================================================
[doctest] test cases: 3 | 2 passed | 1 failed | 0 skipped
[doctest] Status: FAILURE!
"""


def failures(folder: Path) -> str:
    script = ROOT / ".ci" / "failures.py"
    return subprocess.run([sys.executable, script, folder], capture_output=True, text=True, check=True).stdout


def test_what_failed_in_cpp_is_told_again(tmp_path):
    (tmp_path / "cpp-asan-1of2.txt").write_text(DOCTEST)
    told = failures(tmp_path)
    assert "== cpp-asan-1of2.txt: 1 failed" in told
    assert "a card is read" in told
    assert "CHECK( one == two ) is NOT correct!" in told
    assert "a card that speaks" not in told
    assert "KVPOOL_SEED" not in told


def test_a_cpp_run_that_died_shows_its_last_words(tmp_path):
    (tmp_path / "cpp-asan-2of2.txt").write_text("card fuzz: KVPOOL_SEED=7\nSegmentation fault\n")
    assert failures(tmp_path).strip() == "== cpp-asan-2of2.txt: 1 failed\nSegmentation fault"


def test_a_run_without_failures_is_silent(tmp_path):
    (tmp_path / "cpp-asan-1of2.txt").write_text("[doctest] Status: SUCCESS!\n")
    (tmp_path / "python.xml").write_text(PYTHON.format(0))
    assert failures(tmp_path) == ""


# ---- what `make test` builds and runs: its time is watched by counting


def makefile(name: str) -> str:
    found = re.search(rf"^{name}\s*[:?]?=\s*(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found, name
    return found[1]


def recipe_of(target: str) -> str:
    """What `make` would do for a target whose prerequisites are there."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found, target
    return found[1]


def script_of(name: str, folder: Path = ROOT / "cmake"):
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_step_is_a_target():
    for step in (*makefile("TEST_STEPS").split(), *makefile("LONG_STEPS").split()):
        recipe_of(step)


def test_make_test_builds_the_cpp_tests_for_the_two_sanitizers_alone():
    steps = makefile("TEST_STEPS").split()
    assert {"asan", "tsan"} <= set(steps)
    assert not {"cpp-test", "tsan-all", "long-forms"} & set(steps)
    assert {"cpp-test", "tsan-all", "long-forms"} <= set(makefile("LONG_STEPS").split())
    assert "KVPOOL_ONLY_THREADS" not in makefile("SANITIZER_asan")  # it runs all


SKIPS = r"doctest::skip|kSanitized|^#ifdef __SANITIZE_ADDRESS__$"


def test_what_a_sanitizer_leaves_out_is_run_without_one():
    assert "cpp-plain" in makefile("TEST_STEPS").split()
    assert "kvpool_plain_tests" in recipe_of("cpp-plain")
    cmake = (ROOT / "CMakeLists.txt").read_text()
    names = re.search(r"foreach\(name ([^)]*)\)\n\s*list\(APPEND plain_sources", cmake)
    pattern = re.search(r"file\(GLOB plain_sources CONFIGURE_DEPENDS ([^)]*)\)", cmake)
    assert names
    assert pattern
    plain = {f"{name}.cpp" for name in names[1].split()} | {file.name for file in ROOT.glob(pattern[1])}
    files = (ROOT / "tests" / "cpp").glob("*_test.cpp")
    left_out = {file.name for file in files if re.search(SKIPS, file.read_text(), re.MULTILINE)}
    assert left_out
    assert "sim_test.cpp" in left_out
    assert left_out <= plain


def test_the_sanitizers_compile_few_files():
    """Some 30 for AddressSanitizer, from some 300 sources; each takes ten to thirty seconds of a processor."""
    unity = script_of("unity")
    cpp = ROOT / "cpp"
    settings = re.findall(r"kvpool_unity\(\s*(\w+) (\d+)", (ROOT / "CMakeLists.txt").read_text())
    at_most = {target: int(size) for target, size in settings}
    core = sorted(cpp.rglob("*.cpp"))
    tests = sorted((ROOT / "tests" / "cpp").glob("*.cpp"))
    groups = unity.grouped(core, unity.Sources([cpp]), at_most["kvpool_core"])
    assert len(groups) < len(core) / 9
    groups = unity.grouped(tests, unity.Sources([ROOT / "tests" / "cpp", cpp]), at_most["kvpool_tests"])
    assert len(groups) < len(tests) / 7
    assert sorted(file for group in groups for file in group) == tests
    bindings = sorted((ROOT / "bindings").glob("*.cpp"))
    groups = unity.grouped(bindings, unity.Sources([ROOT / "bindings", cpp]), at_most["_core"])
    assert len(groups) < len(bindings) / 3
    assert makefile("UNITY") == "ON"
    assert "KVPOOL_UNITY=$(UNITY)" in makefile("SANITIZED")
    assert "KVPOOL_UNITY=$(UNITY)" in makefile("MODULE_tests")


def test_the_module_of_the_tests_is_not_optimised_as_a_users_is():
    """Optimised across files it took half of the time that all of `make test` may take."""
    for setting in ("-DKVPOOL_LTO=OFF", "-DKVPOOL_OPTIMISE=-O1"):
        assert setting in makefile("MODULE_tests")
        assert setting not in makefile("MODULE_release")
    text = (ROOT / "Makefile").read_text()
    for target in ("set-up", "cpp-plain", "python-test", "types"):
        assert "module-release" not in recipe_of(target), target
        assert not re.search(rf"^{target}:.*module-release", text, re.MULTILINE), target
    for target in ("build", "demo", "bench", "cpp-test"):  # what users get, and what is measured
        assert re.search(rf"^{target}:.*\$\(DONE\)/module-release ", text, re.MULTILINE), target


def test_what_pip_installs_is_installed_while_the_compiler_works():
    assert "-j2 $(DONE)/requirements $(DONE)/module-tests" in recipe_of("set-up")
    listed = subprocess.run(
        [sys.executable, ROOT / "tools" / "requirements.py", "demo", "test", "dev"],
        capture_output=True, text=True, check=True,
    ).stdout.split("\n")  # fmt: skip
    assert {"pyzmq>=26", "rich>=13", "numpy>=1.24"} <= set(
        listed
    )  # of an extra that an extra names, and of the package
    assert not [line for line in listed if line.startswith("kvpool")]
    assert len(listed) == len(set(listed))


# ---- that the shorter run still finds what is wrong: bugs to plant


def test_planted_bugs_fit_the_tree():
    """Their texts stand there once. `make planted` wants that of all; a few may wait for it."""
    stale = [
        bug.name
        for bug in BUGS
        for file, old, new in bug.edits
        if not (ROOT / file).is_file() or (ROOT / file).read_text().count(old) != 1 or old == new
    ]
    assert len(stale) <= 4, f"write these anew in tools/planted_list.py: {stale}"


def test_bugs_are_planted_in_every_floor():
    floors = {path.name for path in (ROOT / "cpp" / "kvpool").iterdir() if path.is_dir()}
    floors |= {"cluster", "control", "observe", "policy"}
    without = floors - {bug.floor for bug in BUGS}
    assert len(without) <= 2, f"plant some in tools/planted_list.py: {without}"
    assert {bug.build for bug in BUGS} == {"address", "thread", "python"}
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 12


def test_planted_bugs_are_for_tests_that_make_test_runs():
    for bug in BUGS:
        for test in bug.tests:
            path = ROOT / "tests" / (test if bug.build == "python" else f"cpp/{test}")
            assert path.is_file(), f"{bug.name} in tools/planted_list.py: there is no {path}"
    assert "planted" in makefile("LONG_STEPS").split()


def test_a_bug_is_planted_and_taken_out_again(tmp_path):
    (tmp_path / "a.cpp").write_text("int one() { return 1; }\n")
    bug = Bug("one", "base", "one is two", (("a.cpp", "return 1", "return 2"),), ("a_test.cpp",))
    with planted_bugs.planted(bug, tmp_path):
        assert (tmp_path / "a.cpp").read_text() == "int one() { return 2; }\n"
    assert (tmp_path / "a.cpp").read_text() == "int one() { return 1; }\n"
    (tmp_path / "a.cpp").write_text("return 1; return 1;")
    with pytest.raises(SystemExit, match="2 times"), planted_bugs.planted(bug, tmp_path):
        pass
    assert (tmp_path / "a.cpp").read_text() == "return 1; return 1;"


def test_the_copy_for_planted_bugs_is_the_tree_and_keeps_its_builds(tmp_path):
    tree, copy = tmp_path / "tree", tmp_path / "copy"
    (tree / "cpp").mkdir(parents=True)
    for name in ("a", "b"):
        (tree / "cpp" / name).write_text(name)
    planted_bugs.update_copy(["cpp/a", "cpp/b"], tree, copy)
    before = (copy / "cpp" / "a").stat().st_mtime_ns
    (copy / "build").mkdir()
    (copy / "build" / "kept").write_text("an object file")
    (tree / "cpp" / "b").write_text("other")
    (copy / "cpp" / "stale").write_text("of an earlier copy")
    planted_bugs.update_copy(["cpp/a", "cpp/b"], tree, copy)
    assert {path.name: path.read_text() for path in (copy / "cpp").iterdir()} == {"a": "a", "b": "other"}
    assert (copy / "cpp" / "a").stat().st_mtime_ns == before  # so that it is not compiled again
    assert (copy / "build" / "kept").exists()


def test_what_caught_a_planted_bug_is_told():
    assert planted_bugs.caught_by(DOCTEST, 1) == "a card is read"
    said = "FAILED tests/python/test_a.py::test_it - assert 1 == 2"
    assert planted_bugs.caught_by(said, 1) == "python/test_a.py::test_it"
    said = "TEST CASE:  a queue\n==1==ERROR: AddressSanitizer: heap-use-after-free on address 0x1\n"
    assert planted_bugs.caught_by(said, 1) == "a queue (AddressSanitizer: heap-use-after-free)"
    assert "no answer in time" in planted_bugs.caught_by("", -9)


# ---- how the tests are divided


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("namespace {\nconstexpr int kOne = 1;\n}", "namespace {\nconstexpr long kOne = 2;\n}"),
        ("namespace {\nvoid fail(int n) {\n}\n}", "namespace {\nvoid fail(int n) {\n}\n}"),
        ("struct Rig {\n};", "class Rig : public Other {\n};"),
        ("using Page = int;", "struct Page {\n};"),
        ("#define ROOM 3", "int ROOM = 3;"),
        ("struct Node {\n};", '#include "here.h"'),
    ],
)
def test_files_that_declare_a_name_twice_are_not_compiled_together(tmp_path, one, other):
    unity = script_of("unity")
    (tmp_path / "here.h").write_text("namespace kvpool {\nstruct Node {\n};\n}")
    files = [tmp_path / "a.cpp", tmp_path / "b.cpp", tmp_path / "c.cpp"]
    for file, text in zip(files, (one, other, "class Rig;\nint elsewhere(int fail);"), strict=True):
        file.write_text(text)
    groups = unity.grouped(files, unity.Sources([]), 10_000)
    assert groups == [[files[0], files[2]], [files[1]]]
    assert unity.grouped(files, unity.Sources([]), 1) == [[file] for file in files]


HAS_THREADS = r"std::(j?thread|async|mutex)|pthread_|fork\(|posix_spawn|ucx_kit|(peer|child)_process\.h"


def test_most_cpp_tests_run_under_threadsanitizer_too():
    """Those that do not say so, and the program of all tests ends when such a case starts a thread."""
    tests = sorted((ROOT / "tests" / "cpp").glob("*_test.cpp"))
    left_out = {file.name for file in tests if re.search(r"^KVPOOL_ONE_THREAD;$", file.read_text(), re.MULTILINE)}
    assert {"radix_tree_test.cpp", "sim_test.cpp"} <= left_out
    assert len(left_out) < len(tests) / 2
    for file in tests:
        if re.search(HAS_THREADS, file.read_text()):
            assert file.name not in left_out


CONFTEST = script_of("conftest", ROOT / "tests")
TEST_FILES = sorted(
    path for folder in ("python", "model", "multiprocess") for path in (ROOT / "tests" / folder).rglob("*.py")
)


def test_every_python_test_is_in_one_of_the_calls():
    recipe = recipe_of("python-test")
    for chosen in ('"not waiting and not alone"', "waiting", "alone"):
        assert f"-m {chosen} " in recipe
    patterns = [pattern for group in CONFTEST.GROUPS.values() for pattern, _ in group]
    for choice in "|".join(patterns).split("|"):
        assert list((ROOT / "tests").glob(f"{choice}*")), f"tests/conftest.py names {choice}, which is not there"


def test_few_files_run_alone():
    """One after the other, with a processor idle: the call was the longest step of all when it had some 40 files."""
    assert makefile("WAITING_WORKERS") == "6"
    alone = [path.name for path in TEST_FILES if path.name.startswith("test_") and CONFTEST.group_of(path) == "alone"]
    assert len(alone) <= 3, alone


def seconds_slept(text: str) -> list[float]:
    """The numbers that time.sleep() is called with."""
    return [float(found) for found in re.findall(r"\btime\.sleep\((\d+(?:\.\d+)?)\)", text)]


def test_no_test_sleeps_for_long():
    """Tests wait for events. A sleep is the step of such a wait, or the time in which something must not happen.

    Half a minute or more is for a process or a thread that the test ends before.
    """
    assert seconds_slept("time.sleep(3)\ntime.sleep(0.5)") == [3.0, 0.5]
    for path in set(TEST_FILES) - {Path(__file__).resolve()}:
        long = [seconds for seconds in seconds_slept(path.read_text()) if 2.5 < seconds < 30]
        assert not long, f"{path} sleeps for {long} s"


def test_members_of_an_etcd_do_not_wait_for_a_lease_to_begin():
    """Two seconds of each of some 150 tests: only what is about a new etcd begins with one."""
    new = [path.name for path in TEST_FILES if re.search(r"EtcdPlace\([^)]*new=True", path.read_text())]
    assert new == ["test_long_lease.py"]


@pytest.mark.parametrize(("call", "chosen"), CONFTEST.CALLS.items())
def test_a_call_reads_the_files_of_its_group_alone(call, chosen):
    class Config:
        rootpath, args = ROOT, ["tests/python/test_alloc.py::test_it"]

        def getoption(self, _name):
            return call

    files = [path for path in TEST_FILES if path.name.startswith("test_")]
    read = {path for path in files if not CONFTEST.pytest_ignore_collect(path, Config())}
    named = ROOT / "tests" / "python" / "test_alloc.py"
    assert read == {path for path in files if CONFTEST.group_of(path) == chosen} | {named}
    assert f'-m "{call}" ' in recipe_of("python-test") or f"-m {call} " in recipe_of("python-test")
