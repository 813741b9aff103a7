"""Who the peers are, and where UCX is."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PeerInfo", "ucx_library"]


@dataclass(frozen=True)
class PeerInfo:
    """A peer of a pool, at one moment.

    Attributes:
        name: What it calls itself.
        instance: The number in the addresses of its blocks.
        epoch: Of this incarnation: a peer that was restarted has another one.
        link: How it is connected: "unix", "tcp 10.0.0.2:4000".
        routes: By which blocks can travel to it, the cheapest first.
        pid: Of its process, as it sees itself.
        lent_blocks: Of ours, that it has borrowed.
        borrowed_blocks: Of its, that we have.
        reserved_blocks: Of ours, for its transfers that are under way.
    """

    name: str
    instance: int
    epoch: int
    link: str
    routes: tuple[str, ...]
    pid: int
    lent_blocks: int
    borrowed_blocks: int
    reserved_blocks: int


def ucx_library(setting: str) -> str:
    """What the core is told for the setting `ucx`: "wheel" becomes the path of the wheel's library, if it is installed.

    Nothing is imported: the wheel's own module would load the library before anybody knows whether it is wanted.
    """
    if setting != "wheel":
        return setting
    found = importlib.util.find_spec("libucx")
    for folder in (found.submodule_search_locations or ()) if found else ():
        library = Path(folder, "lib", "libucp.so.0")
        if library.is_file():
            return str(library)
    return setting
