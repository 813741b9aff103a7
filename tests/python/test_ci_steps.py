"""`make test`: which steps it has, what each builds and runs, and that it stays short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ci_kit import ROOT, makefile, recipe_of, script_of


def test_each_step_is_a_target():
    for step in (step for steps in ("TEST_STEPS", "CI_STEPS", "LONG_STEPS") for step in makefile(steps).split()):
        recipe_of(step)


def test_make_test_compiles_the_cpp_tests_once():
    """In the build of the module. Continuous integration compiles them for both sanitizers, where all of them run."""
    steps, in_ci = set(makefile("TEST_STEPS").split()), set(makefile("CI_STEPS").split())
    assert "cpp-test" in steps
    sanitized = {"asan", "asan-and-environments", "tsan", "tsan-all"}
    assert not (sanitized | {"cpp-release", "long-forms", "planted"}) & steps
    assert {"asan-and-environments", "tsan", "cpp-plain"} <= in_ci
    assert "-j2 asan engine-environments" in recipe_of("asan-and-environments")
    assert not {"cpp-test", "cpp-release", "tsan-all", "long-forms", "planted"} & in_ci
    assert {"cpp-release", "tsan-all", "long-forms", "planted"} <= set(makefile("LONG_STEPS").split())
    assert "KVPOOL_ONLY_THREADS" not in makefile("SANITIZER_asan")  # it runs all
    assert makefile("BUILDS") == "$(if $(KVPOOL_CI),build/asan build/tsan,build/cpp-tests)"
    assert "for build in $(BUILDS)" in recipe_of("builds")
    assert "--build build/tests --target kvpool_tests" in recipe_of("build/cpp-tests")
    assert "build/tests/kvpool_tests" in recipe_of("cpp-test")


WRITES = re.compile(
    r"--junitxml=\$\(REPORTS\)/([\w-]+\.xml)|in_parts,([\w-]+)\)|\$\(REPORTS\)/(cpp-\w+) |under_tsan,(tsan)\)"
)


@pytest.mark.parametrize("kind", ["TEST", "CI"])
def test_a_run_must_have_the_reports_of_its_steps_and_no_others(kind):
    """A report that no step writes would fail every run; one that nobody expects would hide tests that did not run."""
    parts = {
        "python-and-builds": ["python-test"],
        "asan-and-environments": ["asan"],
    }
    steps = makefile(f"{kind}_STEPS").split()
    recipes = [recipe_of(part) for step in steps for part in parts.get(step, [step])]
    found = [next(filter(None, groups)) for recipe in recipes for groups in WRITES.findall(recipe)]
    written = ["cpp-tsan" if name == "tsan" else name for name in found]
    expected = makefile(f"{kind}_REPORTS").replace("$(PYTHON_REPORTS)", makefile("PYTHON_REPORTS")).split()
    assert sorted(written) == sorted(expected)
    assert ".ci/summary.py $(REPORTS) $(if $(KVPOOL_CI),$(CI_REPORTS),$(TEST_REPORTS))" in recipe_of("test")


def test_continuous_integration_runs_the_engines_in_their_own_environments():
    assert "test-engines" in makefile("CI_STEPS").split()
    assert "engines" not in makefile("TEST_STEPS"), "nobody who runs `make test` wants gigabytes of engines"
    assert 'STEPS="$(if $(KVPOOL_CI),$(CI_STEPS),$(TEST_STEPS))"' in recipe_of("test")
    assert "export KVPOOL_CI=1" in (ROOT / ".ci" / "run").read_text()
    recipe = recipe_of("test-engines")
    in_vllms = ["tests/engines/transformers", "tests/engines/vllm/own_env"]
    others = " ".join(f"--ignore {folder}" for folder in (*in_vllms, "$(SGLANG_TESTS)"))
    assert f"pytest -q tests/engines {others} --junitxml=$(REPORTS)/engines.xml" in recipe
    assert f"{' '.join(in_vllms)} --junitxml=$(REPORTS)/engines-transformers.xml" in recipe
    assert re.search(r"\$\(SGLANG_TESTS\) \\?\s*--junitxml=\$\(REPORTS\)/engines-sglang.xml", recipe)
    assert "PYTEST_ARGS" not in recipe  # it names tests of the other calls
    without = re.findall(r"PYTHONPATH=(\S+)(?:(?!PYTHONPATH=)[^;])*--noconftest -p fair_skips", recipe)
    assert len(without) == recipe.count("--noconftest") == 2
    assert all(path.split(":")[:2] == ["src", "tests/python"] for path in without)
    assert re.search(r"^test-engines:.*\$\(VLLM_VENV\)/done", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.search(r"^test-engines:.*\$\(SGLANG_VENV\)/done", (ROOT / "Makefile").read_text(), re.MULTILINE)
    install = recipe_of(re.escape("$(SGLANG_VENV)/done"))
    needs = ("-m venv --clear", '"$(TORCH)" $(PYTEST)', "--no-deps -r $(SGLANG_TESTS)/requirements.txt")
    for needed in needs:
        assert needed in install
    install = recipe_of(re.escape("$(VLLM_VENV)/done"))
    unwanted = "uninstall --quiet -y torchvision torchaudio torchcodec"
    for needed in ('install --quiet "$(TORCH)"', '"$(VLLM)" "$(TRANSFORMERS)" xxhash $(PYTEST)', unwanted):
        assert needed in install
    assert re.fullmatch(r"pytest==[\d.]+ pytest-timeout==[\d.]+", makefile("PYTEST"))
    # Only the skips of the engines' own tests say so, and none of them is fair in continuous integration.
    assert not CONFTEST.skip_is_fair("vLLM is not installed in .venv-vllm: make test-engines installs it")
    assert not CONFTEST.skip_is_fair("SGLang wants a core for each rank")
    engines = [path.name for path in (ROOT / "tests" / "engines").rglob("test_*.py")]
    assert len(engines) >= 4


SKIPS = r"doctest::skip|kSanitized|model_length|^#ifdef __SANITIZE_ADDRESS__$"


def test_tests_that_a_sanitizer_leaves_out_run_without_one():
    assert "cpp-plain" in makefile("CI_STEPS").split()
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


def test_the_module_of_the_tests_is_optimised_less_than_a_users():
    """Optimised across files it took half of the time that all of `make test` may take."""
    for setting in ("-DKVPOOL_LTO=OFF", "-DKVPOOL_OPTIMISE=-O1"):
        assert setting in makefile("MODULE_tests")
        assert setting not in makefile("MODULE_release")
    text = (ROOT / "Makefile").read_text()
    for target in ("set-up", "cpp-plain", "cpp-test", "build/cpp-tests", "python-test", "types"):
        assert "module-release" not in recipe_of(target), target
        assert not re.search(rf"^{target}:.*module-release", text, re.MULTILINE), target
    for target in ("build", "demo", "bench", "cpp-release"):  # the builds that users get and that are measured
        assert re.search(rf"^{target}:.*\$\(DONE\)/module-release ", text, re.MULTILINE), target


def test_pip_installs_while_the_compiler_works():
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


def test_the_groups_of_all_cpp_tests_count_where_two_programs_share_a_file():
    """CMake keeps one group for a file, from the last call. A group of a part may clash with files of the whole."""
    targets = re.findall(r"kvpool_unity\(\s*(kvpool_\w*tests)\b", (ROOT / "CMakeLists.txt").read_text())
    assert targets == ["kvpool_plain_tests", "kvpool_tests"]


def test_cpp_tests_that_start_threads_run_under_threadsanitizer_too():
    found = re.search(r'starts_threads REGEX "(.+)"', (ROOT / "CMakeLists.txt").read_text())
    assert found
    chosen = found[1].replace(r"\\", "\\")  # as CMake reads it
    assert all(re.search(chosen, text) for text in ("std::thread", "std::jthread", '"kvpool/exec/executor.h"'))
    tests = sorted((ROOT / "tests" / "cpp").glob("*_test.cpp"))
    under = {file.name for file in tests if re.search(chosen, file.read_text())}
    assert "sim_test.cpp" not in under  # its worlds have one thread
    for floor in (
        "copy",
        "pool_threads",
        "reactor",
        "peer_blocks",
        "executor",
        "serial_executor",
        "service",
        "sock_both_ways",
    ):
        assert any(name.startswith(floor) for name in under), floor
    assert makefile("SANITIZER_tsan").endswith("-DKVPOOL_ONLY_THREADS=ON")


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
    """Two seconds of each of some 150 tests: only tests about a new etcd begin with one."""
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
