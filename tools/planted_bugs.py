"""Plants bugs into a copy of the tree, one at a time, and says which test catches each: `make planted`.

    python -m tools.planted_bugs [--list] [--cmake=ARGUMENT]... [NAME...]

The copy, with its builds, lies in build/planted and is kept, so that a bug costs one or two files to compile. Each bug
runs the tests that stand beside it in tools/planted_list.py, in the build that `make test` runs them in. They must pass
without the bug and fail with it: the status is 0 only if every bug was caught.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.planted_kit import Bug
from tools.planted_list import BUGS

__all__ = ["Outcome", "caught_by", "main", "planted", "update_copy"]

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / "build" / "planted"
BUILDS = TREE / "build"
SECONDS = 600.0  # for the tests of one bug: one that makes them hang is caught, too
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}
CASE = re.compile(r"^TEST CASE:\s+(.*)$", re.MULTILINE)
RULE = re.compile(r"^={60,}$", re.MULTILINE)
FAILED = re.compile(r"\bERROR: |Sanitizer|runtime error")
SANITIZER = re.compile(r"\w+Sanitizer: [\w-]+|runtime error: .*")
NOTHING = re.compile(r"^\[doctest\] test cases:\s+0 \|", re.MULTILINE)
PYTEST_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class Outcome(tuple[int, str]):
    """Exit status and output of a run."""

    @property
    def passed(self) -> bool:
        """Whether all tests passed."""
        return self[0] == 0


def update_copy(files: Iterable[str], source: Path, copy: Path) -> None:
    """Makes `copy` hold the files as they are in `source`; what is the same stays, with its time."""
    wanted = set(files)
    for old in [path for path in copy.rglob("*") if path.is_file() and path.suffix != ".so"]:
        name = old.relative_to(copy).as_posix()
        if name not in wanted and not name.startswith("build/"):
            old.unlink()
    for name in wanted:
        here, there = source / name, copy / name
        if there.is_file() and there.read_bytes() == here.read_bytes():
            continue
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(here, there)


@contextmanager
def planted(bug: Bug, tree: Path) -> Iterator[None]:
    """The bug is in the tree for as long as this lasts."""
    before: dict[Path, str] = {}
    try:
        for file, old, new in bug.edits:
            text = (tree / file).read_text()
            if text.count(old) != 1:
                raise SystemExit(f"{bug.name}: {file} has its text {text.count(old)} times; it must be there once")
            before.setdefault(tree / file, text)
            (tree / file).write_text(text.replace(old, new))
        yield
    finally:
        for path, text in before.items():
            path.write_text(text)


def caught_by(output: str, status: int) -> str:
    """What said so first: a test's name, or how the program ended."""
    if names := PYTEST_FAILED.findall(output):
        return str(names[0]).removeprefix("tests/")
    said = SANITIZER.search(output)
    for part in RULE.split(output):
        if FAILED.search(part) and (case := CASE.search(part)):
            return f"{case[1]} ({said[0]})" if said else case[1]
    how = said[0] if said else "no answer in time" if status == -signal.SIGKILL else f"status {status}"
    last = CASE.findall(output)
    return f"{how} (in or after: {last[-1]})" if last else how


