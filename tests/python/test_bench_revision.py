"""A result says which code it is of."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import machine
from bench.revision import revision, sources_digest
from kvpool import _core

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "a.py").write_text("a = 1\n")
    (tmp_path / "bench" / "results" / "a.json").write_text("{}\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "a")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True).stdout


def test_the_commit_is_named_and_whether_files_have_changed_since(checkout, monkeypatch):
    commit = git(checkout, "rev-parse", "--short=12", "HEAD").strip()
    assert revision(checkout / "bench") == commit
    (checkout / "bench" / "results" / "a.json").write_text('{"a": 1}\n')  # results change no figure
    (checkout / "notes").write_text("not tracked\n")
    assert revision(checkout / "bench") == commit
    (checkout / "bench" / "a.py").write_text("a = 2\n")
    assert revision(checkout / "bench") == f"{commit}+changes"
    with monkeypatch.context() as patch:
        patch.setattr("bench.revision._git", lambda folder, command, *rest: None if command == "status" else commit)
        assert revision(checkout / "bench") == f"{commit}+unknown"


def test_outside_a_checkout_no_commit_is_named(checkout, tmp_path_factory, monkeypatch):
    assert revision(tmp_path_factory.mktemp("outside")) is None
    installed = checkout / "venv" / "site-packages"  # in a checkout that does not track it
    installed.mkdir(parents=True)
    assert revision(installed) is None
    monkeypatch.setenv("PATH", "")
    assert revision(checkout / "bench") is None


def test_the_machine_of_a_result_names_the_commit_where_there_is_one(monkeypatch):
    monkeypatch.setattr(machine, "revision", lambda **_: "0123456789ab+changes")
    described = machine.describe()
    assert described["commit"] == "0123456789ab+changes"
    assert machine.one_line(described).endswith("commit 0123456789ab+changes")
    monkeypatch.setattr(machine, "revision", lambda **_: None)
    assert "commit" not in machine.one_line(machine.describe())


def test_a_core_that_was_compiled_from_other_sources_is_told(checkout):
    commit = git(checkout, "rev-parse", "--short=12", "HEAD").strip()
    source = checkout / "cpp" / "kvpool" / "a.cpp"
    source.parent.mkdir(parents=True)
    source.write_text("int a = 1;\n")
    compiled = sources_digest(checkout)
    assert revision(checkout / "bench", compiled) == commit
    assert revision(checkout / "bench", "") == f"{commit}+stale-core"
    kernel = checkout / "cuda" / "attention" / "kernels.py"  # is compiled as well
    kernel.parent.mkdir(parents=True)
    kernel.write_text("a = 1\n")
    assert revision(checkout / "bench", compiled) == f"{commit}+stale-core"
    kernel.unlink()
    source.write_text("int a = 2;\n")
    assert revision(checkout / "bench", compiled) == f"{commit}+stale-core"
    source.rename(source.with_name("b.cpp"))
    assert revision(checkout / "bench", sources_digest(checkout)) == commit
    source.with_name("b.cpp").rename(source)
    (checkout / "bench" / "a.py").write_text("a = 2\n")
    assert revision(checkout / "bench", compiled) == f"{commit}+changes+stale-core"
    assert revision(checkout / "bench", sources_digest(checkout)) == f"{commit}+changes"


def test_a_build_and_a_bench_have_one_digest_of_the_sources(tmp_path):
    beside_python = Path(sys.executable).with_name("cmake")
    cmake = str(beside_python) if beside_python.exists() else shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    written = tmp_path / "digest.cpp"
    command = [cmake, f"-DROOT={ROOT}", f"-DOUTPUT={written}", "-P", str(ROOT / "cmake" / "sources_digest.cmake")]
    subprocess.run(command, check=True, timeout=60)
    assert f'"{sources_digest(ROOT)}"' in written.read_text()
    before = written.stat().st_mtime_ns
    subprocess.run(command, check=True, timeout=60)
    assert written.stat().st_mtime_ns == before  # a build in which nothing changed compiles nothing
    assert re.fullmatch("[0-9a-f]{64}", _core.build_info()["sources"])


def test_a_result_compares_the_core_that_it_measures(monkeypatch):
    monkeypatch.setattr(machine._core, "build_info", lambda: {"sources": "other sources"})
    commit = machine.describe()["commit"]
    assert commit is None or commit.endswith("+stale-core")
