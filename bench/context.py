"""The context that every bench gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peers.find import Peers
from bench.remote import Remote, RemoteError


@dataclass(frozen=True)
class Context:
    """The context that every bench gets.

    Attributes:
        quick: A minute for all benches, not ten: smaller trees, fewer repetitions.
        out: Folder for plots.
        peers: Those that are installed.
    """

    quick: bool
    out: Path
    peers: Peers

    def pick(self, quick: int, full: int) -> int:
        return quick if self.quick else full

    @contextmanager
    def subjects(self, module: str, *peers: str) -> Iterator[dict[str, Remote]]:
        """A fresh process of kvpool, called "kvpool", and the named peers that are there."""
        with Remote(module) as own:
            yield {"kvpool": own, **self.peers.get(*peers)}

    def ask_peers(self, subjects: dict[str, Remote], operation: str, /, **arguments: object) -> None:
        """Asks the peers among the subjects; one that fails is left out from here on, and the run says so."""
        for name, remote in list(subjects.items()):
            if name == "kvpool":
                continue
            try:
                remote.ask(operation, **arguments)
            except RemoteError as error:
                del subjects[name]
                self.peers.drop(name, str(error))
