"""Where kvpool finds UCX in a bench, unless it is set: among the peers."""

from __future__ import annotations

import os
from pathlib import Path

from bench.peers.find import Peers

TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
CMA = {"UCX_TLS": "cma,tcp", "UCX_NET_DEVICES": "lo"}
POSIX = {"UCX_TLS": "posix,tcp", "UCX_NET_DEVICES": "lo"}


def ucx_environment(peers: Peers) -> dict[str, str]:
    program = peers.program("UCX")
    if program is None or os.environ.get("KVPOOL_UCX"):
        return {}
    environment = Path(program.python).parent.parent
    found = sorted(environment.glob("lib/python*/site-packages/libucx/lib/libucp.so.0"))
    return {"KVPOOL_UCX": str(found[0])} if found else {}
