"""Figure 12 of the MemServe paper: by-layer, by-request and aggregated transfer under rising load.

Requests arrive at random (Poisson). One instance computes them in turn, layer by layer, and sends their blocks to
another, while it computes the next. Measured is the time from a request's arrival until all of its blocks have arrived.
A prompt has 1,024 tokens, as in the paper. The 32 that answer it are decoded by the receiver, which takes as long
whatever sent the prompt, so their time is left out.

Simulated is the computing: a layer is a sleep of fixed length, as a GPU computes without the CPU's doing. Real are
reservation, transfer and notification, between two processes. A prompt of Llama-2-13B is 800 MiB in pieces of 160 KiB,
which takes a socket longer than a GPU takes to compute it: so the length of a layer is one with which both take about
as long. One head in place of 40, pieces of 4 KiB, is one of many tensor-parallel ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Queue
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import kvpool
from bench import plots
from bench.context import Context
from bench.measure import summarize
from bench.memserve.fig11_layouts import layout
from bench.remote import Remote, RemoteError
from bench.result import Report, Row
from bench.transfer.own import listen, settings

TITLE = "MemServe Fig 12: transfer strategies under rising load, from arrival to the last block"
PEERS: tuple[str, ...] = ()
# Of the pools, and what they send. by_request_agg sends aggregated blocks, as in the paper; "gathered" discrete ones.
_SENT = {
    "by_layer": ("discrete", "by_layer"),
    "by_layer_agg": ("discrete", "by_layer_agg"),
    "by_request": ("discrete", "by_request"),
    "by_request, gathered": ("discrete", "by_request_agg"),
    "by_request_agg": ("aggregated", "by_request_agg"),
}
_STRATEGIES: tuple[str, ...] = tuple(_SENT)


class _Way(NamedTuple):
    name: str
    route: str
    link: str
    heads: int
    layer_s: float


_WAYS = (
    _Way("shm, 160 KiB", "shm", "unix", 40, 3e-3),
    _Way("shm, 4 KiB", "shm", "unix", 1, 1e-3),
    _Way("sock, TCP, 160 KiB", "sock", "tcp", 40, 20e-3),
    _Way("sock, TCP, 4 KiB", "sock", "tcp", 1, 1e-3),
)
_LOADS = (0.2, 0.4, 0.6, 0.8, 0.95)  # of what the computing instance can do
_QUICK_LOADS = (0.3, 0.7)
_TOKENS, _QUICK_TOKENS = 1024, 128
_IN_FLIGHT = 3  # requests whose blocks fit into either pool; more wait for room
_TIMEOUT_S = 60.0
_SEED = 1


class Subject:
    """The computing instance, or the one that receives; see bench/remote.py."""

    def start(self, order: str, route: str, tokens: int, heads: int, layer_s: float) -> None:
        shape = layout(order, heads)
        self._layers, self._layer_s = shape.layers, layer_s
        self._blocks = tokens // shape.block_tokens
        self._pool = kvpool.Pool(shape, hbm_blocks=_IN_FLIGHT * self._blocks, **settings(route))
        self._route = route

    def listen(self, link: str) -> str:
        return listen(self._pool, link)

    def take(self) -> None:
        """From now on what arrives is looked at and its blocks are free again."""
        self._callback = self._pool.inbox.on_received(lambda item: None)

    def connect(self, address: str) -> str:
        self._peer = self._pool.peers.connect(address)
        self._room: Queue[npt.NDArray[np.uint64]] = Queue()
        for _ in range(_IN_FLIGHT):
            self._room.put(self._pool.alloc(self._blocks))
        return self._pool.peers.list()[0].link

    def serve(self, strategy: str, load: float, requests: int) -> list[float]:
        """Times from arrival to the last block of so many requests; microseconds."""
        compute_s = self._layers * self._layer_s
        # The same arrivals at every load, only closer together.
        gaps = np.random.default_rng(_SEED).exponential(compute_s / load, requests)
        started = perf_counter()
        arrivals = [started + float(arrival) for arrival in np.cumsum(gaps)]
        with ThreadPoolExecutor(_IN_FLIGHT) as waiters:
            ends = []
            for arrival in arrivals:
                _sleep_until(arrival)
                addrs = self._room.get(timeout=_TIMEOUT_S)
                transfer = self._compute_and_send(strategy, addrs)
                ends.append(waiters.submit(self._await, transfer, addrs))
            return [(end.result() - arrival) * 1e6 for arrival, end in zip(arrivals, ends, strict=True)]

    def _compute_and_send(self, strategy: str, addrs: npt.NDArray[np.uint64]) -> kvpool.Transfer:
        options: dict[str, Any] = {"strategy": strategy, "route": self._route, "private": b"", "timeout": _TIMEOUT_S}
        if not strategy.startswith("by_layer"):
            _sleep_until(perf_counter() + self._layers * self._layer_s)
            whole: kvpool.Transfer = self._pool.transfer(self._peer, addrs, **options)
            return whole
        opened: kvpool.TransferStream = self._pool.transfer(self._peer, addrs, **options, layerwise=True)
        with opened as stream:
            begun = perf_counter()
            for layer in range(self._layers):
                # By the clock, not by what is left after sending: a GPU computes on while the layer before is sent.
                _sleep_until(begun + (layer + 1) * self._layer_s)
                stream.send_layer(layer)
        return stream.transfer

    def _await(self, transfer: kvpool.Transfer, addrs: npt.NDArray[np.uint64]) -> float:
        transfer.wait()
        end = perf_counter()
        self._room.put(addrs)
        return end


def _sleep_until(when: float) -> None:
    left = when - perf_counter()
    if left > 0:
        time.sleep(left)


def run(context: Context) -> Report:
    report = Report()
    tokens = context.pick(_QUICK_TOKENS, _TOKENS)
    loads = _QUICK_LOADS if context.quick else _LOADS
    means = {}
    for way in _WAYS:
        try:
            means[way.name] = _measure(context, report, way, tokens, loads)
        except RemoteError as error:
            report.notes.append(f"{way.name} left out: {str(error)[:240]}")
    layers = layout("discrete").layers
    report.series = {"load": loads, "layer_ms": {way.name: way.layer_s * 1e3 for way in _WAYS}, "mean_ms": means}
    if means:
        panels = [
            lambda axes, way=way: _paint(axes, way.name, means[way.name], loads, 1 / (layers * way.layer_s))
            for way in _WAYS
            if way.name in means
        ]
        title = f"Arrival to last block under load (MemServe, Fig 12): {tokens} tokens of Llama-2-13B"
        report.plots += plots.draw(context.out / "fig12.png", title, *panels)
    report.notes += [
        f"Simulated: computing, {layers} layers of "
        + ", ".join(f"{way.layer_s * 1e3:.0f} ms ({way.name})" for way in _WAYS)
        + "; one request at a time. Load: of what can be computed. Real: reservation, transfer, notification.",
        "by_request_agg sends aggregated blocks, the others discrete ones. The same arrivals for all.",
    ]
    return report


def _measure(
    context: Context, report: Report, way: _Way, tokens: int, loads: tuple[float, ...]
) -> dict[str, list[float]]:
    """Mean milliseconds by strategy, one for each load."""
    requests = context.pick(10, 30)
    taken: dict[str, dict[float, list[float]]] = {}
    for order in ("discrete", "aggregated"):  # one after the other: each has pools of several GB
        with _meeting(order, way, tokens) as sender:
            sent = {name: strategy for name, (of, strategy) in _SENT.items() if of == order}
            for strategy in sent.values():
                sender.ask("serve", strategy=strategy, load=1.0, requests=2)  # warms up
            for load in loads:
                for name, strategy in sent.items():
                    times = sender.ask("serve", strategy=strategy, load=load, requests=requests)
                    taken.setdefault(name, {})[load] = times
    for load in loads:
        for name in _STRATEGIES:
            times = taken[name][load]
            what = f"{way.name}, load {load:.0%}: {name}, mean"
            report.rows.append(Row(what, _mean_ms(times), "ms", p99=summarize(times).p99_us / 1000))
    return {name: [_mean_ms(taken[name][load]) for load in loads] for name in _STRATEGIES}


def _mean_ms(times_us: list[float]) -> float:
    return sum(times_us) / len(times_us) / 1000


@contextmanager
def _meeting(order: str, way: _Way, tokens: int) -> Iterator[Remote]:
    """A sender that is connected to a receiver."""
    with Remote(__name__) as receiver, Remote(__name__) as sender:
        for remote in (receiver, sender):
            remote.ask("start", order=order, route=way.route, tokens=tokens, heads=way.heads, layer_s=way.layer_s)
        address = receiver.ask("listen", link=way.link)
        receiver.ask("take")
        sender.ask("connect", address=address)
        yield sender


def _paint(axes: Any, name: str, means: dict[str, list[float]], loads: tuple[float, ...], capacity: float) -> None:
    for number, (strategy, values) in enumerate(means.items()):
        axes.plot(
            [load * capacity for load in loads],
            values,
            marker="o",
            label=strategy,
            color=plots.shade(number, len(means)),
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests a second")
    axes.set_ylabel("arrival to last block (ms, mean)")
    axes.set_title(name, loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
