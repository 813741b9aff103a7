"""The grid of N blocks of S bytes: on one host, and over TCP, beside the peers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from bench.context import Context
from bench.result import Report, Row
from bench.transfer.pair import Kind, Pair, Point, measure
from bench.transfer.ucx import CMA, POSIX, TCP, ucx_environment

_KIB, _MIB = 1 << 10, 1 << 20
_GRID = (
    (1, 4 * _KIB),
    (64, 4 * _KIB),
    (1024, 4 * _KIB),
    (64, 64 * _KIB),
    (4096, 16 * _KIB),
    (64, _MIB),
    (16, 16 * _MIB),
)
_QUICK = _GRID[:4]
_STREAMING = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000"}

# What the issue asks for. Times in microseconds, ratios of medians of this run.
_SHM_US = {(64, 4 * _KIB): 13.0, (1024, 4 * _KIB): 250.0, (64, 64 * _KIB): 150.0}
_SHM_OF_NIXL = {(64, 4 * _KIB): 8.0, (1024, 4 * _KIB): 8.0, (64, 64 * _KIB): 2.2, (4096, 16 * _KIB): 1.8}
_CMA_OF_NIXL = {(64, 4 * _KIB): 3.0, (1024, 4 * _KIB): 3.0}
_SOCK_OF_NIXL = {(64, 4 * _KIB): 2.5, (1024, 4 * _KIB): 3.5}
_SOCK_OF_MOONCAKE = {(64, 4 * _KIB): 15.0, (1024, 4 * _KIB): 15.0}
_OF_MEMCPY = 0.9  # from 1 MiB blocks on
_OF_UCX_ANYWHERE = 0.9
_OF_NIXL_TCP_ANYWHERE = 0.9
_OF_PLAIN_TCP_ANYWHERE = 0.8  # the better of gathered and piece by piece


def same_host(context: Context, report: Report) -> None:
    """shm, cma and ucx, beside NIXL, UCX and memcpy."""
    kinds = [
        _own("shm", "shm", "unix"),
        Kind("NIXL", ("prepared", "new"), peer="NIXL"),
        _own("cma", "cma", "unix", adopted=True),
        Kind("UCX cma", ("puts",), peer="UCX", environment=CMA),
        _own("ucx, cma", "ucx", "unix", {**ucx_environment(context.peers), **CMA}, adopted=True),
        Kind("UCX posix", ("puts",), peer="UCX", environment=POSIX),
        *_memcpy(),
    ]
    points = _measure(context, report, kinds)
    beside = ("NIXL", "UCX cma", "UCX posix", "memcpy")
    for point in points:
        report.rows += _time_rows(point, "shm", beside, _SHM_US)
    for point in points:
        report.rows += _time_rows(point, "cma", ("NIXL", "UCX cma"), {})
    for point in points:
        report.rows += _time_rows(point, "ucx, cma", ("NIXL", "UCX cma"), {})
    report.rows += _ratio_rows(points, "shm", "NIXL", _SHM_OF_NIXL)
    report.rows += _ratio_rows(points, "cma", "NIXL", _CMA_OF_NIXL)
    large = {(point.count, point.size): _OF_MEMCPY for point in points if point.size >= _MIB}
    report.rows += _ratio_rows(points, "shm", "memcpy", large)
    report.rows += _worst_row(points, "shm", "UCX cma", _OF_UCX_ANYWHERE)
    report.rows += _worst_row(points, "ucx, cma", "UCX cma", None)
    report.series["same_host"] = [_series(point) for point in points]


def tcp(context: Context, report: Report) -> None:
    """The routes sock and ucx over TCP, beside NIXL, UCX and Mooncake over TCP."""
    kinds = [
        _own("sock", "sock", "tcp"),
        Kind("NIXL tcp", ("prepared", "new"), peer="NIXL", environment=TCP),
        _own("ucx, tcp", "ucx", "tcp", {**ucx_environment(context.peers), **TCP}),
        Kind("UCX tcp", ("puts",), peer="UCX", environment=TCP),
        _own("sock, MAC", "sock", "tcp", trusted=False),
        Kind("plain TCP", ("gathered", "pieces"), module="bench.transfer.tcp_ways"),
        Kind("Mooncake", ("batch",), peer="Mooncake"),
    ]
    points = _measure(context, report, kinds)
    for point in points:
        report.rows += _time_rows(point, "sock", ("NIXL tcp", "UCX tcp", "Mooncake", "plain TCP"), {})
    for point in points:
        report.rows += _time_rows(point, "ucx, tcp", ("NIXL tcp", "UCX tcp"), {})
    for point in points:
        report.rows += _time_rows(point, "sock, MAC", ("NIXL tcp",), {})
    report.rows += _ratio_rows(points, "sock", "NIXL tcp", _SOCK_OF_NIXL)
    report.rows += _ratio_rows(points, "sock", "Mooncake", _SOCK_OF_MOONCAKE)
    several = [point for point in points if point.count > 1]  # with one block there is nothing to gather
    report.rows += _worst_row(several, "sock", "plain TCP", _OF_PLAIN_TCP_ANYWHERE)
    report.rows += _worst_row(points, "sock", "NIXL tcp", _OF_NIXL_TCP_ANYWHERE)
    report.rows += _worst_row(points, "ucx, tcp", "UCX tcp", None)
    report.series["tcp"] = [_series(point) for point in points]
    links = {point.facts["sock"]["link"].partition(" ")[0] for point in points if "sock" in point.facts}
    if links - {"tcp"}:
        report.notes.append(f"sock did not run over TCP but over {', '.join(sorted(links))}: no comparison.")


def _own(
    name: str,
    route: str,
    link: str,
    environment: Mapping[str, str] | None = None,
    *,
    adopted: bool = False,
    trusted: bool = True,
) -> Kind:
    options = {"route": route, "link": link, "adopted": adopted, "trusted": trusted}
    return Kind(name, ("transfer",), environment=environment or {}, options=options)


def _memcpy() -> list[Kind]:
    """By one thread and by two; as it comes, and told to write past the caches from 1 MiB on."""
    return [
        Kind("memcpy", ("threads=1", "threads=2"), module="bench.transfer.ceiling"),
        Kind(
            "memcpy past the caches",
            ("threads=1", "threads=2"),
            module="bench.transfer.ceiling",
            environment=_STREAMING,
            bytes_min=_MIB,
        ),
    ]


def _measure(context: Context, report: Report, kinds: Sequence[Kind]) -> list[Point]:
    rounds, seconds = (3, 0.02) if context.quick else (5, 0.08)
    with ExitStack() as processes:
        pairs = Pair.start(kinds, context.peers)
        for pair in pairs:
            processes.callback(pair.close)
        grid = _QUICK if context.quick else _GRID
        return [measure(pairs, count, size, rounds, seconds, report.notes) for count, size in grid]


# ---- rows


def label(count: int, size: int) -> str:
    amount = f"{size // _MIB} MiB" if size >= _MIB else f"{size // _KIB} KiB"
    return f"{count:,} x {amount}"


def _best(point: Point, name: str) -> float | None:
    """For memcpy, however it was told to write."""
    if name != "memcpy":
        return point.best_us(name)
    ways = [point.best_us(way) for way in ("memcpy", "memcpy past the caches")]
    return min((way for way in ways if way is not None), default=None)


def _time_rows(point: Point, name: str, beside: Iterable[str], targets: Mapping[tuple[int, int], float]) -> list[Row]:
    timing = point.timings.get((name, "transfer"))
    if timing is None:
        return []
    peers = {peer: best for peer in beside if (best := _best(point, peer)) is not None}
    row = Row(
        what=f"{name}: {label(point.count, point.size)}",
        value=timing.sample.median_us,
        target=targets.get((point.count, point.size)),
        p99=timing.sample.p99_us,
        peers=peers,
        details={"rounds_us": timing.rounds_us, "samples": {name: asdict(timing.sample)}, **point.facts.get(name, {})},
    )
    return [row]


def _ratio_rows(points: Iterable[Point], name: str, peer: str, targets: Mapping[tuple[int, int], float]) -> list[Row]:
    rows = []
    for point in points:
        ratio = _ratio(point, name, peer)
        target = targets.get((point.count, point.size))
        if ratio is not None and target is not None:
            what = f"{name} against {peer}: {label(point.count, point.size)}"
            rows.append(Row(what, ratio, "x", target, "higher", peers=_memcpy_ratio(point, peer)))
    return rows


def _worst_row(points: Iterable[Point], name: str, peer: str, target: float | None) -> list[Row]:
    ratios = {}
    for point in points:
        ratio = _ratio(point, name, peer)
        if ratio is not None:
            ratios[label(point.count, point.size)] = ratio
    if not ratios:
        return []
    worst = min(ratios, key=lambda where: ratios[where])
    what = f"{name} against {peer}: the worst, {worst}"
    return [Row(what, ratios[worst], "x", target, "higher", details={"ratios": ratios})]


def _memcpy_ratio(point: Point, peer: str) -> dict[str, float]:
    """What memcpy comes to against the same peer on this machine: more is not to be had by copying."""
    best, other = _best(point, "memcpy"), _best(point, peer)
    return {} if best is None or other is None or peer == "memcpy" else {"memcpy": other / best}


def _ratio(point: Point, name: str, peer: str) -> float | None:
    timing = point.timings.get((name, "transfer"))
    other = _best(point, peer)
    return None if timing is None or other is None else other / timing.sample.median_us


def _series(point: Point) -> dict[str, Any]:
    medians: dict[str, dict[str, float]] = {}
    for (name, variant), timing in point.timings.items():
        medians.setdefault(name, {})[variant] = timing.sample.median_us
    return {"blocks": point.count, "block_bytes": point.size, "median_us": medians}
