"""Figure 11 of the MemServe paper: discrete against aggregated blocks.

One prompt of 2,048 tokens of Llama-2-13B's shape goes from one process to another: 128 blocks of 16 tokens. A discrete
block is 2 * 40 pieces of 160 KiB, a layer's K or V each, as engines have it; an aggregated one is a single piece. So
aggregation makes 80 times fewer calls; what that saves depends on the transport, and on how long pieces are. So the
same is measured with one head in place of 40, pieces of 4 KiB, as one of many tensor-parallel ranks has.

Discrete blocks are sent a piece a call, as in the paper, and gathered: the same pieces by "by_request_agg", which puts
them into one message where the route has messages.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import kvpool
from bench import plots
from bench.context import Context
from bench.result import Report, Row
from bench.transfer.own import listen, settings
from bench.transfer.pair import Kind, Pair, Point, measure
from bench.transfer.side import Side, buffer
from bench.transfer.ucx import TCP, ucx_environment
from kvpool.types import Strategy

TITLE = "MemServe Fig 11: discrete against aggregated blocks, Llama-2-13B, one prompt of 2,048 tokens"
PEERS = ("UCX",)  # for its library
_LAYERS, _HEADS, _DIM, _BLOCK_TOKENS = 40, 40, 128, 16
_TOKENS, _QUICK_TOKENS = 2048, 256
_ORDERS = ("discrete", "aggregated")
_PLACES = ("scattered", "gathered", "in a row")
_HEADS_OF = {"160 KiB": _HEADS, "4 KiB": 1}  # by the length of a piece
_FEWER_CALLS = 2 * _LAYERS


def layout(order: Any, heads: int = _HEADS) -> kvpool.KVLayout:
    return kvpool.KVLayout(_LAYERS, heads, _DIM, "float16", _BLOCK_TOKENS, order=order)


class Subject(Side):
    """kvpool's two sides; see bench/transfer/side.py. Here all slots are sent."""

    def version(self) -> str:
        return f"kvpool {kvpool._core.__version__}"

    def receive(self, count: int, size: int, **options: Any) -> dict[str, Any]:
        self._make(count, **options)
        return {"address": listen(self._pool, options["link"])}

    def send(self, count: int, size: int, target: dict[str, Any], **options: Any) -> list[int]:
        self._make(count, **options)
        pool, route = self._pool, options["route"]
        peer = pool.peers.connect(target["address"])
        own = np.sort(pool.alloc(count))
        lent = np.sort(pool.alloc(count, instance=peer))
        self._order = _shuffled(count)

        def write(strategy: Strategy, source: Any, to: Any) -> kvpool.Transfer:
            return pool.transfer(peer, source, to=to, strategy=strategy, route=route).wait()

        # As the paper does: a discrete block is a call a piece, an aggregated one a call.
        strategy: Strategy = "by_request" if options["order"] == "discrete" else "by_request_agg"
        self._calls = {
            "scattered": lambda: write(strategy, own[self._order], lent[self._order]),
            "gathered": lambda: write("by_request_agg", own[self._order], lent[self._order]),
            # The same blocks to the same places in the order of the memory, so that neighbours can be merged.
            "in a row": lambda: write("by_request_agg", own, lent),
        }
        return [int(slot) for slot in self._order]

    def facts(self) -> dict[str, Any]:
        return {
            "link": self._pool.peers.list()[0].link,
            "calls": {variant: call().stats.calls for variant, call in self._calls.items()},
        }

    def end(self) -> None:
        self._calls = {}
        self._region = np.empty((0, 1), np.uint64)
        self._pool.close()
        del self._pool

    def _make(self, blocks: int, *, order: str, route: str, heads: int, **_: Any) -> None:
        shape = layout(order, heads)
        if route in ("cma", "ucx"):
            self._adopt(blocks, shape, route)
            return
        self._pool = kvpool.Pool(shape, hbm_blocks=blocks, **settings(route))
        self._region = self._pool.tensor(kvpool.HBM).numpy().view(np.uint64)

    def _adopt(self, blocks: int, shape: kvpool.KVLayout, route: str) -> None:
        """Over an engine's own memory: a tensor a layer, or one tensor of whole blocks."""
        memory = buffer(blocks * shape.block_bytes)
        if shape.order == "aggregated":
            whole = kvpool.RawLayout(shape.block_bytes, _BLOCK_TOKENS)
            self._pool = kvpool.Pool(whole, hbm=[memory.reshape(blocks, shape.block_bytes)], **settings(route))
            self._region = memory.view(np.uint64).reshape(blocks, -1)
            return
        tensors = memory.view(np.float16).reshape(_LAYERS, 2, blocks, shape.kv_heads, _BLOCK_TOKENS, _DIM)
        self._pool = kvpool.Pool(shape, hbm=list(tensors), block_dim=1, **settings(route))
        self._region = np.moveaxis(tensors, 2, 0).view(np.uint64)


def _shuffled(count: int) -> npt.NDArray[np.int64]:
    """All blocks in an order in which no block is followed by its neighbour."""
    random = np.random.default_rng(1)
    while True:
        order = np.asarray(random.permutation(count), np.int64)
        if not np.any(np.diff(order) == 1):
            return order


