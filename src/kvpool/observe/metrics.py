"""The metrics of a pool, for Prometheus.

This counts nothing: the pool counts anyway, and a scrape reads its counters. So metrics cost nothing between scrapes,
and a scrape costs as much as `Pool.stats` and `Pool.peers`. docs/how-to/metrics.md lists the metrics.

Raises:
    ImportError: prometheus-client is missing: ``pip install 'kvpool[metrics]'``.
"""

from __future__ import annotations

import errno
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Final
from wsgiref.simple_server import WSGIServer

from kvpool._core import __version__
from kvpool.errors import ArgumentError, ArgumentTypeError, ClosedError, StateError
from kvpool.peers import PeerInfo
from kvpool.pool import DiskStats, MediumStats, Pool, PoolStats
from kvpool.transfer import TransferTotals

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("kvpool.observe.metrics needs prometheus-client: pip install 'kvpool[metrics]'") from error

__all__ = ["MetricsServer", "PoolCollector", "serve_metrics"]

_STATES: Final = (
    "free", "active", "historical", "reserved", "lent", "quarantined", "retired", "overlapped", "suspended",
)  # fmt: skip
_ROLES: Final = ("prefill", "decode", "both")
_MEMBER_STATES: Final = ("up", "draining")
_OTHERS: Final = "(others)"  # no peer's name: those have no brackets to be mistaken for

_MEDIUM_GAUGES: Final = (
    ("kvpool_capacity_blocks", "Blocks there are.", "capacity"),
    ("kvpool_pinned_blocks", "Cached blocks that are pinned or being moved.", "pinned"),
    ("kvpool_evictable_blocks", "Cached blocks that can be dropped.", "evictable"),
    ("kvpool_free_runs", "Maximal runs of free blocks.", "free_runs"),
    ("kvpool_longest_free_run_blocks", "Blocks in the longest run of free ones.", "longest_free_run"),
)
_GAUGES: Final = (
    ("kvpool_index_blocks", "Blocks in the prompt index.", "index_blocks"),
    ("kvpool_index_nodes", "Nodes of the prompt index.", "index_nodes"),
    ("kvpool_index_bytes", "Memory of the prompt index.", "index_bytes"),
    ("kvpool_metadata_bytes", "Memory of the allocator.", "metadata_bytes"),
    ("kvpool_device_bytes", "Memory of the GPU that the pool has taken.", "device_bytes"),
    ("kvpool_namespaces", "Namespaces with cached prompts, and the default one.", "namespaces"),
)
_COUNTERS: Final = (
    ("kvpool_allocated_blocks", "Blocks given to callers.", "allocated_blocks"),
    ("kvpool_freed_blocks", "Blocks given back by callers.", "freed_blocks"),
    ("kvpool_failed_allocations", "Calls of alloc that raised OutOfBlocks.", "failed_allocations"),
    ("kvpool_matches", "Prompts looked up.", "match_calls"),
    ("kvpool_match_requested_tokens", "Tokens of the prompts that were looked up.", "requested_tokens"),
    ("kvpool_inserted_blocks", "Blocks newly stored in the index.", "inserted_blocks"),
    ("kvpool_duplicate_blocks", "Blocks given to insert whose content was cached before.", "duplicate_blocks"),
    ("kvpool_evicted_blocks", "Cached blocks that were dropped.", "evicted_blocks"),
    ("kvpool_swapped_out_blocks", "Cached blocks moved from HBM to DRAM.", "swapped_out_blocks"),
    ("kvpool_swapped_in_blocks", "Cached blocks moved from DRAM to HBM.", "swapped_in_blocks"),
)
_DISK_GAUGES: Final = (
    ("kvpool_disk_capacity_blocks", "Blocks on disk there are.", "capacity"),
    ("kvpool_disk_used_blocks", "Blocks on disk with content.", "used"),
    ("kvpool_disk_copies", "Of these, copies of blocks that lie in memory.", "copies"),
    ("kvpool_disk_recovered_blocks", "Blocks that were found on disk when the pool was made.", "recovered_blocks"),
)
_DISK_COUNTERS: Final = (
    ("kvpool_disk_written_blocks", "Blocks written to disk.", "written_blocks"),
    ("kvpool_disk_moved_blocks", "Blocks evicted from memory that are found on disk since.", "moved_blocks"),
    ("kvpool_disk_brought_blocks", "Blocks brought from disk to DRAM.", "brought_blocks"),
    ("kvpool_disk_lost_blocks", "Blocks found damaged or gone on disk.", "lost_blocks"),
    ("kvpool_disk_corrupt_blocks", "Reads from disk whose checksum was wrong.", "corrupt_blocks"),
    ("kvpool_disk_read_errors", "Reads that the drive failed.", "read_errors"),
    ("kvpool_disk_write_errors", "Writes that the drive failed.", "write_errors"),
    ("kvpool_disk_read_bytes", "Bytes read from the drive.", "read_bytes"),
    ("kvpool_disk_written_bytes", "Bytes written to the drive.", "written_bytes"),
)
_PEER_GAUGES: Final = (
    ("kvpool_peer_lent_blocks", "Blocks of this pool that a peer has borrowed.", "lent_blocks"),
    ("kvpool_peer_borrowed_blocks", "Blocks of a peer that this pool has borrowed.", "borrowed_blocks"),
    ("kvpool_peer_reserved_blocks", "Blocks of this pool for transfers of a peer under way.", "reserved_blocks"),
    ("kvpool_peer_transfers_under_way", "Transfers to a peer that have not ended.", "transfers"),
)


