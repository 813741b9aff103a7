"""The machine of the figures. Says nothing that names the machine or its user."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.revision import revision
from kvpool import _core

_PACKAGES = ("numpy", "torch", "matplotlib")


def describe() -> dict[str, Any]:
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / (1 << 20), 1),
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "huge_pages_shared": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "kvpool": _core.__version__,
        "commit": revision(compiled=_core.build_info().get("sources", "")),
        "compiler": _core.build_info().get("compiler", ""),
        **{name: version for name in _PACKAGES if (version := _version(name))},
    }


def one_line(machine: dict[str, Any]) -> str:
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['kernel']}, "
        f"Python {machine['python']}, kvpool {machine['kvpool']}"
        + (f", commit {machine['commit']}" if machine["commit"] else "")
    )


def _field(file: str, name: str) -> str:
    for line in Path(file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "0"


def _chosen(file: str) -> str:
    """The word in brackets: `always [madvise] never`."""
    try:
        return Path(file).read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return "unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
