"""Compilers whose programs run with an older glibc than this machine's: Zig's, from the package `ziglang`.

Zig brings clang, the headers and symbol lists of each glibc release, and a C++ library that it links statically. So a
wheel that is built on any Linux can be one for manylinux_2_28, without a container of that age.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shlex
import sys
from pathlib import Path

__all__ = ["cmake_arguments"]

_PROGRAMS = {"CMAKE_C_COMPILER": "cc", "CMAKE_CXX_COMPILER": "c++", "CMAKE_AR": "ar", "CMAKE_RANLIB": "ranlib"}


def cmake_arguments(release: str, folder: Path) -> list[str]:
    """Arguments for CMake, so that it compiles for a release of glibc.

    Args:
        release: As "2.28".
        folder: For scripts that call the compilers. Made if it is missing; it must stay while CMake builds.

    Raises:
        SystemExit: The release is no release, this machine is no x86_64, or the package `ziglang` is not installed; the
            text says which.
    """
    if not re.fullmatch(r"2\.\d+", release):
        raise SystemExit(f"glibc {release!r} is no release such as 2.28")
    if platform.machine() != "x86_64":
        raise SystemExit(f"a wheel for glibc {release} is built on x86_64 only, not on {platform.machine()}")
    if importlib.util.find_spec("ziglang") is None:
        raise SystemExit("a compiler for older releases of glibc comes with: pip install ziglang")
    folder.mkdir(parents=True, exist_ok=True)
    arguments = []
    for variable, program in _PROGRAMS.items():
        script = folder / f"zig-{program}"
        target = f" -target x86_64-linux-gnu.{release}" if program in ("cc", "c++") else ""
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ziglang {program}{target} "$@"\n')
        script.chmod(0o755)
        arguments.append(f"-D{variable}={script.resolve()}")
    return arguments
