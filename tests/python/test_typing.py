"""What a type checker says of programs that use kvpool: wrong words, settings and media are found before they run."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import kvpool
from kvpool.config import FIELDS
from kvpool.types import SettingArguments

ROOT = Path(__file__).resolve().parents[2]

_BEGIN = """\
import kvpool

layout = kvpool.KVLayout(layers=2, kv_heads=2, head_dim=8)
pool = kvpool.Pool(layout, 4, 4)
addrs = pool.alloc(1)
"""

# A line that a checker must refuse, and the code of its error.
_WRONG = [
    ('pool.transfer("b", addrs, strategy="nonsense")', "call-overload"),
    ('pool.transfer("b", addrs, priority="urgent")', "call-overload"),
    ('pool.transfer("b", addrs, route="pigeon")', "call-overload"),
    ('pool.fetch("b", addrs, medium="HBM")', "arg-type"),
    ('kvpool.Pool(layout, 4, polcy="lru")', "call-arg"),
    ('kvpool.Pool(layout, 4, policy="mru")', "arg-type"),
    ('kvpool.Pool(layout, 4, routes=["pigeon"])', "list-item"),
    ('kvpool.Pool(layout, 4, copy_threads="2")', "arg-type"),
    ("pool.tensor(17)", "arg-type"),
    ("pool.tensor(kvpool.MIXED)", "arg-type"),
    ("pool.arena(0)", "arg-type"),
    ("pool.alloc(1, 17)", "arg-type"),
    ("pool.alloc(1.5)", "arg-type"),
    ("pool.evict(1, 9)", "arg-type"),
    ('kvpool.KVLayout(2, 2, 8, dims="nhd")', "arg-type"),
    ("pool.match([1, 2], into=kvpool.DISK)", "arg-type"),
    ('pool.match("text")', "arg-type"),
    ("pool.tensor().torch()", "attr-defined"),
]

_RIGHT = """\
pool.transfer("b", addrs, strategy="by_layer", priority="decode", route="shm", medium=kvpool.MIXED)
settings = {"policy": "lru"}
kvpool.Pool(layout, 4, policy="lru", routes=["shm", "sock"], lease_s=1, name=None)
pool.tensor(kvpool.DRAM)
pool.tensor(kvpool.decode_address(1 << 47).medium)
pool.alloc(1, kvpool.MIXED)
pool.alloc(1, 2)
pool.match([1, 2], into=kvpool.HBM).close()
for sent in (pool.transfer("b", addrs), pool.transfer("b", addrs, layerwise=False)):
    print(sent.wait().stats.bytes)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What mypy says, as (line, code); the program that it read is _BEGIN, _RIGHT and the wrong lines."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    folder = tmp_path_factory.mktemp("checked")
    program = folder / "program.py"
    program.write_text(_BEGIN + _RIGHT + "".join(f"{line}\n" for line, _ in _WRONG))
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(folder / "cache"), "program.py"],
        cwd=folder, env={"MYPYPATH": str(ROOT / "src"), "PATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 1, run.stdout + run.stderr
    return set(re.findall(r"^program\.py:(\d+): error: .*\[([\w-]+)\]$", run.stdout, re.MULTILINE))


@pytest.mark.parametrize(("line", "code"), _WRONG, ids=[line for line, _ in _WRONG])
def test_mypy_refuses(line, code, said):
    number = (_BEGIN + _RIGHT).count("\n") + 1 + [wrong for wrong, _ in _WRONG].index(line)
    assert (str(number), code) in said


def test_mypy_takes_what_is_right(said):
    last = (_BEGIN + _RIGHT).count("\n")
    assert [(line, code) for line, code in said if int(line) <= last] == []


def test_the_settings_that_checkers_know_are_those_that_there_are():
    known = get_type_hints(SettingArguments)
    assert list(known) == list(FIELDS)
    assert {name: known[name] for name in FIELDS if name != "routes"} == {
        name: FIELDS[name] | None for name in FIELDS if name != "routes"
    }


def test_the_hints_of_a_pool_can_be_read_at_run_time():
    hints = get_type_hints(kvpool.Pool.__init__)
    assert "SettingArguments" in str(hints["settings"])
