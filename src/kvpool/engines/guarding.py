"""A cache that fails is one that has nothing: what engines call must not raise for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from kvpool.errors import Error, OutOfBlocks

__all__ = ["guarded"]

_T = TypeVar("_T")


def guarded(log: logging.Logger, what: str, call: Callable[[], _T], otherwise: _T) -> _T:
    """The result; or the other value if it raises, which is logged.

    Args:
        log: Of the engine.
        what: The call in words: "store blocks".
        call: What to do.
        otherwise: The value of a cache that has nothing.
    """
    try:
        return call()
    except OutOfBlocks as error:  # all that is stored is being read
        log.debug("kvpool has no room to %s: %s", what, error)
    except (Error, MemoryError) as error:
        log.warning("kvpool could not %s: %s", what, error)
    except Exception:
        log.exception("kvpool could not %s", what)
    return otherwise
