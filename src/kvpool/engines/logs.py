"""Where an engine logs, kvpool logs too: its users configure the engine's log, and look there."""

from __future__ import annotations

import logging
import threading
from typing import Final

__all__ = ["log_as"]

_ONE_BY_ONE: Final = threading.Lock()


def log_as(engine: str, ours: str = "kvpool") -> None:
    """Gives kvpool's messages to the handlers of an engine's logger, at its level.

    A handler that the root logger gets later takes them over, so that nobody reads them twice.

    Changes nothing where the application has said what becomes of kvpool's messages: by a handler or a level of
    kvpool's logger, or by a handler of the root logger, which gets them anyway. Any thread may call, and again.

    Args:
        engine: The name of the engine's logger.
        ours: The name of kvpool's.
    """
    own, engines = logging.getLogger(ours), logging.getLogger(engine)
    with _ONE_BY_ONE:
        said = [handler for handler in own.handlers if not isinstance(handler, logging.NullHandler)]
        if said or own.level or logging.getLogger().handlers:
            return
        if engines.handlers:
            own.addHandler(_UnlessRoot(engines))
            own.setLevel(engines.level)


class _UnlessRoot(logging.Handler):
    """Passes records to the handlers of another logger while the root logger has none."""

    def __init__(self, to: logging.Logger) -> None:
        super().__init__()
        self._to = to

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        for handler in self._to.handlers:
            if record.levelno >= handler.level:
                handler.handle(record)
