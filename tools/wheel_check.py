"""Checks a wheel before it is published: its contents, and that it works in an empty environment."""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

from tools import fatbin

__all__ = ["Expected", "clean_environment", "problems_of", "try_out"]

BYTES_MAX = 100 << 20  # that PyPI takes
REQUIRED = {"numpy", "tomli"}  # without being asked for: no library of CUDA is among them
TARGETS = ["sm_80", "sm_90", "sm_100", "compute_100"]  # cmake/cuda.cmake

# Runs in the environment that has the wheel and what it requires, and nothing else.
USE = """
import importlib.metadata, json
import numpy as np
import kvpool
from kvpool import _core

layout = kvpool.KVLayout(layers=2, kv_heads=2, head_dim=64, dtype="float16", block_tokens=16)
with kvpool.Pool(layout, hbm_blocks=8, dram_blocks=8, device="cpu") as pool:
    prompt, addrs = np.arange(64), pool.alloc(4)
    blocks = pool.tensor(kvpool.HBM).numpy()
    blocks[kvpool.block_ids(addrs)] = 1.5
    pool.insert(prompt, addrs).close()
    assert len(pool.swap_out(2)) == 2
    with pool.match(prompt) as hit, pool.swap_in(hit.addrs) as held:
        assert hit.tokens == 64 and (blocks[kvpool.block_ids(held.addrs)] == 1.5).all()
    pool.audit()
loaded = {line.split("/")[-1].strip() for line in open("/proc/self/maps") if "/" in line}
try:
    kvpool.Pool(layout, hbm_blocks=2, device="cuda:0").close()
    gpu = "works"
except kvpool.Error as error:
    gpu = str(error)
print(json.dumps({
    "version": kvpool.__version__,
    "metadata": importlib.metadata.version("kvpool"),
    "file": _core.__file__,
    "build": _core.build_info(),
    "cuda_loaded": sorted(name for name in loaded if name.startswith(("libcuda", "libnccl", "libuc"))),
    "gpu": gpu,
}))
"""


@dataclass(frozen=True)
class Expected:
    """What a wheel was built to be."""

    version: str  # with its label: "0.1.0+cu13"
    sources: frozenset[str]  # the files of the package, "kvpool/pool.py" and so on, without the extension module
    cuda_release: str  # of the toolkit, "13.0"; "" for none
    built_in: Path  # where its sources lay


def problems_of(wheel: Path, expected: Expected) -> list[str]:
    """What is wrong with the file, in words; nothing of it is run.

    Raises:
        OSError: It cannot be read.
        zipfile.BadZipFile: It is no wheel.
    """
    with zipfile.ZipFile(wheel) as opened:
        files = {name: opened.read(name) for name in opened.namelist() if not name.endswith("/")}
    problems = _of_metadata(wheel, files, expected)
    package = {name for name in files if name.startswith("kvpool/")}
    modules = sorted(name for name in package if name.endswith(".so"))
    problems += [f"{name} is missing" for name in sorted(expected.sources - package)]
    problems += [f"{name} does not belong into it" for name in sorted(package - expected.sources - {*modules[:1]})]
    beside = {name.split("/")[0] for name in files} - {"kvpool", f"kvpool-{expected.version}.dist-info"}
    # kvpool.libs: where auditwheel puts what is linked and no manylinux has.
    problems += [f"{name}/ lies beside the package" for name in sorted(beside)]
    if len(modules) != 1:
        return [*problems, f"has {len(modules)} extension modules"]
    if wheel.stat().st_size > BYTES_MAX:
        problems.append(f"has {wheel.stat().st_size} bytes")
    if os.fsencode(expected.built_in) in files[modules[0]]:
        problems.append(f"tells that it was built in {expected.built_in}")
    found = fatbin.targets(files[modules[0]])
    if found != (TARGETS if expected.cuda_release else []):
        problems.append(f"has GPU code for: {' '.join(found) or 'nothing'}")
    return problems


