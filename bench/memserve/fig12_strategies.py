"""Figure 12 of the MemServe paper: by-layer, by-request and aggregated transfer under rising load.

Requests arrive at random (Poisson). One instance computes them in turn, layer by layer, and sends their blocks to
another, while it computes the next. Measured is the time from a request's arrival until all of its blocks have arrived.

Simulated is the computing: a layer is a sleep of fixed length, as a GPU computes without the CPU's doing. Real are
reservation, transfer and notification, between two processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from queue import Queue
from time import perf_counter
from typing import Any

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
_STRATEGIES = ("by_layer", "by_layer_agg", "by_request", "by_request_agg")
_ORDERS = {"by_request_agg": "aggregated"}  # the others send an engine's discrete blocks
_ROUTES = (("shm", "shm", "unix"), ("sock, TCP", "sock", "tcp"))
_LAYER_S = 1e-3
_LOADS = (0.2, 0.4, 0.6, 0.8, 0.95)  # of what the computing instance can do
_QUICK_LOADS = (0.3, 0.7)
_TOKENS, _QUICK_TOKENS = 128, 64
_IN_FLIGHT = 6  # requests whose blocks fit into either pool; more wait for room
_TIMEOUT_S = 60.0
_SEED = 1


class Subject:
    """The computing instance, or the one that receives; see bench/remote.py."""

    def start(self, order: str, route: str, tokens: int) -> None:
        shape = layout(order)
        self._layers = shape.layers
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
        compute_s = self._layers * _LAYER_S
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
            _sleep_until(perf_counter() + self._layers * _LAYER_S)
            whole: kvpool.Transfer = self._pool.transfer(self._peer, addrs, **options)
            return whole
        opened: kvpool.TransferStream = self._pool.transfer(self._peer, addrs, **options, layerwise=True)
        with opened as stream:
            begun = perf_counter()
            for layer in range(self._layers):
                # By the clock, not by what is left after sending: a GPU computes on while the layer before is sent.
                _sleep_until(begun + (layer + 1) * _LAYER_S)
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
    for name, route, link in _ROUTES:
        try:
            means[name] = _measure(context, report, name, route, link, tokens, loads)
        except RemoteError as error:
            report.notes.append(f"{name} left out: {str(error)[:240]}")
    capacity = 1 / (layout("discrete").layers * _LAYER_S)
    report.series = {"requests_per_s": [load * capacity for load in loads], "mean_ms": means}
    if means:
        panels = [lambda axes, name=name: _paint(axes, name, means[name], loads, capacity) for name in means]
        title = f"Arrival to last block under load (MemServe, Fig 12): {tokens} tokens of Llama-2-13B"
        report.plots += plots.draw(context.out / "fig12.png", title, *panels)
    report.notes += [
        f"Simulated: computing, {layout('discrete').layers} layers of {_LAYER_S * 1e3:.0f} ms, one request at a time. "
        "Load: of what can be computed. Real: reservation, transfer, notification.",
        "by_request_agg sends aggregated blocks, the others discrete ones. The same arrivals for all.",
    ]
    return report


def _measure(
    context: Context, report: Report, name: str, route: str, link: str, tokens: int, loads: tuple[float, ...]
) -> dict[str, list[float]]:
    """Mean milliseconds by strategy, one for each load."""
    means: dict[str, list[float]] = {strategy: [] for strategy in _STRATEGIES}
    requests = context.pick(10, 30)
    with ExitStack() as stack:
        senders = {
            order: stack.enter_context(_meeting(order, route, link, tokens)) for order in ("discrete", "aggregated")
        }
        for strategy in _STRATEGIES:
            senders[_ORDERS.get(strategy, "discrete")].ask("serve", strategy=strategy, load=1.0, requests=2)  # warms up
        for load in loads:
            for strategy in _STRATEGIES:
                sender = senders[_ORDERS.get(strategy, "discrete")]
                times = sender.ask("serve", strategy=strategy, load=load, requests=requests)
                mean = sum(times) / len(times) / 1000
                means[strategy].append(mean)
                what = f"{name}, load {load:.0%}: {strategy}, mean"
                report.rows.append(Row(what, mean, "ms", p99=summarize(times).p99_us / 1000))
    return means


@contextmanager
def _meeting(order: str, route: str, link: str, tokens: int) -> Iterator[Remote]:
    """A sender that is connected to a receiver."""
    with Remote(__name__) as receiver, Remote(__name__) as sender:
        for remote in (receiver, sender):
            remote.ask("start", order=order, route=route, tokens=tokens)
        address = receiver.ask("listen", link=link)
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
