"""The documentation is true: its code runs, its links have targets, its lists are complete.

A fence of README.md and docs/ that says ```python is code that runs: all those of one file, from top to bottom, as one
program. What one of them prints is compared with the ```text output that follows it. ```toml is a settings file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import kvpool
from kvpool import config
from kvpool.cli import router

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [
    *DOCS,
    *(
        path
        for found in ("[CS]*.md", "examples/**/*.md", "bench/*.md", "deploy/*.md")
        for path in sorted(ROOT.glob(found))
    ),
]
INVARIANTS = ROOT / "docs" / "invariants.md"


class Fence(NamedTuple):
    """A fenced block: what stands behind the backticks, the line of its first line, and its text."""

    info: str
    line: int
    text: str


def fences(markdown: str) -> list[Fence]:
    found = []
    opened: tuple[str, int] | None = None
    for number, line in enumerate(markdown.splitlines(), start=1):
        if line.startswith("```"):
            if opened is None:
                opened = (line[3:].strip(), number + 1)
            else:
                info, first = opened
                found.append(Fence(info, first, "\n".join(markdown.splitlines()[first - 1 : number - 1]) + "\n"))
                opened = None
    assert opened is None, f"a fence of line {opened[1] - 1} is never closed"
    return found


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def with_fences(info: str) -> list[Path]:
    return [path for path in DOCS if any(fence.info == info for fence in fences(path.read_text()))]


@pytest.mark.parametrize("path", with_fences("python"), ids=name_of)
def test_the_code_runs_and_prints_what_the_page_shows(path, clean_environment):
    namespace = {"__name__": "__main__"}
    printed = ""
    for fence in fences(path.read_text()):
        if fence.info == "python":
            out = io.StringIO()
            code = compile("\n" * (fence.line - 1) + fence.text, str(path), "exec")
            with contextlib.redirect_stdout(out):
                exec(code, namespace)
            printed = out.getvalue()
        elif fence.info == "text output":
            assert printed == fence.text, f"{name_of(path)}:{fence.line}"
            printed = ""


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_every_code_fence_names_its_language(path):
    """So that no code escapes by a misspelt name."""
    known = {"python", "text output", "text", "toml", "console"}
    known |= {"python transformers"}  # run by tests/engines, where it is installed
    known |= {"toml router"}
    assert {fence.info for fence in fences(path.read_text())} <= known


@pytest.mark.parametrize("path", with_fences("toml"), ids=name_of)
def test_the_settings_files_in_the_documents_can_be_loaded(path, tmp_path):
    file = tmp_path / "config.toml"
    for fence in fences(path.read_text()):
        if fence.info == "toml":
            file.write_text(fence.text)
            config.load(environment={"KVPOOL_CONFIG": str(file)})


def test_the_routers_files_in_the_documents_can_be_read(tmp_path):
    file = tmp_path / "router.toml"
    found = [fence for fence in fences((ROOT / "docs/how-to/router.md").read_text()) if fence.info == "toml router"]
    assert found
    for fence in found:
        file.write_text(fence.text)
        parser = argparse.ArgumentParser()
        router.add_parser(parser.add_subparsers())
        arguments = parser.parse_args(["router", "--config", str(file)])
        arguments.run.args[0].read_file(arguments)
        assert arguments.instances


def test_the_examples_of_the_readme_are_few_and_short():
    examples = [fence for fence in fences((ROOT / "README.md").read_text()) if fence.info == "python"]
    assert len(examples) == 3  # a pool; two processes; a cluster
    assert all(len(example.text.splitlines()) <= 25 for example in examples)


def links(markdown: str) -> Iterator[str]:
    """Targets of links and pictures, without those in code."""
    prose = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"`[^`\n]*`", "", prose)
    yield from re.findall(r"\]\(([^)\s]+)\)", prose)


def anchors(markdown: str) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    outside = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", LINKED, ids=name_of)
def test_relative_links_have_a_target(path):
    for target in links(path.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        assert ROOT in (linked, *linked.parents), f"{target} leaves the repository"
        if anchor:
            assert anchor in anchors(linked.read_text()), target


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=name_of)
def test_every_page_can_be_found_from_the_table_of_contents(path):
    contents = ROOT / "docs" / "README.md"
    linked = {(contents.parent / target.partition("#")[0]).resolve() for target in links(contents.read_text())}
    assert path in {contents, *linked}


def numbered_in_sources() -> set[str]:
    """The numbers of the invariants that stand in lists above the code that keeps them."""
    numbers: set[str] = set()
    for path in (ROOT / "cpp" / "kvpool").rglob("*"):
        if path.suffix in (".h", ".cpp"):
            numbers.update(re.findall(r"^\s*//\s+([A-Z]\d+)  ", path.read_text(), re.MULTILINE))
    return numbers


def test_exactly_the_invariants_of_the_code_are_listed():
    listed = re.findall(r"^\| ([A-Z]\d+) \|", INVARIANTS.read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == numbered_in_sources()


def test_the_tests_that_check_an_invariant_exist():
    rows = re.findall(r"^\| [A-Z]\d+ \|.*$", INVARIANTS.read_text(), re.MULTILINE)
    for row in rows:
        files = re.findall(r"`((?:cpp|python|multiprocess)/[\w./]+)`", row)
        assert files, row
        content = ""
        for file in files:
            assert (ROOT / "tests" / file).is_file(), file
            content += (ROOT / "tests" / file).read_text()
        for name in re.findall(r"“([^”]+)”", row):
            cases = (f'TEST_CASE("{name}")', f'TEST_CASE_TEMPLATE("{name}"', f"def {name}(")
            assert any(case in content for case in cases), name


def test_the_way_to_the_wire_has_the_classes_and_locks_that_the_page_counts():
    page = (ROOT / "docs" / "architecture.md").read_text()
    way = page.partition("### From `transfer()` to the wire")[2].partition("\n### ")[0]
    sides = way.split("```")[1].split("═══ socket")
    named = [
        {name for row in re.findall(r"^ +([A-Z][\w, ]+?)  ", side, re.M) for name in row.split(", ")} for side in sides
    ]
    locks = [set(re.findall(r" (\d+)(?: +the [a-z]+'s)?$", side, re.M)) for side in sides]
    told = re.search(
        r"(\d+) classes and (\d+) locks at the sender, and (\d+) more classes and (\d+) more locks at", way
    )
    assert told is not None
    counted = [len(named[0]), len(locks[0]), len(named[1] - named[0]), len(locks[1] - locks[0])]
    assert [int(number) for number in told.groups()] == counted
    assert counted[0] <= 15
    assert counted[1] <= 6
    code = "".join(path.read_text() for path in (ROOT / "cpp").rglob("*") if path.is_file())
    assert all(re.search(rf"^ *(?:class|struct) {name}\b", code, re.M) for name in named[0] | named[1])


def test_every_setting_is_described():
    text = (ROOT / "docs" / "how-to" / "memory.md").read_text()
    described = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", text, re.MULTILINE))
    defaults = {name: str(getattr(kvpool.Settings(), name)) for name in config.FIELDS}
    assert described == defaults


def test_every_error_is_described():
    text = (ROOT / "docs" / "how-to" / "debugging.md").read_text()
    errors = {
        name
        for name in kvpool.__all__
        if isinstance(getattr(kvpool, name), type) and issubclass(getattr(kvpool, name), kvpool.Error)
    }
    assert errors - {"Error"} == set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) & errors
