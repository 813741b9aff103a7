"""A result says which code it is of."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import machine
from bench.revision import revision


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
    monkeypatch.setattr(machine, "revision", lambda: "0123456789ab+changes")
    described = machine.describe()
    assert described["commit"] == "0123456789ab+changes"
    assert machine.one_line(described).endswith("commit 0123456789ab+changes")
    monkeypatch.setattr(machine, "revision", lambda: None)
    assert "commit" not in machine.one_line(machine.describe())
