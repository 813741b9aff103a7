"""`kvpool info` on CUDA: this build's kernels, this machine's driver, whether they are compatible, and NCCL."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from kvpool.transfer.gpu_routes import nccl_extra
from kvpool.transfer.libraries import nccl_library

# By the major version of the toolkit that compiled the kernels: the oldest driver that runs them, by the version of
# CUDA that it is for and by its own. A driver runs what newer toolkits of its major version made; but kernels with more
# than 4 KiB of arguments came with CUDA 12.1.
_OLDEST_DRIVERS = {12: ((12, 1), 530), 13: ((13, 0), 580)}


def kernels_text(build: dict[str, str]) -> str:
    """The targets of this build's kernels, and their compiler; or that it has no kernels."""
    if build["cuda_kernels"]:
        return f"{build['cuda_kernels'].replace(' ', ', ')}; nvcc {build['cuda_compiler']}"
    return "none: no CUDA compiler was found when this was built, or it was not wanted"


def collect(build: dict[str, str]) -> dict[str, Any]:
    """Asks the driver for its version, and starts nothing.

    Returns:
        `driver`, "12.4", or None and the `error`; `kernels_run`: whether this build's kernels run on it, None without.
    """
    try:
        version = _driver_version(os.environ.get("KVPOOL_CUDA_LIBRARY") or "libcuda.so.1")
    except OSError as error:
        return {"driver": None, "error": str(error), "kernels_run": None}
    runs = version >= _oldest_driver(build)[0] if build["cuda_kernels"] else None
    return {"driver": f"{version[0]}.{version[1]}", "error": None, "kernels_run": runs}


def driver_text(cuda: dict[str, Any], build: dict[str, str]) -> str:
    """One line: the driver, and what prevents its full use."""
    if cuda["driver"] is None:
        return f'none, so no device="cuda:0" ({cuda["error"]})'
    said = f"for CUDA {cuda['driver']}"
    if cuda["kernels_run"] is None:
        return f"{said}; without kernels, small pieces go by the copy engines"
    if cuda["kernels_run"]:
        return said
    (major, minor), number = _oldest_driver(build)
    said += f": too old for these kernels. Install a driver for CUDA {major}.{minor}"
    said += f" ({number} or newer)" if number else ""
    has = tuple(map(int, cuda["driver"].split(".")))
    others = [other for other, (oldest, _) in _OLDEST_DRIVERS.items() if oldest <= has]
    return f"{said}, or a wheel for CUDA {max(others)}" if others else said


def collect_nccl(setting: str) -> dict[str, Any]:
    """The NCCL for the route "nccl": `library` and `version`, "2.28.9", or None and the `error`."""
    where = nccl_library(setting)
    facts: dict[str, Any] = {"setting": setting, "library": None, "version": None, "error": None}
    if where == "wheel":
        return facts | {"error": f"not installed: for the route nccl between GPUs install {nccl_extra()}"}
    if os.path.isdir(where):
        beneath = (os.path.join(where, *parts, "libnccl.so.2") for parts in ((), ("lib",), ("lib64",)))
        where = next(filter(os.path.isfile, beneath), where)
    try:
        version = _nccl_version("libnccl.so.2" if where == "system" else where)
    except OSError as error:
        return facts | {"error": f"{error}; for the route nccl between GPUs install {nccl_extra()}"}
    return facts | {"library": where, "version": version}


def nccl_text(nccl: dict[str, Any]) -> str:
    """One line: the version and where it is, or what to install."""
    return str(nccl["error"]) if nccl["library"] is None else f"{nccl['version']} in {nccl['library']}"


def _nccl_version(library: str) -> str:
    """Raises OSError if the library does not exist or is not NCCL."""
    nccl = ctypes.CDLL(library)
    version = ctypes.c_int()
    try:
        code = nccl.ncclGetVersion(ctypes.byref(version))
    except AttributeError as error:
        raise OSError(str(error)) from None
    if code != 0:
        raise OSError(f"ncclGetVersion failed with {code}")
    return f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"


def _oldest_driver(build: dict[str, str]) -> tuple[tuple[int, int], int | None]:
    major = int(build["cuda_compiler"].split(".")[0])
    return _OLDEST_DRIVERS.get(major, ((major, 0), None))


def _driver_version(library: str) -> tuple[int, int]:
    """Raises OSError if the library does not exist or is not CUDA's."""
    driver = ctypes.CDLL(library)
    version = ctypes.c_int()
    try:
        code = driver.cuDriverGetVersion(ctypes.byref(version))
    except AttributeError as error:
        raise OSError(str(error)) from None
    if code != 0:
        raise OSError(f"cuDriverGetVersion failed with {code}")
    return version.value // 1000, version.value % 1000 // 10
