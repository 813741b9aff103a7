"""Structured logs: one JSON object a line. Prompts, answers and keys never stand in them."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from typing import Any, Final, TextIO

__all__ = ["LOGGER", "event", "write_to"]

LOGGER: Final = logging.getLogger("kvpool.router")


def event(level: int, name: str, **fields: Any) -> None:
    """Logs what happened, with its fields."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, name, extra={"fields": fields})


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"ts": at, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def write_to(stream: TextIO, level: str) -> None:
    """Sends the router's logs, and those of the server below it, to a stream.

    Args:
        stream: Text.
        level: "debug", "info", "warning" or "error".
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Lines())
    for name, least in (("kvpool.router", level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(least)
