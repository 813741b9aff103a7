"""Builds the extension module kvpool._core with CMake and Ninja; everything else stands in pyproject.toml.

Environment:
    CMAKE_ARGS        more arguments for CMake, for instance "-DKVPOOL_CUDA=OFF"
    KVPOOL_BUILD_DIR  where to build and keep the objects, for quick rebuilds
    CMAKE_BUILD_PARALLEL_LEVEL  how many compilers at once; the number of processors when unset
    KVPOOL_WHEEL_LABEL  what follows the version behind a plus, as in 0.1.0+cu13: for wheels that are published with
                      kernels (tools/wheels.py, docs/adr/0017); what is built by hand has none
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).parent.resolve()
LABEL = os.environ.get("KVPOOL_WHEEL_LABEL", "")


class EggInfo(egg_info):
    """Makes the label a part of the version: of the metadata, and so of the wheel's name."""

    def finalize_options(self) -> None:
        """After the options of setup.cfg, where a source package says that it has no label."""
        if LABEL:
            self.tag_build = f"+{LABEL}"
        super().finalize_options()


class Build(build):
    """Builds wheels outside the source tree, so that no stale file of an older build can get into one."""

    def initialize_options(self) -> None:
        """Points the build at a folder that goes when the build is over."""
        super().initialize_options()
        self.build_base = tempfile.mkdtemp(prefix="kvpool-build-")
        atexit.register(shutil.rmtree, self.build_base, ignore_errors=True)


class CMakeBuild(build_ext):
    """Runs CMake where setuptools would run the compiler."""

    def build_extension(self, ext: Extension) -> None:
        """Configures, builds and installs the module to where setuptools expects it."""
        import pybind11

        kept = os.environ.get("KVPOOL_BUILD_DIR")
        if kept:
            build_dir = ROOT / kept
        elif self.editable_mode or self.inplace:
            build_dir = ROOT / "build" / str(sys.implementation.cache_tag)
        else:
            build_dir = Path(self.build_temp).resolve() / "cmake"
        target_dir = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build_dir.mkdir(parents=True, exist_ok=True)

        cmake = tool("cmake")
        configure = [
            cmake,
            *("-S", str(ROOT)),
            *("-B", str(build_dir)),
            *("-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            "-DKVPOOL_PYTHON=ON",
            f"-DKVPOOL_VERSION_LABEL={LABEL}",  # an empty one, too: a build folder that is kept remembers the last
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        subprocess.run(configure, check=True)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
        compile_ = [cmake, "--build", str(build_dir), "--target", "_core", "--parallel", jobs]
        subprocess.run(compile_, check=True)
        install = [cmake, "--install", str(build_dir), "--component", "python", "--prefix", str(target_dir)]
        subprocess.run([*install, *([] if self.debug else ["--strip"])], check=True)


def tool(name: str) -> str:
    """The program of the Python package of that name, which a build requires, or else the system's."""
    beside_python = Path(sys.executable).parent / name
    found = str(beside_python) if beside_python.exists() else shutil.which(name)
    if not found:
        raise SystemExit(f"kvpool: building needs {name}: pip install {name}")
    return found


setup(
    ext_modules=[Extension("kvpool._core", sources=[])],
    cmdclass={"build": Build, "build_ext": CMakeBuild, "egg_info": EggInfo},
)
