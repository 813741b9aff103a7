"""Figure 11 of the MemServe paper on a GPU: discrete against aggregated blocks, by NCCL and by UCX.

One prompt of 2,048 tokens of Llama-2-13B's shape goes from one process to another that shares the GPU: 128 blocks of 16
tokens. NCCL between two ranks of one GPU takes them for two hosts, and speaks over sockets: its figures are labelled
so, and say nothing of NVLink. UCX and kvpool's own route copy within the GPU by CUDA IPC.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import NamedTuple

from bench.context import Context
from bench.gpu.links import require_gpu
from bench.gpu.side import layout
from bench.remote import RemoteError
from bench.result import Report, Row
from bench.transfer.pair import Kind, Pair, Point, measure

TITLE = "MemServe Fig 11 on a GPU: discrete against aggregated blocks, Llama-2-13B, one prompt of 2,048 tokens"
PEERS: set[str] = set()
_LAYERS, _BLOCK_TOKENS = 40, 16
_TOKENS, _QUICK_TOKENS = 2048, 256
_ORDERS = ("discrete", "aggregated")


class _Way(NamedTuple):
    name: str
    route: str


_WAYS = (
    _Way("nccl over sockets, no NVLink figure", "nccl"),
    _Way("ucx", "ucx"),
    _Way("cuda_ipc", "cuda_ipc"),
)


def run(context: Context) -> Report:
    """Both layouts in turns, for each way that is there.

    Raises:
        Skipped: There is no GPU.
    """
    require_gpu()
    report = Report()
    tokens = context.pick(_QUICK_TOKENS, _TOKENS)
    count, size = tokens // _BLOCK_TOKENS, layout(_LAYERS, "aggregated").block_bytes
    for way in _WAYS:
        kinds = [
            Kind(
                order,
                ("transfer",),
                module="bench.gpu.side",
                options={"route": way.route, "layers": _LAYERS, "order": order},
            )
            for order in _ORDERS
        ]
        with report.guarded(way.name):
            notes: list[str] = []
            with ExitStack() as processes:
                noted = len(context.peers.notes)
                pairs = Pair.start(kinds, context.peers)
                for pair in pairs:
                    processes.callback(pair.close)
                point = measure(pairs, count, size, context.pick(3, 5), 0.0, notes)
            report.notes += [f"{way.name}: {note}" for note in notes]
            if len(point.facts) == len(_ORDERS):
                report.rows += _rows(way, point)
            elif not any(": Unsupported: " in note for note in notes):  # this machine does not have it
                raise RemoteError("; ".join(notes + context.peers.notes[noted:]) or "it was not measured")
    report.series = {"tokens": tokens, "blocks": count, "block_bytes": size}
    report.notes.append(
        f"{count} scattered blocks of {size / (1 << 20):.1f} MiB to named destinations, both processes on the first "
        "GPU. NCCL between two ranks of one GPU (each with a different NCCL_HOSTID) runs over sockets: its figures "
        "say nothing of NVLink."
    )
    return report


def _rows(way: _Way, point: Point) -> list[Row]:
    discrete, aggregated = (point.timings[order, "transfer"] for order in _ORDERS)
    calls = {order: point.facts[order]["calls"] for order in _ORDERS}
    ratio = discrete.sample.median_us / aggregated.sample.median_us
    return [
        Row(
            what=f"{way.name}: aggregated",
            value=aggregated.sample.median_us / 1000,
            unit="ms",
            p99=aggregated.sample.p99_us / 1000,
            peers={"discrete": discrete.sample.median_us / 1000},
            details={"calls": calls, "sample": asdict(aggregated.sample), "rounds_us": aggregated.rounds_us},
        ),
        Row(f"{way.name}: discrete / aggregated, time", ratio, "x", better="higher", details=calls),
    ]
