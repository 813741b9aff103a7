"""The cost of finding the pieces of addresses, without copying: descriptors.cpp, linked with the core."""

from __future__ import annotations

import os
import re
from pathlib import Path
from statistics import median

from bench.context import Context
from bench.peers.find import Peers
from bench.remote import Remote, RemoteError
from bench.result import Report, Row
from bench.transfer.build import build_program

_ROOT = Path(__file__).resolve().parents[2]
_CORE = _ROOT / os.environ.get("KVPOOL_BUILD_DIR", "build/release") / "libkvpool_core.a"
_BLOCKS = 112_000
_NIXL_BLOCK_BYTES = 64  # nothing is copied; small, so that they fit
_BLOCK_NS = 20.0  # what the issue asks for
_LINE = re.compile(r"descriptors\s+(?P<what>.+?)\s+(?P<blocks>\d+) blocks, (?P<pieces>\d+) pieces: (?P<ns>[\d.]+) ns")


def run(context: Context, report: Report) -> None:
    if not _CORE.is_file():
        report.notes.append(f"Descriptor work: left out, {_CORE.name} is not built (make build).")
        return
    try:
        output = build_program(
            Path(__file__).with_name("descriptors.cpp"),
            ["descriptors"],
            f"-I{_ROOT / 'cpp'}",
            str(_CORE),
            "-O3",
            "-pthread",
            "-ldl",
        )
    except RuntimeError as error:
        report.notes.append(f"Descriptor work: left out: {error}")
        return
    nixl = _nixl_ns(context.peers)
    for line in output.splitlines():
        found = _LINE.match(line)
        if found is None or int(found["blocks"]) < 2:
            continue
        what = f"descriptors, {int(found['blocks']):,} blocks, a block: {found['what']}"
        # The target is for a block that is one piece; a block of 80 pieces is 80 times the work.
        target = _BLOCK_NS if found["blocks"] == found["pieces"] else None
        report.rows.append(
            Row(
                what,
                float(found["ns"]),
                "ns",
                target,
                peers=nixl if target is not None else {},
                details={"pieces": int(found["pieces"])},
            )
        )


def _nixl_ns(peers: Peers) -> dict[str, float]:
    """What NIXL takes to make a request for as many blocks, from lists that are prepared; a block."""
    program = peers.program("NIXL")
    if program is None:
        return {}
    try:
        with Remote(program.module, program.python, program.environment) as remote:
            times = remote.ask("describe", count=_BLOCKS, size=_NIXL_BLOCK_BYTES, n=11)
    except RemoteError as error:
        peers.notes.append(f"NIXL: descriptors left out: {str(error)[:240]}")
        return {}
    return {"NIXL": median(times) * 1000 / _BLOCKS}
