"""What `kvpool demo` shows: a small transformer in NumPy that answers with the cache and without, in two processes."""

from __future__ import annotations

from kvpool.control.demo.story import run

__all__ = ["run"]
