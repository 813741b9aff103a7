"""The floors of the house: what each folder may import or include. docs/architecture.md draws the same."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Each C++ folder, and the folders that it may include. A new folder is added here first.
CPP_FLOORS: dict[str, set[str]] = {
    "base": set(),
    "index": {"base"},
    "cuda": {"base"},
    "arena": {"base", "cuda"},
    "attention": {"base"},
    "attend_gpu": {"base", "cuda", "attention"},
    "net": {"base"},
    "exec": {"base"},
    "disk": {"base", "exec"},
    "blocks": {"base", "cuda", "arena"},
    "routes": {"base", "cuda", "arena", "net", "blocks"},
    "transfer": {"base", "cuda", "blocks", "exec", "net", "routes"},
    "pool": {"base", "cuda", "index", "arena", "blocks", "exec", "disk"},
    "sequences": {"base", "cuda", "arena", "attention", "attend_gpu", "blocks", "exec", "pool"},
    "views": {"base", "cuda", "attention", "blocks", "exec", "net", "transfer", "pool", "sequences"},
    "peers": {"base", "cuda", "index", "arena", "blocks", "exec", "net", "routes", "transfer", "pool"}
    | {"attend_gpu", "sequences", "views"},
    "distributed": {"base", "cuda", "attention", "blocks", "exec", "transfer", "pool", "sequences", "views", "peers"},
    "ranks": {"base", "cuda", "index", "arena", "blocks", "exec", "net", "routes", "transfer", "pool", "peers"},
}
CPP_FOREIGN = re.compile(r"^(pybind11|torch|ATen|c10|cuda|nccl|ucp|ucs|uct|dlpack|doctest|boost|absl)\b|^Python\.h")

# Headers whose library is opened at run time, and the one file that may include them (third_party/README.md).
CPP_FOREIGN_ALLOWED = {"ucp/api/ucp.h": "routes/ucx/ucx_library.h"}

# Each module or folder of src/kvpool, and those that it may import.
LOWEST = {"errors", "arguments"}
PYTHON_FLOORS: dict[str, set[str]] = {
    "errors": set(),
    "arguments": {"errors"},
    "types": LOWEST,
    "config": LOWEST | {"types"},
    "_core": {"errors", "types"},
    "waiting": {"_core"},
    "alloc": {"errors", "types", "config", "waiting", "_core"},
    "index": {"errors", "types", "config", "_core"},
    "transfer": {"errors", "arguments", "types", "config", "waiting", "_core"},
    "attention": {"errors", "types", "waiting", "_core"},
    "cluster": {"errors", "types", "config", "waiting", "_core"},
    "peers": {"errors", "arguments", "types", "config", "waiting", "_core", "cluster", "transfer"},
    "pool": {"errors", "arguments", "types", "config", "_core", "alloc", "index", "transfer", "cluster", "peers"},
    "policy": {"errors", "types", "index"},  # pure: data in, plans out
    "space": {"errors", "arguments", "types", "config", "_core", "alloc", "pool", "policy"},
    "storage": {"arguments", "errors", "types", "index", "attention", "pool"},
    "ranks": {"arguments", "errors", "types", "_core", "transfer", "pool"},
    "observe": {"errors", "types", "_core", "index", "transfer", "peers", "pool"},
    "control": {"errors", "types", "config", "waiting", "_core", "alloc", "index", "transfer", "cluster", "pool"}
    | {"policy", "observe"},
    # A folder an engine, which alone knows it.
    "engines": {"errors", "types", "config", "_core", "alloc", "index", "transfer", "cluster", "peers", "pool", "ranks"}
    | {"control", "observe"},
    "sim": {"errors", "types", "index", "policy"},
    "cli": {"_core", "alloc", "cluster", "config", "control", "errors", "index", "policy", "pool", "sim", "transfer"}
    | {"types"},
    "__main__": {"cli"},
}
# The package's __init__ imports every package but those that users import by name; nothing imports __init__.
PYTHON_FLOORS["__init__"] = set(PYTHON_FLOORS) - {"observe", "storage", "engines", "cli", "__main__"}
# tomllib: in the standard library since 3.11. typing_extensions: type checkers alone read it, and bring its types.
PYTHON_FOREIGN_ALLOWED = {"numpy", "tomli", "tomllib", "typing_extensions"}

# What only an extra brings, and the one module or folder that may import it. `import kvpool` imports none of these.
PYTHON_EXTRAS = {
    "observe/metrics.py": {"prometheus_client"},
    "observe/migration_metrics.py": {"prometheus_client"},
    "observe/rebalancing_metrics.py": {"prometheus_client"},
    "observe/storage_metrics.py": {"prometheus_client"},
    "observe/events": {"msgpack", "zmq"},
    "engines/vllm": {"prometheus_client", "torch", "vllm"},
    "engines/sglang": {"sglang", "torch"},
    "engines/transformers": {"torch", "transformers"},
    "cli/sim_show.py": {"matplotlib", "rich"},
    "cli/top.py": {"rich"},
    "storage/object_store.py": {"obstore"},
    "control/reading": {"msgspec", "tokenizers"},
    "control/router": {"anyio", "h11", "httpx", "httpx2", "prometheus_client", "starlette", "uvicorn"},
}


def cpp_violations(root: Path) -> Iterator[str]:
    """Each #include under `root` (the folder cpp/kvpool) that the floors forbid."""
    for path in sorted(root.rglob("*")):
        if path.suffix not in (".h", ".cpp"):
            continue
        floor = path.relative_to(root).parts[0]
        if floor not in CPP_FLOORS:
            yield f"{path}: {floor} is no floor of CPP_FLOORS"
            continue
        for kind, name in re.findall(r'^\s*#\s*include\s*([<"])([^">]+)', path.read_text(), re.MULTILINE):
            parts = name.split("/")
            if kind == "<":
                allowed = CPP_FOREIGN_ALLOWED.get(name) == str(path.relative_to(root))
                if CPP_FOREIGN.match(name) and not allowed:
                    yield f"{path} includes <{name}>: nothing foreign in the core"
            elif parts[0] != "kvpool" or not (root.parent / name).is_file():
                yield f'{path} includes "{name}", which is no file of cpp/'
            elif parts[1] != floor and parts[1] not in CPP_FLOORS[floor]:
                yield f'{path} includes "{name}": {floor} stands beside or below {parts[1]}'


