"""Read by the tests of continuous integration: the Makefile, and the scripts beside it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCTEST = """[doctest] run with "--help" for options
case fuzz: KVPOOL_SEED=7
===============================================================================
peer_metadata_test.cpp:3:
TEST CASE:  a case is read

peer_metadata_test.cpp:4: ERROR: CHECK( one == two ) is NOT correct!
case fuzz: KVPOOL_SEED=8
===============================================================================
peer_metadata_test.cpp:9:
TEST CASE:  a case that speaks

peer_metadata_test.cpp:10: MESSAGE: nothing to see
===============================================================================
[doctest] test cases: 3 | 2 passed | 1 failed | 0 skipped
[doctest] Status: FAILURE!
"""


def makefile(name: str) -> str:
    found = re.search(rf"^{name}\s*[:?]?=\s*(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found, name
    return found[1]


def recipe_of(target: str) -> str:
    """What `make` would do for a target with all prerequisites there."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found, target
    return found[1]


def script_of(name: str, folder: Path = ROOT / "cmake"):
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
