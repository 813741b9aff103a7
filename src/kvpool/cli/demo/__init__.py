"""`kvpool demo`: a small transformer in NumPy that answers with the cache and without, in two processes."""

from __future__ import annotations

from kvpool.cli.demo.command import add_parser

__all__ = ["add_parser"]
