"""Finds the libraries in the wheels of UCX and NCCL."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["nccl_library", "ucx_library"]


def ucx_library(setting: str) -> str:
    """The core's value for the setting `ucx`: "wheel" becomes the path of the wheel's library, if it is installed.

    Imports nothing, because the wheel's module would load the library before it is known whether it is needed.
    """
    if setting != "wheel":
        return setting
    return _wheel_library("libucx", "libucp.so.0") or setting


def nccl_library(setting: str) -> str:
    """The same for the setting `nccl`."""
    if setting != "wheel":
        return setting
    return _wheel_library("nvidia", "libnccl.so.2", "nccl") or setting


def _wheel_library(package: str, name: str, beneath: str = "") -> str:
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        library = Path(folder, beneath, "lib", name)
        if library.is_file():
            return str(library)
    return ""
