"""How long a fetch of a peer on the host takes into an engine's own memory, which peers cannot map."""

from __future__ import annotations

from bench.context import Context
from bench.measure import interleave
from bench.remote import Remote
from bench.result import Report, Row, timed_row
from bench.transfer.into_side import LAYOUT

TITLE = "Fetches into an engine's own blocks, from DRAM of a process on the same host"
PEERS: tuple[str, ...] = ()
_SIDE = "bench.transfer.into_side"
_BLOCKS = (2, 32, 256)
_TARGET = 1.2  # of a fetch into memory that the owner writes by itself


def run(context: Context) -> Report:
    report = Report()
    rounds, repeats = (5, 20) if context.quick else (10, 60)
    with Remote(_SIDE) as owner, Remote(_SIDE) as engine:
        told = owner.ask("own", blocks=max(_BLOCKS))
        routes = engine.ask("meet", where=told["where"], blocks=max(_BLOCKS))
        for blocks in _BLOCKS:
            samples = interleave(
                {
                    name: lambda into=into, blocks=blocks: engine.ask(  # type: ignore[misc]
                        "fetches", addrs=told["addrs"][:blocks], into=into, repeats=repeats
                    )
                    for name, into in (("kvpool", "engine"), ("into DRAM", "own"), ("by way of DRAM", "both"))
                },
                rounds,
            )
            what = f"{blocks * LAYOUT.block_bytes / 2**20:g} MiB"
            report.rows.append(timed_row(f"fetch into an engine's blocks, {what}", samples, routes=routes))
            ratio = samples["kvpool"].median_us / samples["into DRAM"].median_us
            report.rows.append(Row(f"the same / into the pool's own DRAM, {what}", ratio, "x", target=_TARGET))
    report.notes.append("by way of DRAM: fetched into the pool's DRAM, and copied into the engine's blocks.")
    return report
