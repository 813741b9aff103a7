"""The demo of two processes: it keeps its promises, says so when it does not, and leaves no process behind."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Looked for, not imported, which takes seconds in each worker of pytest: the instances need it, in their processes.
if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)
pytest.importorskip("rich")

import two_instances
from instance import Server
from kit import LONG, ctrl_c_works
from process import Instance
from rich.console import Console

import kvpool

EXAMPLES = Path(two_instances.__file__).parent


class Demo:
    """A run of the script, and how to find the processes that it has started."""

    def __init__(self, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.environment = {
            **os.environ,
            "KVPOOL_TRACES": str(folder),
            "KVPOOL_LEASE_S": "10",  # a busy machine must not cost a peer; one that is killed is noticed by its process
            "COLUMNS": "100",
            "DEMO_MARK": self.mark,
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(EXAMPLES / "two_instances.py"), *arguments]
        return subprocess.Popen(
            command, env=self.environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, restore_signals=True,
        )  # fmt: skip

    def processes(self) -> set[int]:
        """Those of the run that are alive."""
        found = set()
        for entry in Path("/proc").iterdir():
            try:
                marked = entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes()
            except OSError:  # it has ended, or belongs to another process
                continue
            if marked:
                found.add(int(entry.name))
        return found


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    run = Demo(tmp_path)
    yield run
    for pid in run.processes():
        os.kill(pid, signal.SIGKILL)


def wait_for(holds: Callable[[], bool], seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "nothing for too long"
        time.sleep(0.02)


# Each run kills both instances and starts them again. One prints figures, over TCP, and one prints text for people.
@pytest.mark.parametrize("arguments", [("--tcp",), *([()] if LONG else [])], ids=["tcp", *(["unix"] if LONG else [])])
def test_all_promises_are_kept(demo: Demo, arguments: tuple[str, ...]) -> None:
    run = demo.start("--json", "--requests", "2", *arguments)
    out, err = run.communicate(timeout=110)
    assert (run.returncode, err) == (0, "")
    figures = json.loads(out)
    assert set(figures["promises"].values()) == {True}
    assert len(figures["promises"]) >= 12
    assert set(figures["noticed_ms"]) == {"A", "B"}
    first, second = figures["requests"]
    assert (first["same_tokens"], second["same_tokens"]) == (True, True)
    assert first["transfer"]["skipped_blocks"] == 0
    assert second["transfer"]["skipped_blocks"] > second["transfer"]["blocks"] / 2
    assert first["transfer"]["route"] == ("sock" if arguments else "shm")
    assert first["cached_tokens_there"] > first["prompt_tokens"] - 16
    assert demo.processes() == set()


def test_the_output_tells_a_person_what_happens(demo: Demo) -> None:
    run = demo.start("--requests", "2")
    out, err = run.communicate(timeout=110)
    assert (run.returncode, err) == (0, "")
    for text in ("A computes", "B finds", "kill -9 A", "A comes back", "kill -9 B", "PeerLost", "All as promised."):
        assert text in out
    assert "has connected: unix" in out
    assert "the others by shm" in out
    assert out.count("✓") >= 12
    assert "✗" not in out
    assert demo.processes() == set()


def test_ctrl_c_ends_all_processes(demo: Demo) -> None:
    with ctrl_c_works():
        run = demo.start("--requests", "4")
    wait_for(lambda: len(demo.processes()) >= 3)
    os.killpg(run.pid, signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode == 130
    wait_for(lambda: demo.processes() == set())


def test_processes_end_with_a_demo_that_is_killed(demo: Demo) -> None:
    run = demo.start("--requests", "4")
    wait_for(lambda: len(demo.processes()) >= 3)
    run.kill()
    run.communicate(timeout=60)
    wait_for(lambda: demo.processes() == set())


def test_a_broken_promise_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def story_of_failure(story: two_instances.Story, *_: object) -> None:
        story.promise("this holds", True)
        story.promise("this does not", False)

    monkeypatch.setattr(two_instances, "tell_story", story_of_failure)
    monkeypatch.setattr(sys, "argv", ["two_instances.py"])
    assert two_instances.main() == 1
    out = capsys.readouterr().out
    assert "✗ this does not" in out
    assert "Not as promised." in out


def test_a_promise_is_kept_only_when_it_is_kept_every_time() -> None:
    story = two_instances.Story(Console(quiet=True))
    for kept in (True, False, True):
        story.promise("nothing is lost", kept)
    assert story.promises == {"nothing is lost": False}


def test_noticing_too_late_breaks_a_promise() -> None:
    story = two_instances.Story(Console(quiet=True))
    story.noticed("A", "B is gone", 0.02)
    assert set(story.promises.values()) == {True}
    story.noticed("B", "A is gone", 20.0)
    assert set(story.promises.values()) == {True, False}


@pytest.mark.parametrize("arguments", [("--requests", "1"), ("--requests", "5"), ("--route", "pigeon")])
def test_a_wrong_argument_is_reported_and_nothing_runs(demo: Demo, arguments: tuple[str, ...]) -> None:
    run = demo.start(*arguments)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (2, "")
    assert arguments[0] in err


# ---- the handle of a process


class Parrot(Server):
    """Answers without a model."""

    def __init__(self, name: str) -> None:
        self.name = name

    def close(self) -> None:
        pass

    def say(self, word: object) -> object:
        return self.name, word

    def fail(self) -> None:
        raise kvpool.PeerLost("nobody is there")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Broken(Server):
    """Does not come up."""

    def __init__(self, name: str) -> None:
        raise kvpool.OutOfMemory(f"no room for {name}")


@pytest.fixture
def parrot() -> Iterator[Instance]:
    instance = Instance("p", Parrot)
    assert instance.answer(60) is None
    yield instance
    instance.close()
    instance.close()
    assert not instance.alive


def test_an_instance_returns_and_raises_what_its_server_does(parrot: Instance) -> None:
    assert parrot.ask("say", 5) == ("p", 5)
    with pytest.raises(kvpool.PeerLost, match="nobody is there") as caught:
        parrot.ask("fail")
    assert "in the process of p" in str(caught.value.__cause__)
    assert parrot.ask("say", "again") == ("p", "again")


def test_a_killed_instance_is_told_from_a_slow_one(parrot: Instance) -> None:
    parrot.order("sleep", 30.0)
    with pytest.raises(TimeoutError, match="p has not answered within"):
        parrot.answer(0.05)
    at = parrot.kill()
    assert at <= time.monotonic()
    assert not parrot.alive
    with pytest.raises(ChildProcessError, match="has ended"):
        parrot.answer(10)


def test_an_instance_that_does_not_come_up_says_why() -> None:
    instance = Instance("p", Broken)
    with pytest.raises(kvpool.OutOfMemory, match="no room for p"):
        instance.answer(60)
    instance.close()
    assert not instance.alive
