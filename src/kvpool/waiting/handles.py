"""Several transfers as one: all of them end before their blocks are used for something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

__all__ = ["Handle", "carry_out", "end"]


class Handle(Protocol):
    """A transfer that is under way."""

    def exception(self) -> Exception | None:
        """Waits for its end; why it failed, or None."""

    def cancel(self) -> bool:
        """Asks for its end."""


_Handle = TypeVar("_Handle", bound=Handle)


def carry_out(begin: Sequence[Callable[[], _Handle]]) -> list[_Handle]:
    """Begins all, and waits for all.

    Whatever is raised, by one that cannot begin, by one that fails, or by a signal's handler while this waits: all have
    ended by then, so nothing writes to their blocks.

    Returns:
        What was begun; each has succeeded.
    """
    handles: list[_Handle] = []
    try:
        for one in begin:
            handles.append(one())
        failures = [failure for handle in handles if (failure := handle.exception()) is not None]
    except BaseException:
        end(handles)
        raise
    if failures:
        end(handles)
        raise failures[0]
    return handles


def end(handles: Sequence[Handle]) -> None:
    """Cancels all, and returns when all have ended."""
    for handle in handles:
        handle.cancel()
    for handle in handles:
        handle.exception()
