"""Transfer between two processes: the grid of block counts and sizes, latency, idleness, descriptors."""

from __future__ import annotations

from bench.context import Context
from bench.remote import RemoteError
from bench.result import Report
from bench.transfer import descriptors, grid, latency

TITLE = "Transfer between two processes, beside NIXL, UCX, Mooncake and memcpy"
PEERS = ("NIXL", "UCX", "Mooncake")


def run(context: Context) -> Report:
    report = Report()
    for part in (grid.same_host, grid.tcp, latency.run, descriptors.run):
        try:
            part(context, report)
        except RemoteError as error:
            # The other parts are worth having all the same.
            report.notes.append(f"FAILED: {part.__module__}.{part.__name__}: {error}")
    versions = [context.peers.versions[name] for name in PEERS if name in context.peers.versions]
    report.notes += [
        f"Beside {', '.join(versions) or 'no peer'}.",
        "From the call in Python to the return of wait(), with destinations lent before; scattered blocks; every byte "
        "checked at the receiver before and after. In turns, medians of the medians of the rounds.",
        "NIXL: the better of one prepared request posted again and again, and one made each time; no progress thread. "
        "UCX: puts and a flush, one call. memcpy: into shared memory, the best of one and two threads.",
        "plain TCP: the better of gathered and piece by piece, in C++ without protocol, checks or Python.",
        "Application told: until received() returns there, one way, by the clock that both processes share.",
    ]
    return report
