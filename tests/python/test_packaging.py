"""The basis of `make wheels`: names and labels, the source package, and checks that find what is wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvpool import _core
from tools import fatbin, wheel_check, wheels
from tools.wheel_check import Expected
from tools.wheels import Toolkit

ROOT = Path(__file__).resolve().parents[2]
VERSION = _core.__version__.partition("+")[0]
LABELLED = f"{VERSION}+cu13"
DIST_INFO = f"kvpool-{LABELLED}.dist-info"
TAG = f"cp{sys.version_info.major}{sys.version_info.minor}-cp{sys.version_info.major}{sys.version_info.minor}"
PLATFORM = "manylinux_2_35_x86_64"


def toolkit(home: Path, says: str) -> str:
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho '{says}'\n")
    nvcc.chmod(0o755)
    return str(home)


def test_a_wheel_is_named_by_the_major_version_of_its_toolkit(tmp_path):
    old = toolkit(tmp_path / "a", "Cuda compilation tools, release 12.9, V12.9.86")
    new = toolkit(tmp_path / "b", "Cuda compilation tools, release 13.0, V13.0.88")
    assert [(t.label, t.release) for t in wheels.named_toolkits([old, new])] == [("cu12", (12, 9)), ("cu13", (13, 0))]


def test_a_toolkit_that_is_missing_too_old_or_one_of_two_is_refused(tmp_path):
    too_old = toolkit(tmp_path / "old", "Cuda compilation tools, release 12.6, V12.6.85")
    pair = [toolkit(tmp_path / name, f"release 12.{name}, V12") for name in ("8", "9")]
    for homes, why in [([str(tmp_path)], "there is no"), ([too_old], "older than 12.8"), (pair, "one wheel for each")]:
        with pytest.raises(SystemExit, match=why):
            wheels.named_toolkits(homes)


def test_the_newest_toolkit_of_each_major_version_is_taken():
    found = [Toolkit(Path("/"), release) for release in ((12, 9), (11, 8), (13, 0), (12, 10), (12, 6))]
    assert sorted(t.release for t in wheels.newest_of_each_major(found)) == [(12, 10), (13, 0)]
    assert wheels.newest_of_each_major([Toolkit(Path("/"), (12, 6))]) == []


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a checkout, without build outputs."""
    tree = tmp_path_factory.mktemp("checkout")
    made = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", ".*")
    for name in ("cpp", "bindings", "cuda", "cmake", "third_party", "src"):
        shutil.copytree(ROOT / name, tree / name, ignore=made)
    for name in ("CMakeLists.txt", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tree / name)
    return tree


