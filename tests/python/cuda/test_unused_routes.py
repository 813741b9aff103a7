"""A pool on a GPU without UCX and NCCL says so once, and what to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTES = """
import logging
notes = []
class Notes(logging.Handler):
    def emit(self, record):
        if hasattr(record, "installed"):
            notes.append(record)
logging.getLogger("kvpool.peers").addHandler(Notes())
logging.getLogger("kvpool.peers").setLevel(logging.INFO)
"""


def test_a_pool_on_a_gpu_says_once_which_routes_are_missing_and_what_to_install(on_fake):
    on_fake(f"""
{NOTES}
import importlib.util
importlib.util.find_spec = lambda name: None  # neither wheel is there
with small_pool(device="cuda:1") as here, small_pool(device="cuda:0", name="there") as there:
    where = there.peers.listen(address_of("x"))
    assert [(note.route, note.device, note.installed) for note in notes] == [
        ("ucx", "cuda:0", False), ("nccl", "cuda:0", False)]
    for note, extra in zip(notes, ("kvpool[cuda1", "kvpool[nccl1")):
        assert note.levelno == logging.INFO
        assert extra in note.getMessage() and "routes" in note.getMessage(), note.getMessage()
    here.peers.connect(where)
    assert [note.device for note in notes[2:]] == ["cuda:1"] * 2
    there.peers.listen(address_of("y"))
    here.peers.connect(where)
    assert len(notes) == 4
""")


def test_an_installed_library_is_not_to_be_installed_and_a_named_route_is_not_missed(on_fake):
    on_fake(f"""
{NOTES}
with small_pool(device="cuda:0", nccl="/somewhere/libnccl.so.2") as pool:
    pool.peers.listen(address_of("x"))
nccl = notes[-1]
assert (nccl.route, nccl.installed) == ("nccl", True)
assert "install" not in nccl.getMessage() and "routes" in nccl.getMessage()
""")


def test_a_pool_without_a_gpu_misses_none(on_fake):
    on_fake(f"""
{NOTES}
with small_pool() as pool:
    pool.peers.listen(address_of("x"))
assert notes == []
""")


@pytest.mark.parametrize("named", ["file", "folder"])
def test_info_says_which_nccl_there_is(fake_nccl, tmp_path, named):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnccl.so.2").symlink_to(fake_nccl)
    where = tmp_path / "lib" / "libnccl.so.2" if named == "file" else tmp_path
    facts = _info(str(where))
    assert facts["nccl"]["version"] == "2.28.9"
    assert Path(facts["nccl"]["library"]) == tmp_path / "lib" / "libnccl.so.2"
    assert facts["nccl"]["error"] is None


def test_info_says_what_to_install_where_there_is_no_nccl(tmp_path):
    other = tmp_path / "libnccl.so.2"
    other.write_bytes(b"")
    for where in ("/nowhere/libnccl.so.2", str(other)):
        nccl = _info(where)["nccl"]
        assert nccl["library"] is None
        assert "kvpool[nccl1" in nccl["error"]


def _info(nccl: str) -> dict[str, dict[str, str | None]]:
    environment = os.environ | {"KVPOOL_NCCL": nccl, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(
        [sys.executable, "-m", "kvpool", "info", "--json"], capture_output=True, text=True, check=True, env=environment
    )
    found: dict[str, dict[str, str | None]] = json.loads(ran.stdout)
    return found
