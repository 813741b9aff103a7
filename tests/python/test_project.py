"""The project's own files: extras, the image, and what is said about security."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tools.requirements import project_of, required

ROOT = Path(__file__).resolve().parents[2]
PROJECT = project_of((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["optional-dependencies"]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def test_the_extra_all_has_what_the_commands_need_and_no_library_of_a_machine():
    everything = set(required(PROJECT, ["all"]))
    for extra in ("cli", "sim", "metrics", "events", "router", "storage"):
        assert set(EXTRAS[extra]) <= everything
    assert not [one for one in everything if re.match(r"libucx|nvidia|torch", one)]


def test_what_private_parts_are_used_of_has_an_upper_bound():
    sources = "".join(path.read_text() for path in (ROOT / "src/kvpool/control/router").glob("*.py"))
    assert "from uvicorn.protocols.http.h11_impl import" in sources  # none of uvicorn's promises
    bounds = {re.match(r"[\w-]+", one)[0]: one for one in EXTRAS["router"]}
    assert {"<" in bounds[name] for name in ("uvicorn", "h11", "httpx2")} == {True}


def test_what_the_image_copies_and_installs_exists():
    stages = re.findall(r"^FROM \S+(?: AS (\w+))?$", DOCKERFILE, re.MULTILINE)
    assert len(stages) == 2
    copied = [shlex.split(line) for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE)]
    own = [name for words in copied if not words[0].startswith("--from") for name in words[:-1]]
    assert [name for name in own if not (ROOT / name).exists()] == []
    assert {words[0].partition("=")[2] for words in copied if words[0].startswith("--from")} <= set(stages)
    # All that the build reads: what the source package has, but for tests.
    manifest = (ROOT / "MANIFEST.in").read_text()
    needed = set(re.findall(r"^recursive-include (\w+)", manifest, re.MULTILINE)) - {"tests"}
    assert needed <= set(own)
    assert {"CMakeLists.txt", "setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"} <= set(own)
    installed = re.findall(r"\[(\w+)\]\"", DOCKERFILE)
    assert set(installed) <= set(EXTRAS)
    assert 'ENTRYPOINT ["kvpool"]' in DOCKERFILE
    assert "kvpool" in PROJECT["scripts"]


def test_the_page_on_security_says_how_to_report():
    text = (ROOT / "SECURITY.md").read_text()
    assert "## Reporting" in text
    assert "privately" in text