@pytest.fixture(scope="module")
def source_package(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source package of it, unpacked."""
    folder = tmp_path_factory.mktemp("package")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wheels, "ROOT", source_tree)
        package = wheels.make_sdist(files_of(source_tree), folder / "work", folder / "out")
    shutil.unpack_archive(package, folder, filter="data")
    return folder / package.name.removesuffix(".tar.gz")


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_source_package_has_all_that_a_wheel_is_built_from(source_tree, source_package):
    files, packed = files_of(source_tree), files_of(source_package)
    assert files - packed == set()
    assert {name for name in packed - files if "egg-info" not in name} == {"PKG-INFO", "setup.cfg"}


@pytest.mark.parametrize(("label", "version"), [("", VERSION), ("cu13", LABELLED)])
def test_the_label_is_a_part_of_the_version(source_package, tmp_path, label, version):
    hook = "import sys; from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", hook, str(tmp_path)],
        cwd=source_package, env=wheel_check.clean_environment() | {"KVPOOL_WHEEL_LABEL": label},
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    assert metadata.parent.name == f"kvpool-{version}.dist-info"
    assert f"\nVersion: {version}\n" in metadata.read_text()


def test_the_gpu_code_of_this_build_is_found_in_the_file():
    assert fatbin.targets(Path(_core.__file__).read_bytes()) == _core.build_info()["cuda_kernels"].split()


@pytest.mark.parametrize("damage", [b"\x7fELF\x01\x01", b"MZ"])
def test_files_that_are_no_elf_are_refused(damage):
    with pytest.raises(ValueError, match="no 64-bit"):
        fatbin.targets(damage + bytes(64))


def contents(module: bytes) -> dict[str, bytes]:
    """Of a wheel that is as it should be; the extension module apart."""
    metadata = f"Version: {LABELLED}\nRequires-Dist: numpy>=1.24\nRequires-Dist: tomli>=2.0; python_version < '3.11'\n"
    metadata += "Requires-Dist: libucx-cu13>=1.22; extra == 'cuda13'\n"
    licences = ["LICENSE", "NOTICE", *(f"third_party/{name}/LICENSE" for name in ("blake3", "dlpack", "ucx"))]
    return {
        "kvpool/__init__.py": b"",
        "kvpool/_core.so": module,
        f"{DIST_INFO}/METADATA": metadata.encode(),
        f"{DIST_INFO}/WHEEL": f"Root-Is-Purelib: false\nTag: {TAG}-{PLATFORM}\n".encode(),
        **{f"{DIST_INFO}/licenses/{name}": b"..." for name in licences},
    }


def problems(folder: Path, files: dict[str, bytes], name: str = f"kvpool-{LABELLED}-{TAG}-{PLATFORM}.whl") -> list[str]:
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for file, content in files.items():
            wheel.writestr(file, content)
    release = "13.0" if _core.build_info()["cuda_kernels"] else ""
    expected = Expected(LABELLED, frozenset({"kvpool/__init__.py"}), release, built_in=Path("/made/up/folder"))
    return wheel_check.problems_of(folder / name, expected)


def test_a_correct_wheel_passes(tmp_path):
    built = _core.build_info()["cuda_kernels"].split()
    # The module of the tests has kernels for one generation of GPUs: then that is the only thing wrong.
    wrong = [] if built in ([], wheel_check.TARGETS) else [f"has GPU code for: {' '.join(built)}"]
    assert problems(tmp_path, contents(Path(_core.__file__).read_bytes())) == wrong


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("kvpool/__init__.py", None, "kvpool/__init__.py is missing"),
        ("kvpool/stray.py", b"", "kvpool/stray.py does not belong into it"),
        ("kvpool.libs/libcudart.so.13", b"", "kvpool.libs/ lies beside the package"),
        ("kvpool/_core.so", None, "has 0 extension modules"),
        ("kvpool/_core.so", b"/made/up/folder", "tells that it was built in /made/up/folder"),
        (f"{DIST_INFO}/WHEEL", b"Root-Is-Purelib: false\nTag: py3-none-any\n", "says of itself that it is for"),
        (f"{DIST_INFO}/WHEEL", f"Tag: {TAG}-{PLATFORM}\n".encode(), "says Root-Is-Purelib: None"),
        (f"{DIST_INFO}/METADATA", b"Version: 0.0.9\n", "says that it is version 0.0.9"),
        (f"{DIST_INFO}/METADATA", b"Requires-Dist: nvidia-nccl-cu13\n", "requires ['nvidia-nccl-cu13']"),
        (f"{DIST_INFO}/licenses/NOTICE", None, "lacks the licence NOTICE"),
    ],
)
def test_a_wheel_with_something_wrong_is_found(tmp_path, file, content, problem):
    module = Path(_core.__file__).read_bytes()
    files = contents(module)
    if content is None:
        del files[file]
    else:
        files[file] = module + content if file.endswith("_core.so") else content
    assert any(problem in found for found in problems(tmp_path, files))


@pytest.mark.parametrize("platform", ["linux_x86_64", "any"])
def test_a_wheel_for_this_machine_alone_is_not_published(tmp_path, platform):
    name = f"kvpool-{LABELLED}-{TAG}-{platform}.whl"
    assert f"is named {name}" in problems(tmp_path, contents(Path(_core.__file__).read_bytes()), name)
