"""The bugs of tools/planted_list.py fit the tree, and the script that plants them works."""

from __future__ import annotations

import pytest
from ci_kit import DOCTEST, ROOT, makefile

from tools import planted_bugs
from tools.planted_kit import Bug
from tools.planted_list import BUGS


def test_planted_bugs_fit_the_tree():
    """Their texts occur once: `make planted` requires this of all."""
    stale = [
        bug.name
        for bug in BUGS
        for file, old, new in bug.edits
        if not (ROOT / file).is_file() or (ROOT / file).read_text().count(old) != 1 or old == new
    ]
    assert not stale, f"write these anew in tools/planted_list.py: {stale}"


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
            assert bug.build != "python" or all(file.endswith(".py") for file, _, _ in bug.edits), (
                f"{bug.name} in tools/planted_list.py: nothing compiles it for the Python tests"
            )
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


def test_the_test_that_caught_a_planted_bug_is_named():
    assert planted_bugs.caught_by(DOCTEST, 1) == "a case is read"
    said = "FAILED tests/python/test_a.py::test_it - assert 1 == 2"
    assert planted_bugs.caught_by(said, 1) == "python/test_a.py::test_it"
    said = "TEST CASE:  a queue\n==1==ERROR: AddressSanitizer: heap-use-after-free on address 0x1\n"
    assert planted_bugs.caught_by(said, 1) == "a queue (AddressSanitizer: heap-use-after-free)"
    assert "no answer in time" in planted_bugs.caught_by("", -9)