def run(command: Sequence[str | Path], environment: dict[str, str], seconds: float) -> Outcome:
    """In the copy. What takes longer is ended, with all that it has started."""
    child = subprocess.Popen(
        command,
        cwd=TREE,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
    return Outcome((child.returncode, output))


class Tests:
    """The copy, and how its tests are built and run."""

    def __init__(self, bugs: Sequence[Bug], cmake_arguments: Sequence[str]) -> None:
        self._bugs = bugs
        self._arguments = cmake_arguments
        self._configured: set[str] = set()
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        update_copy([name for name in listed.stdout.splitlines() if (ROOT / name).is_file()], ROOT, TREE)
        for module in (ROOT / "src" / "kvpool").glob("_core*.so"):
            shutil.copy(module, TREE / "src" / "kvpool")

    def tools(self, name: str) -> str:
        """A program of the Python environment, or the system's."""
        beside = Path(sys.executable).parent / name
        return str(beside) if beside.exists() else name

    def build(self, build: str) -> Outcome:
        """Builds the C++ tests that are needed, as AddressSanitizer's or ThreadSanitizer's build."""
        folder = BUILDS / build
        if build not in self._configured:  # also one that is there: its files may be those of other bugs
            files = sorted({test for bug in self._bugs if bug.build == build for test in bug.tests})
            launchers = [f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("C", "CXX")]
            configured = run(
                [self.tools("cmake"), "-S", TREE, "-B", folder, "-G", "Ninja",
                 f"-DCMAKE_MAKE_PROGRAM={self.tools('ninja')}", "-DCMAKE_BUILD_TYPE=Release", "-DKVPOOL_PYTHON=OFF",
                 "-DKVPOOL_TESTS=ON", "-DKVPOOL_DEBUG=ON", "-DKVPOOL_LTO=OFF", "-DKVPOOL_CUDA=OFF",
                 f"-DKVPOOL_SANITIZE={build}", f"-DKVPOOL_TEST_FILES={';'.join(files)}",
                 *(launchers if shutil.which("ccache") else ()), *self._arguments],
                {}, SECONDS,
            )  # fmt: skip
            if not configured.passed:
                return configured
            self._configured.add(build)
        return run([self.tools("cmake"), "--build", folder, "--target", "kvpool_tests"], {}, 24 * 3600)

    def run(self, build: str, tests: Sequence[str]) -> Outcome:
        """Runs some test files, to the first failure."""
        if build == "python":
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=300"]
            return run([*command, *(f"tests/{test}" for test in tests)], {"PYTHONPATH": str(TREE / "src")}, SECONDS)
        program = BUILDS / build / "kvpool_tests"
        layout = ["setarch", os.uname().machine, "-R"] if build == "thread" and shutil.which("setarch") else []
        chosen = ",".join(f"*/{test}" for test in tests)
        outcome = run([*layout, program, f"-sf={chosen}", "--abort-after=1"], ENVIRONMENT, SECONDS)
        if outcome.passed and NOTHING.search(outcome[1]):
            raise SystemExit(f"no test case of {', '.join(tests)} was run")
        return outcome


def clean_runs(tests: Tests, bugs: Sequence[Bug]) -> bool:
    """Whether everything passes without a bug; what does not proves nothing."""
    good = True
    for build in sorted({bug.build for bug in bugs}):
        began = time.monotonic()
        outcome = tests.build(build) if build != "python" else Outcome((0, ""))
        if outcome.passed:
            names = sorted({test for bug in bugs if bug.build == build for test in bug.tests})
            outcome = tests.run(build, names)
        took = time.monotonic() - began
        print(f"{'passed' if outcome.passed else 'FAILED'}  without a bug ({build}, {took:.0f} s)", flush=True)
        if not outcome.passed:
            print(outcome[1][-4000:])
            good = False
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each bug."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--cmake", action="append", default=[], help="one more argument for CMake")
    parser.add_argument("names", nargs="*", help="of bugs; all by default")
    options = parser.parse_args(arguments)
    known = {bug.name: bug for bug in BUGS}
    if unknown := set(options.names) - set(known):
        parser.error(f"no bug is called {', '.join(sorted(unknown))}")
    bugs = [known[name] for name in options.names] or list(BUGS)
    if options.list:
        for bug in bugs:
            print(f"{bug.name:26} {bug.floor:10} {bug.failure}")
        return 0
    tests = Tests(bugs, options.cmake)
    if not clean_runs(tests, bugs):
        return 1
    missed = 0
    for bug in bugs:
        began = time.monotonic()
        with planted(bug, TREE):
            outcome = tests.build(bug.build) if bug.build != "python" else Outcome((0, ""))
            if not outcome.passed:
                print(outcome[1][-4000:])
                raise SystemExit(f"{bug.name}: it does not compile, so it proves nothing")
            outcome = tests.run(bug.build, bug.tests)
        missed += outcome.passed
        what = "MISSED" if outcome.passed else f"caught  by {caught_by(outcome[1], outcome[0])}"
        print(f"{bug.floor:10} {bug.name:26} {time.monotonic() - began:4.0f} s  {what}", flush=True)
    print(f"{len(bugs) - missed} of {len(bugs)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
