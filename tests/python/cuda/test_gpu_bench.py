"""The benches for a GPU, in a small form over a library that stands in for the CUDA driver.

So that they run at once where there is a GPU. Their figures mean nothing here, and are not looked at.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

# One layer, four blocks: 2.5 MiB of HBM in each process.
SMALL = """
import json, sys
from pathlib import Path
from bench.context import Context
from bench.gpu import fig11, links
from bench.peers.find import Peers
from bench.result import Skipped

for module in (links, fig11):
    module._LAYERS = 1
links._QUICK_BLOCKS, links._QUICK_CALLS, links._QUICK_CEILING_BYTES = 4, 5, 1 << 20
fig11._QUICK_TOKENS = 64
fig11._WAYS = [way for way in fig11._WAYS if way.route != "nccl"]  # there is no stand-in for it here
names = sys.argv[1:]
with Peers({"NIXL on a GPU"}, wanted="NIXL" in names, quick=True) as peers:
    context = Context(True, Path("."), peers)
    for module in [module for module in (links, fig11) if module.__name__.rpartition(".")[2] in names]:
        try:
            report = module.run(context)
        except Skipped as reason:
            print(json.dumps({"skipped": str(reason)}))
        else:
            print(json.dumps({"rows": [row.as_json() for row in report.rows], "notes": report.notes + peers.notes}))
"""


# As much of NIXL as the bench calls, over IPC handles of the driver; with a fault where FAKE_NIXL names one.
NIXL = """
import ctypes, os, pickle
from bench.gpu.device import Device

FAULT = os.environ["FAKE_NIXL"]

class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]

class Held:
    def __init__(self, what):
        self.what = what
    def release(self):
        self.what = None

def nixl_agent_config(thread, backends):
    assert not thread and backends == ["UCX"]

class nixl_agent:
    def __init__(self, name, config):
        self.name, self.device, self.shift = name, Device(), 0
    def register_memory(self, whole, medium):
        assert medium == "VRAM"
        if FAULT == "register":
            raise RuntimeError("no CUDA in this UCX")
        [(self.base, self.length, device, _)] = whole
        assert device == 0
        return whole
    def deregister_memory(self, whole):
        assert whole[0][0] == self.base
    def get_agent_metadata(self):
        handle = Handle()
        self.device._must("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.base))
        return pickle.dumps((self.name, self.base, bytes(handle)))
    def add_remote_agent(self, metadata):
        name, base, handle = pickle.loads(metadata)
        mapped = ctypes.c_uint64()
        self.device._must("cuIpcOpenMemHandle_v2", ctypes.byref(mapped), Handle.from_buffer_copy(handle), 1)
        self.shift = mapped.value - base
        return name.encode()
    def remove_remote_agent(self, name):
        assert isinstance(name, str)
    def prep_xfer_dlist(self, name, rows, medium):
        assert medium == "VRAM" and rows.shape[1] == 3 and not rows[:, 2].any()
        return Held(rows)
    def make_prepped_xfer(self, operation, here, own, there, others):
        assert operation == "WRITE"
        return Held((here.what[own], there.what[others]))
    def transfer(self, request):
        if FAULT == "exit":
            os._exit(3)
        if FAULT != "nothing sent":
            for (source, length, _), (to, _, _) in zip(*request.what):
                self.device._copy(int(to) + self.shift, int(source), int(length))
        return "PROC"
    def check_xfer_state(self, request):
        return "DONE"
    def get_new_notifs(self):
        return {}
"""


def run_small(library: str, *names: str, before: Path | None = None, **variables: str) -> list[dict[str, Any]]:
    """What the named benches answer; "NIXL" among the names: with it, where it is found."""
    environment = os.environ | {
        "KVPOOL_CUDA_LIBRARY": library, "UCX_LOG_LEVEL": "fatal",
        "PYTHONPATH": os.pathsep.join([str(before or ROOT), str(ROOT), *filter(None, sys.path)]),
    } | variables  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", SMALL, *names],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_without_a_gpu_benches_say_so_and_measure_nothing():
    for found in run_small("/nowhere/libcuda.so", "links", "fig11", "NIXL"):
        assert list(found) == ["skipped"]
        assert str(found["skipped"]).startswith("no CUDA GPU: ")


def test_benches_run_to_their_end_and_what_they_send_arrives(fake_cuda):
    links, fig11 = run_small(str(fake_cuda), "links", "fig11")
    rows = [row["what"] for row in links["rows"]]
    assert [what for what in rows if what.startswith("cuda_ipc, 4 scattered")] == rows[:2], links
    assert rows[2:] == ["transfer() of 1 blocks, until it returns", "transfer() of 16 blocks, until it returns"], links
    assert "cuda_ipc: aggregated" in [row["what"] for row in fig11["rows"]], fig11
    # Measurements that cannot run here are left out, with a note.
    assert any(note.startswith("ucx: ") or "left out" in note for note in fig11["notes"]), fig11


def run_with_nixl(fake_cuda: Path, folder: Path, fault: str) -> dict[str, Any]:
    (folder / "nixl").mkdir()
    (folder / "nixl" / "__init__.py").write_text(NIXL)
    (folder / "nixl-1.5.1.dist-info").mkdir()
    (folder / "nixl-1.5.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: nixl\nVersion: 1.5.1\n")
    # A folder of peers without NIXL: it is taken from where kvpool is.
    [links] = run_small(
        str(fake_cuda), "links", "NIXL", before=folder, KVPOOL_PEERS=str(folder / "peers"), FAKE_NIXL=fault
    )
    assert all(not row["error"] and row["value"] > 0 for row in links["rows"]), links
    return links


def test_nixl_sends_the_same_blocks_in_the_same_run(fake_cuda, tmp_path):
    links = run_with_nixl(fake_cuda, tmp_path, "")
    for row, descriptors in zip(links["rows"][:2], (4, 8), strict=True):  # one layer: K and V of a discrete block
        assert list(row["peers"]) == ["cuMemcpyAsync", "NIXL"], links
        assert row["details"]["of_nixl"] == pytest.approx(row["value"] / row["peers"]["NIXL"])
        assert row["details"]["nixl"]["descriptors"] == descriptors
    assert any("nixl 1.5.1" in note for note in links["notes"])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("register", "no CUDA in this UCX"),
        ("nothing sent", "did not arrive"),
        ("exit", "died"),
    ],
)
def test_a_nixl_that_fails_costs_no_figure_of_kvpool(fault, said, fake_cuda, tmp_path):
    links = run_with_nixl(fake_cuda, tmp_path, fault)
    assert len(links["rows"]) == 4
    assert [list(row["peers"]) for row in links["rows"][:2]] == [["cuMemcpyAsync"]] * 2
    left_out = [note for note in links["notes"] if note.startswith("NIXL at 4 x ")]
    assert len(left_out) == 2, links
    assert all(said in note for note in left_out), links


def test_a_run_without_nixl_says_so(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    find = importlib.import_module("bench.peers.find")
    monkeypatch.setattr(find, "find_spec", lambda package: None)
    for folder, why in ((None, "KVPOOL_PEERS is not set"), (str(tmp_path), "there is no venv-nixl in KVPOOL_PEERS")):
        monkeypatch.delenv(find.VARIABLE, raising=False)
        if folder:
            monkeypatch.setenv(find.VARIABLE, folder)
        with find.Peers({"NIXL on a GPU"}, wanted=True, quick=True) as peers:
            assert peers.program("NIXL on a GPU") is None
            assert peers.notes == [f"NIXL on a GPU: skipped, {why}"]
