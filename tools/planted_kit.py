"""What a planted bug is: a text in a file of the tree, and what takes its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Bug", "Build", "Edits", "in_cpp", "in_python"]

Build = Literal["address", "thread", "python"]
Edits = tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Bug:
    """One bug.

    Attributes:
        name: For the command line.
        floor: The folder below cpp/kvpool or src/kvpool that it is in.
        failure: What it would do.
        edits: In each file the text, which stands there once, and what takes its place.
        tests: Files of tests/cpp, by their names; for Python paths below tests.
        build: What sees it: AddressSanitizer's build, ThreadSanitizer's, or the Python tests.
    """

    name: str
    floor: str
    failure: str
    edits: Edits
    tests: tuple[str, ...]
    build: Build = "address"


def in_cpp(file: str, old: str, new: str) -> Edits:
    """In a file of cpp/kvpool."""
    return ((f"cpp/kvpool/{file}", old, new),)


def in_python(file: str, old: str, new: str) -> Edits:
    """In a file of src/kvpool."""
    return ((f"src/kvpool/{file}", old, new),)
