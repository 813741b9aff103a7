"""kvpool's messages in an engine's log."""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import dataclass

import pytest

from kvpool.engines.logs import log_as


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@dataclass
class Loggers:
    """An engine's logger with a handler, as vLLM's, and one that is silent, as kvpool's."""

    engine: logging.Logger
    own: logging.Logger
    kept: Kept

    def log_as(self) -> None:
        log_as(self.engine.name, self.own.name)

    def told(self, level: int = logging.WARNING) -> list[str]:
        """What is in the engine's log when a module of ours has said something."""
        logging.getLogger(f"{self.own.name}.module").log(level, "something")
        return self.kept.messages


@pytest.fixture
def loggers(request):
    engine, own = (logging.getLogger(f"{request.node.name}-{which}") for which in ("engine", "own"))
    made = Loggers(engine, own, Kept())
    engine.propagate = False
    engine.handlers = [made.kept]
    engine.setLevel(logging.INFO)
    own.handlers = [logging.NullHandler()]
    return made


@pytest.fixture
def root(monkeypatch):
    """The handlers of the root logger; a test begins by emptying them, since pytest adds some after its fixtures."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    return root.handlers


def test_messages_go_where_the_engines_go_and_once(loggers, root):
    root.clear()
    assert loggers.told() == []
    for _ in range(2):
        loggers.log_as()
    assert loggers.told() == ["something"]


def test_the_engines_level_is_ours(loggers, root):
    root.clear()
    loggers.log_as()
    assert loggers.told(logging.DEBUG) == []
    assert loggers.told(logging.INFO) == ["something"]


@pytest.mark.parametrize("who", ["a handler of ours", "a level of ours", "a handler of all"])
def test_what_the_application_has_said_stays(loggers, root, who):
    root.clear()
    if who == "a handler of ours":
        loggers.own.addHandler(Kept())
    elif who == "a level of ours":
        loggers.own.setLevel(logging.ERROR)
    else:
        root.append(Kept())
    before = loggers.own.level, list(loggers.own.handlers)
    loggers.log_as()
    assert (loggers.own.level, loggers.own.handlers) == before
    assert loggers.told() == []


def test_an_engine_that_logs_nowhere_makes_nothing_of_it(loggers, root):
    root.clear()
    loggers.engine.handlers = []
    loggers.log_as()
    assert [type(handler) for handler in loggers.own.handlers] == [logging.NullHandler]
    loggers.engine.handlers = [loggers.kept]  # it says later where
    loggers.log_as()
    assert loggers.told() == ["something"]


def test_an_application_that_configures_logging_later_reads_each_message_once(loggers, root):
    root.clear()
    loggers.log_as()
    everything = Kept()
    root.append(everything)
    assert loggers.told() == []
    assert everything.messages == ["something"]
    root.clear()
    assert loggers.told() == ["something"]


def test_a_handler_of_the_engine_keeps_its_own_level(loggers, root):
    root.clear()
    loggers.kept.setLevel(logging.ERROR)
    loggers.log_as()
    assert loggers.told(logging.WARNING) == []
    assert loggers.told(logging.ERROR) == ["something"]


def test_threads_that_start_engines_at_once_log_once(loggers, root):
    root.clear()
    together = threading.Barrier(4)

    def start():
        together.wait()
        loggers.log_as()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            loggers.own.handlers, loggers.own.level = [logging.NullHandler()], 0
            threads = [threading.Thread(target=start) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(loggers.own.handlers) == 2
    finally:
        sys.setswitchinterval(before)