def _of_metadata(wheel: Path, files: dict[str, bytes], expected: Expected) -> list[str]:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    name = re.fullmatch(
        rf"kvpool-{re.escape(expected.version)}-({python}-{python}-manylinux_2_\d+_\w+)\.whl", wheel.name
    )
    folder = f"kvpool-{expected.version}.dist-info"

    def read(file: str) -> Message:
        return email.message_from_bytes(files.get(f"{folder}/{file}", b""))

    problems = [] if name else [f"is named {wheel.name}"]
    described, metadata = read("WHEEL"), read("METADATA")
    if name and described.get_all("Tag") != [name[1]]:
        problems.append(f"says of itself that it is for {described.get_all('Tag')}")
    if described["Root-Is-Purelib"] != "false":
        problems.append(f"says Root-Is-Purelib: {described['Root-Is-Purelib']}")
    if metadata["Version"] != expected.version:
        problems.append(f"says that it is version {metadata['Version']}")
    required = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    if {re.split(r"[^\w-]", text)[0] for text in required} != REQUIRED:
        problems.append(f"requires {required}")
    licences = {file.removeprefix(f"{folder}/licenses/") for file in files if file.startswith(f"{folder}/licenses/")}
    wanted = {"LICENSE", "NOTICE", *(f"third_party/{name}/LICENSE" for name in ("blake3", "dlpack", "ucx"))}
    problems += [f"lacks the licence {file}" for file in sorted(wanted - licences)]
    return problems


def clean_environment() -> dict[str, str]:
    """This process's environment, without what would change what is built or tried."""
    dropped = ("KVPOOL_", "CUDA", "PYTHON", "CMAKE_ARGS", "NVCC_", "AUDITWHEEL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def try_out(wheel: Path, expected: Expected, folder: Path) -> str:
    """Installs the wheel into a fresh virtual environment in `folder`, uses it there, and returns what it says of GPUs.

    What the wheel requires comes from where pip finds it.

    Raises:
        subprocess.CalledProcessError: A program failed; what it said is on standard error.
        ValueError: It works, and is not what was meant.
    """
    folder.mkdir(parents=True)
    python = folder / "venv" / "bin" / "python"

    def run(*command: str | Path) -> str:
        return subprocess.run(
            command, cwd=folder, env=clean_environment(), check=True, text=True, stdout=subprocess.PIPE
        ).stdout

    run(sys.executable, "-m", "venv", folder / "venv")
    run(python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", wheel)
    run(python, "-m", "pip", "--disable-pip-version-check", "check")
    facts: dict[str, Any] = json.loads(run(python, "-c", USE))
    told = json.loads(run(python, "-m", "kvpool", "info", "--json"))
    run(python.with_name("kvpool"), "demo", "--prompts", "2")  # and its second process
    run(python.with_name("kvpool"), "bench", "--quick")
    build = facts["build"]
    problems = [
        f"{what} is {is_!r}, not {should!r}"
        for what, is_, should in [
            ("kvpool.__version__", facts["version"], expected.version),
            ("the installed version", facts["metadata"], expected.version),
            ("`kvpool --version`", run(python.with_name("kvpool"), "--version"), f"kvpool {expected.version}\n"),
            ("what `kvpool info` says of the build", told["build"], build),
            ("what is loaded of CUDA", facts["cuda_loaded"], []),
            ("the kind of build", build["build_type"], "Release"),
            ("nvcc", ".".join(build["cuda_compiler"].split(".")[:2]), expected.cuda_release),
            ("what the kernels are for", build["cuda_kernels"].split(), TARGETS if expected.cuda_release else []),
        ]
        if is_ != should
    ]
    if not Path(facts["file"]).is_relative_to(folder):
        problems.append(f"it is {facts['file']} that was imported")
    if problems:
        raise ValueError("; ".join(problems))
    return str(facts["gpu"])