class PoolCollector(Collector):
    """The metrics of one pool or several: ``registry.register(PoolCollector(pool))`` with prometheus_client.

    Every sample has the label `pool`. A closed pool has only `kvpool_up`, which is 0. Thread-safe.

    Args:
        pools: A pool, whose label is its name among peers, also before it has any; or pools by their labels. They are
            kept alive until the collector is dropped.
        peers_max: The most peers with separate samples, by name; the rest share one sample, so that the number of
            series is bounded.

    Raises:
        ArgumentTypeError: No pool.
        ArgumentError: peers_max is negative.
    """

    def __init__(self, pools: Pool | Mapping[str, Pool], peers_max: int = 64) -> None:
        if peers_max < 0:
            raise ArgumentError(f"peers_max is {peers_max}; it must be at least 0", value=peers_max)
        self._pools: list[tuple[str | None, Pool]] = [*pools.items()] if isinstance(pools, Mapping) else [(None, pools)]
        for _, pool in self._pools:
            if not isinstance(pool, Pool):
                raise ArgumentTypeError(f"metrics are of a Pool, not of a {type(pool).__name__}")
        self._peers_max = peers_max

    def collect(self) -> Iterable[Metric]:
        """Asks the pools. Called by the registry at every scrape."""
        families = _Families()
        for label, pool in self._pools:
            name = pool._own_name if label is None else label
            try:
                if label is None:
                    name = pool.peers.name or name  # `attach` may have given another one
                stats, peers, transfers = pool.stats(), pool.peers.list(), pool.peers.totals()
            except ClosedError:
                families.gauge("kvpool_up", "Whether the pool is open.", [name], 0)
                continue
            families.gauge("kvpool_up", "Whether the pool is open.", [name], 1)
            _add_memory(families, name, pool)
            _add_stats(families, name, stats)
            _add_peers(families, name, peers, self._peers_max)
            _add_transfers(families, name, transfers)
            _add_membership(families, name, pool)
        return families

    def describe(self) -> Iterable[Metric]:
        """The names, for a registry that refuses two collectors of the same ones. Asks no pool."""
        return [GaugeMetricFamily("kvpool_up", "Whether the pool is open.", labels=["pool"])]