def imports_of(path: Path, package: str) -> Iterator[str]:
    """The dotted names that a Python file imports, relative ones made absolute."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            # `from kvpool import config` imports a module, not a name of the package.
            if base == "kvpool":
                yield from (f"kvpool.{alias.name}" for alias in node.names)
            else:
                yield base


def python_violations(root: Path) -> Iterator[str]:
    """Each import under `root` (the folder src/kvpool) that the floors forbid."""
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.pyi")]):
        relative = path.relative_to(root)
        floor = relative.parts[0].split(".")[0]
        if floor not in PYTHON_FLOORS:
            yield f"{path}: {floor} is no floor of PYTHON_FLOORS"
            continue
        package = ".".join(["kvpool", *relative.parent.parts])
        extras = [PYTHON_EXTRAS.get(place.as_posix(), set()) for place in (relative, relative.parent)]
        foreign = PYTHON_FOREIGN_ALLOWED.union(*extras)
        for name in imports_of(path, package):
            parts = name.split(".")
            if parts[0] == "kvpool":
                target = parts[1] if len(parts) > 1 else "__init__"
                if target not in PYTHON_FLOORS:
                    yield f"{path} imports {name}, which is no floor of PYTHON_FLOORS"
                elif target != floor and target not in PYTHON_FLOORS[floor]:
                    yield f"{path} imports {name}: {floor} stands beside or below {target}"
            elif parts[0] not in sys.stdlib_module_names and parts[0] not in foreign:
                yield f"{path} imports {name}: nothing foreign but {', '.join(sorted(PYTHON_FOREIGN_ALLOWED))}"


# The folders of single transports, and the files that may know them: the list of all, and what lies in such a folder.
CPP_TRANSPORTS = {"host", "cuda_ipc", "sock", "ucx", "nccl"}
CPP_TRANSPORTS_KNOWN = {"routes/transports.cpp", "routes/transport_settings.h"}


def transport_violations(root: Path) -> Iterator[str]:
    """Each file under `root` (the folder cpp/kvpool) that knows a transport, or asks an object for its class."""
    for path in sorted(root.rglob("*")):
        if path.suffix not in (".h", ".cpp"):
            continue
        relative = path.relative_to(root)
        text = path.read_text()
        if re.search(r"dynamic_(pointer_)?cast<[^>]*(Arena|Route|Transport|Link)\b", text):
            yield f"{relative} asks an object for its class: give the interface the question"
        if relative.parts[0] == "routes" and relative.parts[1] in CPP_TRANSPORTS:
            continue
        for name in re.findall(r'#\s*include\s*"kvpool/routes/(\w+)/', text):
            if name in CPP_TRANSPORTS and relative.as_posix() not in CPP_TRANSPORTS_KNOWN:
                yield f"{relative} knows the transport {name}: go by routes/transport.h"


@pytest.mark.parametrize("floors", [CPP_FLOORS, PYTHON_FLOORS], ids=["C++", "Python"])
def test_the_floors_have_an_order(floors):
    """No cycle: floors can be taken away one by one, each standing on none that is left."""
    left = dict(floors)
    while left:
        tops = [name for name in left if not any(name in below for below in left.values())]
        assert tops, f"a cycle among {sorted(left)}"
        for name in tops:
            del left[name]


def test_cpp_files_include_lower_floors_only():
    root = ROOT / "cpp" / "kvpool"
    assert list(root.rglob("*.h"))
    assert list(cpp_violations(root)) == []


def test_only_the_list_of_transports_knows_them():
    root = ROOT / "cpp" / "kvpool"
    folders = {path.name for path in (root / "routes").iterdir() if path.is_dir()}
    assert folders == CPP_TRANSPORTS
    assert list(transport_violations(root)) == []


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("peers/a.cpp", '#include "kvpool/routes/ucx/ucx.h"', "knows the transport ucx"),
        ("routes/route.h", '#include "kvpool/routes/host/cma_route.h"', "knows the transport host"),
        ("peers/a.cpp", "dynamic_cast<const DeviceArena*>(&arena)", "asks an object for its class"),
        ("pool/a.cpp", "std::dynamic_pointer_cast<UcxRoute>(route)", "asks an object for its class"),
    ],
)
def test_code_that_knows_a_transport_is_found(tmp_path, file, line, message):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    (found,) = transport_violations(tmp_path)
    assert message in found


def test_python_files_import_lower_floors_only():
    assert list(python_violations(ROOT / "src" / "kvpool")) == []


def test_bindings_import_only_the_errors_and_numpy():
    for path in sorted((ROOT / "bindings").glob("*")):
        imported = set(re.findall(r'(?:import|import_module|PyImport_ImportModule)\(\s*"([^"]+)"', path.read_text()))
        assert imported <= {"kvpool.errors", "numpy"}, path


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("base/a.h", '#include "kvpool/arena/x.h"', "base stands beside or below arena"),
        ("index/a.h", '#include "kvpool/arena/x.h"', "index stands beside or below arena"),
        ("pool/a.cpp", '#  include  "kvpool/base/gone.h"', "no file of cpp/"),
        ("pool/a.cpp", '#include "x.h"', "no file of cpp/"),
        ("pool/a.cpp", "#include <pybind11/pybind11.h>", "nothing foreign"),
        ("routes/ucx/ucx_worker.cpp", "#include <ucp/api/ucp.h>", "nothing foreign"),
        ("service/a.cpp", "", "no floor"),
    ],
)
def test_a_wrong_include_is_found(tmp_path, file, line, message):
    root = tmp_path / "kvpool"
    for name in ("arena/x.h", file):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    (root / file).write_text(f"#pragma once\n{line}\n")
    found = list(cpp_violations(root))
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("alloc/a.py", "from kvpool.index import Match", "alloc stands beside or below index"),
        ("alloc/a.py", "from ..index import Match", "alloc stands beside or below index"),
        ("alloc/a.py", "from kvpool import index", "alloc stands beside or below index"),
        ("types.py", "from . import config", "types stands beside or below config"),
        ("pool.py", "import kvpool", "pool stands beside or below __init__"),
        ("pool.py", "def f():\n    import torch", "nothing foreign"),
        ("observe/other.py", "import prometheus_client", "nothing foreign"),
        ("pool.py", "from kvpool.observe import metrics", "pool stands beside or below observe"),
        ("__init__.py", "from kvpool.observe import metrics", "__init__ stands beside or below observe"),
        ("control/a.py", "import httpx", "nothing foreign"),
        ("extra.py", "", "no floor"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, file, line, message):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(line)
    found = list(python_violations(tmp_path))
    assert len(found) == 1
    assert message in found[0]


def test_right_imports_are_left_alone(tmp_path):
    (tmp_path / "alloc").mkdir()
    (tmp_path / "alloc" / "__init__.py").write_text(
        "from kvpool.alloc.a import x\nfrom .a import y\nimport numpy.typing"
    )
    (tmp_path / "alloc" / "a.py").write_text("from kvpool import _core\nfrom ..errors import Error\nimport os.path")
    assert list(python_violations(tmp_path)) == []
