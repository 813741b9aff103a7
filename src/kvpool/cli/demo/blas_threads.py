"""The threads of OpenBLAS, which NumPy's wheels bring: its variables count only before NumPy is imported."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import NamedTuple

__all__ = ["one_blas_thread"]


class _Control(NamedTuple):
    """Reads and sets the number of threads of one library."""

    read: Callable[[], int]
    set: Callable[[int], object]


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Matrix products use one thread meanwhile. With another BLAS than OpenBLAS nothing changes.

    For times that can be compared on a busy machine: several threads wait for each other after each product.
    """
    changed = [(control, control.read()) for control in _controls()]
    for control, _ in changed:
        control.set(1)
    try:
        yield
    finally:
        for control, threads in changed:
            control.set(threads)


def _controls() -> list[_Control]:
    """Of each OpenBLAS in this process."""
    mapped = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    files = {fields[5] for fields in mapped if len(fields) == 6 and "openblas" in Path(fields[5]).name}
    return [found for file in sorted(files) if (found := _control_in(file)) is not None]


def _control_in(file: str) -> _Control | None:
    """By the names that NumPy's wheels and distributions give the functions."""
    try:
        library = ctypes.CDLL(file)
    except OSError:  # replaced since it was mapped
        return None
    for prefix, suffix in product(("scipy_openblas", "openblas"), ("64_", "")):
        name = f"{prefix}_{{}}_num_threads{suffix}"
        if hasattr(library, name.format("set")):
            return _Control(getattr(library, name.format("get")), getattr(library, name.format("set")))
    return None