class MetricsServer:
    """Answers scrapes at `address`, in separate threads, until it is closed. Made by `serve_metrics`.

    Attributes:
        address: "http://127.0.0.1:PORT/metrics".
    """

    def __init__(self, server: WSGIServer, thread: threading.Thread, host: str) -> None:
        """Use `serve_metrics`."""
        self._server = server
        self._thread = thread
        self._lock = threading.Lock()
        self._closed = False
        self.port = server.server_port
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def close(self) -> None:
        """Ends it, without closing the pool. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()


def serve_metrics(
    pools: Pool | Mapping[str, Pool], address: str = "127.0.0.1", port: int = 0, *, peers_max: int = 64
) -> MetricsServer:
    """Serves the metrics of pools over HTTP, and no others. For a registry of your own: `PoolCollector`.

    Anyone who can connect can read them. They contain no tokens, but names of peers.

    Args:
        pools: As in `PoolCollector`.
        address: Of the interface to listen on; by default only this machine can connect.
        port: 0 for any free port.
        peers_max: As in `PoolCollector`.

    Returns:
        A handle, with the address, whose close() ends it.

    Raises:
        ArgumentError: The address does not belong to this machine, or the port is invalid.
        StateError: The port is in use.
    """
    registry = CollectorRegistry()
    registry.register(PoolCollector(pools, peers_max))
    if not 0 <= port < 1 << 16:
        raise ArgumentError(f"port is {port}; it must be from 0 to 65535", value=port)
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        if port and error.errno == errno.EADDRINUSE:
            raise StateError(f"port {port} of {address} is in use") from error
        raise ArgumentError(f"cannot serve metrics at {address}: {error}") from error
    return MetricsServer(server, thread, address)


class _Families:
    """Metric families by name, each made when its first sample comes: a family stands once in what is scraped."""

    def __init__(self) -> None:
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        self._histograms: dict[str, HistogramMetricFamily] = {}

    def __iter__(self) -> Iterator[Metric]:
        yield from self._families.values()
        yield from self._histograms.values()

    def gauge(self, name: str, text: str, labels: list[str], value: float, *more: str) -> None:
        """A sample of a gauge; `more` are the names of the labels after `pool`."""
        if name not in self._families:
            self._families[name] = GaugeMetricFamily(name, text, labels=["pool", *more])
        self._families[name].add_metric(labels, value)

    def counter(self, name: str, text: str, labels: list[str], value: float, *more: str) -> None:
        """A sample of a counter, whose name gets the suffix `_total`."""
        if name not in self._families:
            self._families[name] = CounterMetricFamily(name, text, labels=["pool", *more])
        self._families[name].add_metric(labels, value)

    def histogram(
        self, name: str, text: str, labels: list[str], buckets: list[tuple[str, float]], total: float, *more: str
    ) -> None:
        """The buckets (cumulative, by upper bound) and the sum of a histogram."""
        if name not in self._histograms:
            self._histograms[name] = HistogramMetricFamily(name, text, labels=["pool", *more])
        self._histograms[name].add_metric(labels, buckets, total)


def _add_memory(families: _Families, pool_name: str, pool: Pool) -> None:
    families.gauge("kvpool_info", "Always 1; the labels say what runs.", [pool_name, __version__], 1, "version")
    layout = pool.kv_layout
    families.gauge("kvpool_block_bytes", "Bytes of one block.", [pool_name], layout.block_bytes)
    families.gauge("kvpool_block_tokens", "Tokens of one block.", [pool_name], layout.block_tokens)


def _add_stats(families: _Families, pool_name: str, stats: PoolStats) -> None:
    tiers: dict[str, MediumStats] = {"hbm": stats.hbm, "dram": stats.dram}
    for medium, tier in tiers.items():
        for state in _STATES:
            families.gauge(
                "kvpool_blocks", "Blocks by state; they add up to the capacity.", [pool_name, medium, state],
                getattr(tier, state), "medium", "state",
            )  # fmt: skip
        for name, text, field in _MEDIUM_GAUGES:
            families.gauge(name, text, [pool_name, medium], getattr(tier, field), "medium")
    for name, text, field in _GAUGES:
        families.gauge(name, text, [pool_name], getattr(stats, field))
    for name, text, field in _COUNTERS:
        families.counter(name, text, [pool_name], getattr(stats, field))
    on_disk = {} if stats.disk is None else {"disk": stats.disk.matched_tokens}
    in_hbm = stats.matched_tokens - stats.matched_dram_tokens - sum(on_disk.values())
    cached = {"hbm": in_hbm, "dram": stats.matched_dram_tokens, **on_disk}
    for medium, tokens in cached.items():
        text = "Of these, the tokens that were cached, by the medium of their blocks."
        families.counter("kvpool_match_cached_tokens", text, [pool_name, medium], tokens, "medium")
    if stats.disk is not None:
        _add_disk(families, pool_name, stats.disk)
    if stats.nccl is not None:
        text = "Communicators of NCCL on the pool's GPU, of all pools of the process."
        families.gauge("kvpool_nccl_communicators", text, [pool_name], stats.nccl.communicators)
        for use, taken in {"library": stats.nccl.library_bytes, "staging": stats.nccl.staging_bytes}.items():
            text = "Memory of the pool's GPU that NCCL (about) and the passes of its route take in this process."
            families.gauge("kvpool_nccl_bytes", text, [pool_name, use], taken, "use")


def _add_membership(families: _Families, pool_name: str, pool: Pool) -> None:
    """The metrics of a pool that is, or was, attached to a cluster."""
    if pool._attachment is None:
        return
    seen = pool._attachment._membership()
    there = Counter((member.role, member.state) for member in seen["members"])
    for role in _ROLES:
        for state in _MEMBER_STATES:
            families.gauge(
                "kvpool_members", "Members of the cluster, as this pool sees it.", [pool_name, role, state],
                there[role, state], "role", "state",
            )  # fmt: skip
    for kind, events in seen["events"].items():
        text = "Events of members, by kind."
        families.counter("kvpool_member_events", text, [pool_name, kind], events, "kind")
    text = "Whether this pool's lease in its cluster is certainly held."
    families.gauge("kvpool_lease_valid", text, [pool_name], seen["lease_valid"])
    families.counter("kvpool_leases_lost", "How often this pool has lost its lease.", [pool_name], seen["leases_lost"])
    text = "Renewals of this pool's lease that etcd has not answered."
    families.counter("kvpool_lease_renewals_failed", text, [pool_name], seen["renewals_failed"])


def _add_disk(families: _Families, pool_name: str, disk: DiskStats) -> None:
    text = "1 since the drive has failed and the disk is switched off."
    families.gauge("kvpool_disk_off", text, [pool_name], float(disk.state == "off"))
    for name, text, field in _DISK_GAUGES:
        families.gauge(name, text, [pool_name], getattr(disk, field))
    for name, text, field in _DISK_COUNTERS:
        families.counter(name, text, [pool_name], getattr(disk, field))


def _add_peers(families: _Families, pool_name: str, peers: list[PeerInfo], peers_max: int) -> None:
    families.gauge("kvpool_peers", "Peers that are connected.", [pool_name], len(peers))
    # By name, so that the same ones have their own samples at every scrape.
    ordered = sorted(peers, key=lambda peer: peer.name)
    for name, text, field in _PEER_GAUGES:
        for peer in ordered[:peers_max]:
            families.gauge(name, text, [pool_name, peer.name], getattr(peer, field), "peer")
        if len(ordered) > peers_max:
            rest = sum(getattr(peer, field) for peer in ordered[peers_max:])
            families.gauge(name, text, [pool_name, _OTHERS], rest, "peer")

    for peer in ordered[:peers_max]:
        _add_routes(families, pool_name, peer)
        _add_traffic(families, pool_name, peer)


def _add_routes(families: _Families, pool_name: str, peer: PeerInfo) -> None:
    """How a peer is reached: every route, whether it is the first choice, and what it has failed."""
    failing = {report.route: report for report in peer.failing_routes}
    for place, route in enumerate(dict.fromkeys(peer.routes)):
        labels = [pool_name, peer.name, route]
        text = "1 for the cheapest route to a peer, 0 for others that it can be reached by."
        families.gauge("kvpool_peer_route", text, labels, 0 if place else 1, "peer", "route")
        text = "Transfers that a route to a peer has failed in a row; 0 for one that works."
        failures = failing[route].failures if route in failing else 0
        families.gauge("kvpool_peer_route_failures", text, labels, failures, "peer", "route")


def _add_transfers(families: _Families, pool_name: str, transfers: Mapping[str, TransferTotals]) -> None:
    for kind, totals in transfers.items():
        for outcome, count in {"ok": totals.succeeded, **totals.failed}.items():
            families.counter(
                "kvpool_transfers", "Transfers begun here that have ended: \"ok\", or the name of the error.",
                [pool_name, kind, outcome], count, "kind", "outcome",
            )  # fmt: skip
        families.counter("kvpool_transfer_bytes", "Bytes that they moved.", [pool_name, kind], totals.bytes, "kind")
        reached, buckets = 0, []
        for bound, count in totals.durations:
            reached += count
            buckets.append(("+Inf" if math.isinf(bound) else repr(bound), float(reached)))
        families.histogram(
            "kvpool_transfer_seconds", "How long those took that ended well.", [pool_name, kind], buckets,
            totals.seconds, "kind",
        )  # fmt: skip


def _add_traffic(families: _Families, pool_name: str, peer: PeerInfo) -> None:
    """Bytes of blocks to and from a peer; from 0 on when it connects anew."""
    for route, sent in peer.sent_bytes.items():
        text = "Bytes of blocks that were written to a peer since it has connected, by route."
        families.counter("kvpool_peer_sent_bytes", text, [pool_name, peer.name, route], sent, "peer", "route")
    text = "Bytes of blocks that have come from a peer since it has connected."
    families.counter("kvpool_peer_received_bytes", text, [pool_name, peer.name], peer.received_bytes, "peer")
