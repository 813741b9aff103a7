"""Two processes on one GPU: blocks by CUDA IPC against what the device copies, and what a transfer costs its caller.

The ceiling is one cuMemcpyAsync within the device, of the same run, in the sender: a transfer within one GPU reads and
writes each byte as well. Beside it NIXL, where it is installed, with the same blocks in memory of the same GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any

from bench.context import Context
from bench.gpu.device import Device, NoDevice
from bench.gpu.side import layout
from bench.remote import RemoteError
from bench.result import Report, Row, Skipped
from bench.transfer.pair import Kind, Pair, Timing, measure

TITLE = "GPU: two processes on one GPU, by CUDA IPC, against the device's copy; what a call of transfer() costs"
_NIXL = "NIXL on a GPU"
PEERS = {_NIXL}
_NIXL_ANSWER_S_MAX = 60.0  # one that hangs must not cost the time of all that is still to be measured
_LAYERS = 40
_BLOCKS, _QUICK_BLOCKS = 128, 32  # 12.5 MiB each
_SHARE = 0.85
_LAUNCH_US = 15.0
_CALLS, _QUICK_CALLS = 2000, 200
_CEILING_BYTES, _QUICK_CEILING_BYTES = 1 << 30, 256 << 20


def run(context: Context) -> Report:
    """Measures both.

    Raises:
        Skipped: There is no GPU.
    """
    require_gpu()
    report = Report()
    options: dict[str, Any] = {"route": "cuda_ipc", "layers": _LAYERS}
    kinds = {
        order: Kind(order, ("transfer",), module="bench.gpu.side", options={**options, "order": order})
        for order in ("aggregated", "discrete")
    }
    count = context.pick(_QUICK_BLOCKS, _BLOCKS)
    size = layout(_LAYERS, "aggregated").block_bytes
    for order, kind in kinds.items():
        with report.guarded(_what(count, order, size)):
            report.rows.append(_rate_row(context, report, kind, count, size, order))
    _launches(context, report, kinds["aggregated"])
    report.notes += [
        "Both processes use the first GPU. Rates count bytes read and bytes written.",
        f"NIXL: {context.peers.versions.get(_NIXL) or 'not measured'}; the same blocks in turns with kvpool's, one "
        "prepared request posted again and again, a descriptor a block (discrete: one for each layer's K or V).",
    ]
    return report


def _what(count: int, order: str, size: int) -> str:
    return f"cuda_ipc, {count} scattered {order} blocks of {size / (1 << 20):.1f} MiB"


def _rate_row(context: Context, report: Report, kind: Kind, count: int, size: int, order: str) -> Row:
    """Raises RemoteError where a side fails."""
    with ExitStack() as processes:
        pair = processes.enter_context(_one_pair(kind, context))
        ceiling = pair.sender.ask("copy_rate", nbytes=context.pick(_QUICK_CEILING_BYTES, _CEILING_BYTES), rounds=15)
        peers = [processes.enter_context(peer) for peer in Pair.start([_nixl(order)], context.peers)]
        notes: list[str] = []
        point = measure([pair, *peers], count, size, context.pick(3, 5), 0.2, notes)
        timing = point.timings.get((order, "transfer"))
        if timing is None or order not in point.facts:
            raise RemoteError("; ".join(notes) or "it was not measured")
        report.notes += notes
        rate = _rate(count, size, timing)
        beside = {"cuMemcpyAsync": ceiling}
        details: dict[str, Any] = {"of_the_ceiling": rate / ceiling, "rounds_us": timing.rounds_us}
        other = point.timings.get(("NIXL", "prepared"))
        if other is not None:
            beside["NIXL"] = _rate(count, size, other)
            details |= {"of_nixl": rate / beside["NIXL"], "nixl": {**asdict(other), **point.facts.get("NIXL", {})}}
        return Row(
            what=_what(count, order, size),
            value=rate,
            unit="GB/s",
            target=_SHARE * ceiling if order == "aggregated" else None,
            better="higher",
            peers=beside,
            details={**details, **point.facts[order]},
        )


def _rate(count: int, size: int, timing: Timing) -> float:
    """GB/s, read and written."""
    return 2 * count * size / timing.sample.median_us / 1e3


def _nixl(order: str) -> Kind:
    """The same blocks: as one descriptor each, or as one for each layer's K or V."""
    parts = 2 * _LAYERS if order == "discrete" else 1
    return Kind("NIXL", ("prepared",), peer=_NIXL, options={"parts": parts}, answer_s_max=_NIXL_ANSWER_S_MAX)


def _launches(context: Context, report: Report, kind: Kind) -> None:
    """What transfer() takes before it returns, for blocks that a thread of kvpool's copies, or sets the GPU to copy."""
    size = layout(_LAYERS, "aggregated").block_bytes
    for count in (1, 16):
        what = f"transfer() of {count} blocks, until it returns"
        with report.guarded(what), _one_pair(kind, context) as pair:
            pair.open(count, size)
            pair.verify("transfer", 1)
            pair.sender.ask("begin_times", calls=20)
            times = sorted(pair.sender.ask("begin_times", calls=context.pick(_QUICK_CALLS, _CALLS)))
            pair.shut()
            report.rows.append(
                Row(
                    what=what,
                    value=median(times),
                    target=_LAUNCH_US,
                    p99=times[len(times) * 99 // 100],
                    details={"n": len(times), "min": times[0]},
                )
            )


@contextmanager
def _one_pair(kind: Kind, context: Context) -> Iterator[Pair]:
    """Raises RemoteError where it does not start."""
    noted = len(context.peers.notes)
    pairs = Pair.start([kind], context.peers)
    if not pairs:
        raise RemoteError("; ".join(context.peers.notes[noted:]) or "its processes do not start")
    with pairs[0] as pair:
        yield pair


def require_gpu() -> None:
    """Raises Skipped where there is no GPU."""
    try:
        Device()
    except NoDevice as reason:
        raise Skipped(str(reason)) from None
