"""Builds the few lines of C++ that a bench calls where the time of Python would dominate.

What was built is kept in build/bench/native, so that the processes of a run build it once. Whatever goes wrong is a
RuntimeError.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[2] / "build" / "bench" / "native"
_RUN_S_MAX = 120


def build(source: Path, *options: str) -> ctypes.CDLL:
    """Compiles a file into a library and opens it."""
    return ctypes.CDLL(str(_built(source, ".so", "-shared", "-fPIC", *options)))


def build_program(source: Path, arguments: Sequence[str], *options: str) -> str:
    """Compiles a file into a program, runs it, and returns what it prints."""
    program = _built(source, "", *options)
    try:
        ran = subprocess.run(
            [str(program), *arguments], capture_output=True, text=True, check=False, timeout=_RUN_S_MAX
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{source.name} did not end within {_RUN_S_MAX} s") from None
    if ran.returncode != 0:
        raise RuntimeError(f"{source.name} ended with {ran.returncode}: {ran.stderr[-300:]}")
    return ran.stdout


def _built(source: Path, suffix: str, *options: str) -> Path:
    """Where it is, named after everything that it was made from."""
    made_from = hashlib.sha256(source.read_bytes())
    for option in options:
        library = Path(option)
        made_from.update(library.read_bytes() if library.suffix == ".a" and library.is_file() else option.encode())
    target = _FOLDER / f"{source.stem}-{made_from.hexdigest()[:16]}{suffix}"
    if not target.exists():
        _FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
            fresh = Path(folder, target.name)
            _compile(source, fresh, *options)
            fresh.replace(target)  # several processes may build it at once, and any of them may win
    return target


def _compile(source: Path, target: Path, *options: str) -> None:
    # Libraries stand behind what uses them, so options come last.
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O2", str(source), "-o", str(target), *options]
    try:
        built = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"{source.name}: {command[0]} does not start: {error.strerror}") from None
    if built.returncode != 0:
        wrong = [line for line in built.stderr.splitlines() if "error" in line or "undefined" in line]
        raise RuntimeError(f"{source.name} does not build: {' '.join(wrong[:1])[-300:]}")