def run(context: Context) -> Report:
    report = Report()
    tokens = context.pick(_QUICK_TOKENS, _TOKENS)
    points = {}
    for pieces, heads in _HEADS_OF.items():
        for way in _ways(context):
            name = f"{way.name}, {pieces}"
            point = _measure(context, report, tokens, way, name, heads)
            if point is not None:
                points[name] = point
    report.series = {
        "tokens": tokens,
        "median_ms": {
            name: {
                **{order: _ms(point, order, "scattered") for order in _ORDERS},
                "gathered": _ms(point, "discrete", "gathered"),
            }
            for name, point in points.items()
        },
    }
    title = f"Discrete against aggregated blocks (MemServe, Fig 11): {tokens:,} tokens of Llama-2-13B"
    if points:
        report.plots += plots.draw(
            context.out / "fig11.png",
            title,
            lambda axes: _paint_times(axes, points),
            lambda axes: _paint_calls(axes, points),
        )
    report.notes += [
        f"{tokens // _BLOCK_TOKENS} blocks of 12 MiB, or 320 KiB of pieces of 4 KiB, to named destinations. Scattered: "
        "no block is followed by its neighbour; discrete by_request, aggregated by_request_agg. Gathered: the discrete "
        "blocks by_request_agg. In a row: the same in the order of memory, so that neighbours are merged.",
        "shm and ucx write each piece in place: gathering would copy it once more. sock gathers into frames of up to "
        "4 MiB, cma into lists of up to 1,024 pieces for one call of the kernel. What a route cuts counts once.",
        "cma and ucx: the engine's own memory, a tensor a layer, against one tensor of whole blocks.",
    ]
    return report


class _Way(NamedTuple):
    name: str
    route: str
    link: str
    environment: dict[str, str]


def _ways(context: Context) -> list[_Way]:
    ways = [_Way("shm", "shm", "unix", {}), _Way("cma", "cma", "unix", {}), _Way("sock, TCP", "sock", "tcp", {})]
    if not context.quick:
        ways.append(_Way("ucx, TCP", "ucx", "tcp", {**ucx_environment(context.peers), **TCP}))
    return ways


def _measure(context: Context, report: Report, tokens: int, way: _Way, name: str, heads: int) -> Point | None:
    """Both layouts in turns."""
    options = {"route": way.route, "link": way.link, "heads": heads}
    kinds = [
        Kind(order, _PLACES, module=__name__, environment=way.environment, options={"order": order, **options})
        for order in _ORDERS
    ]
    notes: list[str] = []
    with ExitStack() as processes:
        pairs = Pair.start(kinds, context.peers)
        for pair in pairs:
            processes.callback(pair.close)
        count = tokens // _BLOCK_TOKENS
        point = measure(pairs, count, layout("discrete", heads).block_bytes, context.pick(3, 5), 0.0, notes)
    report.notes += [f"{name}: {note}" for note in notes]
    if len(point.facts) < len(_ORDERS):
        return None
    report.rows += _rows(name, point)
    return point


def _rows(name: str, point: Point) -> list[Row]:
    gathered, apart = _ms(point, "discrete", "gathered"), _ms(point, "discrete", "scattered")
    calls = point.facts["discrete"]["calls"]
    rows = [
        Row(f"{name}: discrete, gathered", gathered, "ms", peers={"a call a piece": apart}),
        Row(f"{name}: a call a piece / gathered, time", apart / gathered, "x", better="higher"),
        Row(
            f"{name}: a call a piece / gathered, calls",
            calls["scattered"] / calls["gathered"],
            "x",
            better="higher",
            details=calls,
        ),
    ]
    for place in ("scattered", "in a row"):
        calls = {order: point.facts[order]["calls"][place] for order in _ORDERS}
        timing = point.timings["aggregated", place]
        rows.append(
            Row(
                what=f"{name}, {place}: aggregated",
                value=_ms(point, "aggregated", place),
                unit="ms",
                p99=timing.sample.p99_us / 1000,
                peers={"discrete": _ms(point, "discrete", place)},
                details={"calls": calls, "sample": asdict(timing.sample), "rounds_us": timing.rounds_us},
            )
        )
        ratio = _ms(point, "discrete", place) / _ms(point, "aggregated", place)
        rows.append(Row(f"{name}, {place}: discrete / aggregated, time", ratio, "x", better="higher"))
        fewer = calls["discrete"] / calls["aggregated"]
        target = _FEWER_CALLS if place == "scattered" else None
        rows.append(Row(f"{name}, {place}: discrete / aggregated, calls", fewer, "x", target, "higher", details=calls))
    return rows


def _ms(point: Point, order: str, place: str) -> float:
    return point.timings[order, place].sample.median_us / 1000


def _paint_times(axes: Any, points: dict[str, Point]) -> None:
    times = {order: [_ms(point, order, "scattered") for point in points.values()] for order in _ORDERS}
    times["discrete, gathered"] = [_ms(point, "discrete", "gathered") for point in points.values()]
    _bars(axes, times, list(points))
    axes.set_yscale("log")
    axes.set_ylabel("time of the transfer (ms, median)")
    axes.set_title("(a) time, scattered blocks", loc="left", fontsize=10)
    axes.legend(frameon=False)


def _paint_calls(axes: Any, points: dict[str, Point]) -> None:
    calls = {order: [point.facts[order]["calls"]["scattered"] for point in points.values()] for order in _ORDERS}
    calls["discrete, gathered"] = [point.facts["discrete"]["calls"]["gathered"] for point in points.values()]
    _bars(axes, calls, list(points))
    axes.set_yscale("log")
    axes.set_ylabel("calls")
    axes.set_title("(b) calls, scattered blocks", loc="left", fontsize=10)


def _bars(axes: Any, heights: dict[str, list[float]], names: list[str]) -> None:
    places = np.arange(len(names))
    for number, (order, values) in enumerate(heights.items()):
        at = places + 0.26 * (number - (len(heights) - 1) / 2)
        axes.bar(at, values, 0.24, label=order, color=plots.shade(number, len(heights)))
    axes.set_xticks(places, [name.replace(", ", "\n") for name in names], fontsize=7)
