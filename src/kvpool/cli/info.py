"""`kvpool info`: this build, the machine, and the settings in effect with the source of each."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import tempfile
from importlib import metadata
from typing import Any

import numpy as np

from kvpool import _core, config
from kvpool.cli import cuda
from kvpool.errors import Error, Unsupported
from kvpool.pool import Pool
from kvpool.transfer.libraries import ucx_library
from kvpool.types import RawLayout


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    parser = commands.add_parser("info", help="show the version, the build, the machine and the settings")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def collect() -> dict[str, Any]:
    """All output of the command, ready for JSON.

    Raises:
        ArgumentError: A setting in the file or in the environment is wrong.
    """
    loaded = config.load_with_sources()
    headroom, limit = _core.memory_headroom()
    build = _core.build_info()
    return {
        "version": _core.__version__,
        "build": build,
        "python": {"version": platform.python_version(), "numpy": np.__version__},
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "processors": len(os.sched_getaffinity(0)),
            "memory_available_bytes": headroom,
            "memory_limit": limit,
        },
        "cuda": cuda.collect(build),
        "ucx": _ucx(loaded.settings.ucx),
        "nccl": cuda.collect_nccl(loaded.settings.nccl),
        "disk": _disk(),
        "object_storage": _object_storage(),
        "config_file": str(loaded.file) if loaded.file else None,
        "settings": config.describe(loaded),
    }


def _ucx(setting: str) -> dict[str, Any]:
    """The UCX for the route "ucx"; `error` says why it is not available, or is None."""
    facts: dict[str, Any] = {"setting": setting, "library": None, "lanes": [], "error": None}
    try:
        where = ucx_library(setting)
        facts["library"] = _core.describe_ucx(where)
        found = (re.search(r"\d+:(\S+)\.\d+ ", lane) for lane in _core.probe_ucx_lanes(where))
        facts["lanes"] = [lane[1] for lane in found if lane]
    except Unsupported as error:
        facts["error"] = str(error)
    return facts


def _disk() -> dict[str, Any]:
    """How a pool in the folder for temporary files would read and write its disk; `error` says why it would not."""
    facts: dict[str, Any] = {"engine": None, "direct": None, "folder": tempfile.gettempdir(), "error": None}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="kvpool-info-") as folder,
            Pool(RawLayout(4096), dram_blocks=1, disk_blocks=1, disk_path=os.path.join(folder, "kv")) as pool,
        ):
            disk = pool.stats().disk
            if disk is not None:
                facts.update(engine=disk.engine, direct=disk.direct)
    except (Error, OSError) as error:
        facts["error"] = str(error)
    return facts


def _disk_text(facts: dict[str, Any]) -> str:
    if facts["engine"] is None:
        return str(facts["error"])
    return f"{facts['engine']}, {'O_DIRECT' if facts['direct'] else 'no O_DIRECT'} in {facts['folder']}"


def _object_storage() -> dict[str, Any]:
    """The library for `kvpool.storage.object_store`; its version is None where it is not installed."""
    try:
        return {"library": "obstore", "version": metadata.version("obstore")}
    except metadata.PackageNotFoundError:
        return {"library": "obstore", "version": None}


def _object_storage_text(facts: dict[str, Any]) -> str:
    return f"obstore {facts['version']}" if facts["version"] else "not installed: pip install 'kvpool[storage]'"


def _run(arguments: argparse.Namespace) -> None:
    facts = collect()
    print(json.dumps(facts, indent=2) if arguments.json else _text(facts))


def _ucx_text(ucx: dict[str, Any]) -> str:
    if ucx["library"] is None:
        return str(ucx["error"])
    reached = ", ".join(dict.fromkeys(ucx["lanes"])) or "nothing: " + (ucx["error"] or "no lane")
    return f"{ucx['library'].removeprefix('UCX ')}; another process here is reached by {reached}"


def _text(facts: dict[str, Any]) -> str:
    build, machine = facts["build"], facts["machine"]
    rows = [
        ("kvpool", facts["version"]),
        ("built with", f"{build['compiler']} ({build['build_type']})"),
        ("CUDA kernels", cuda.kernels_text(build)),
        ("CUDA driver", cuda.driver_text(facts["cuda"], build)),
        ("Python", f"{facts['python']['version']}, NumPy {facts['python']['numpy']}"),
        ("machine", f"{machine['system']}, {machine['processors']} processors"),
        ("memory", f"{machine['memory_available_bytes'] / 2**30:.1f} GiB available, by {machine['memory_limit']}"),
        ("UCX", _ucx_text(facts["ucx"])),
        ("NCCL", cuda.nccl_text(facts["nccl"])),
        ("disk", _disk_text(facts["disk"])),
        ("object storage", _object_storage_text(facts["object_storage"])),
        ("settings file", facts["config_file"] or "none"),
    ]
    lines = [f"{name:<14}  {value}" for name, value in rows]
    lines.append("settings")
    for setting in facts["settings"]:
        value = json.dumps(setting["value"]).strip('"')
        lines.append(f"  {setting['name']:<18}  {value:<8}  {setting['source']}")
    return "\n".join(lines)
