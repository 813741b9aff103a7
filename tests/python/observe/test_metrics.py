"""Metrics, read by Prometheus' own parser."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request

import pytest
from attach_kit import eventually, member, url
from kit import prompt, refused, small_pool, store
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from space_kit import layout, space_of
from transfer.kit import pair_of

import kvpool
from kvpool import DRAM
from kvpool.observe.metrics import PoolCollector, serve_metrics

__all__ = ["url"]

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def pool():
    with small_pool() as pool:
        yield pool


def scraped(pools, **options) -> Samples:
    registry = CollectorRegistry()
    registry.register(PoolCollector(pools, **options))
    return parsed(generate_latest(registry).decode())


def parsed(text: str) -> Samples:
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    """Of the one sample that has these labels, and perhaps others."""
    (found,) = (
        number for (sample, given), number in samples.items() if sample == name and labels.items() <= set(given)
    )
    return found


def by_state(samples: Samples, medium: str) -> dict[str, float]:
    return {
        dict(labels)["state"]: number
        for (name, labels), number in samples.items()
        if name == "kvpool_blocks" and ("medium", medium) in labels
    }


def test_the_blocks_of_each_medium_add_up_to_its_capacity(pool):
    store(pool, prompt(3))
    pool.swap_out(1)
    pool.alloc(2)
    pool.alloc(1, medium=DRAM)
    samples = scraped(pool)
    stats = pool.stats()
    for medium, tier in (("hbm", stats.hbm), ("dram", stats.dram)):
        blocks = by_state(samples, medium)
        assert sum(blocks.values()) == tier.capacity == value(samples, "kvpool_capacity_blocks", medium=medium)
        assert (blocks["active"], blocks["historical"]) == (tier.active, tier.historical)
        assert tier.active > 0
        assert tier.historical > 0
        assert value(samples, "kvpool_evictable_blocks", medium=medium) == tier.evictable


def test_the_blocks_that_other_models_of_a_space_have_count_too():
    with space_of() as space:
        pool, other = space.load("a", layout(2)), space.load("b", layout(3))
        other.alloc(2)
        blocks = by_state(scraped(pool), "hbm")
        assert blocks["overlapped"] == pool.stats().hbm.overlapped > 0
        assert sum(blocks.values()) == pool.stats().hbm.capacity


def test_counters_count_what_the_pool_did(pool):
    store(pool, prompt(3))
    pool.match(prompt(4)).close()
    pool.swap_out(2)
    pool.evict(1)
    before = scraped(pool)
    stats = pool.stats()
    assert value(before, "kvpool_up") == 1
    assert value(before, "kvpool_matches_total") == 1
    assert value(before, "kvpool_match_requested_tokens_total") == stats.requested_tokens == len(prompt(4))
    assert value(before, "kvpool_match_cached_tokens_total", medium="hbm") == stats.matched_tokens == len(prompt(3))
    assert value(before, "kvpool_match_cached_tokens_total", medium="dram") == stats.matched_dram_tokens == 0
    assert value(before, "kvpool_inserted_blocks_total") == 3
    assert value(before, "kvpool_swapped_out_blocks_total") == 2
    assert value(before, "kvpool_evicted_blocks_total") == 1
    pool.match(prompt(1)).close()
    assert value(scraped(pool), "kvpool_matches_total") == 2


def test_cached_tokens_are_counted_where_they_were_found(pool):
    store(pool, prompt(3))
    pool.swap_out(1)
    with pool.match(prompt(4)) as hit:
        in_dram = sum(kvpool.media(hit.addrs) == DRAM)
    samples = scraped(pool)
    block = pool.kv_layout.block_tokens
    assert in_dram == 1
    assert value(samples, "kvpool_match_cached_tokens_total", medium="dram") == block
    assert value(samples, "kvpool_match_cached_tokens_total", medium="hbm") == 2 * block


def test_an_allocation_that_fails_is_counted_however_it_fails(pool):
    blocks = pool.stats().hbm.capacity
    held = pool.alloc(blocks - 1)
    for n, evict in ((blocks + 1, True), (2, True), (2, False)):
        with pytest.raises(kvpool.OutOfBlocks):
            pool.alloc(n, evict=evict)
    with pytest.raises(kvpool.ArgumentError):
        pool.alloc(-1)
    pool.free(held)
    pool.free(pool.alloc(2))
    assert value(scraped(pool), "kvpool_failed_allocations_total") == 3


@pytest.mark.parametrize("route", ["shm", "sock-unix"])
def test_bytes_are_counted_at_both_ends_by_peer_and_by_route(route):
    with pair_of(route) as pair:
        block = pair.a.kv_layout.block_bytes
        pair.a.transfer(pair.to_b, pair.a.alloc(3)).wait()
        fetched = pair.b("shown = pool.alloc(2)\nshown.tolist()")
        pair.a.fetch(pair.to_b, fetched).wait()
        name = pair.a.peers.list()[0].routes[0]
        samples = scraped(pair.a)
        assert value(samples, "kvpool_peer_sent_bytes_total", peer=pair.to_b, route=name) == 3 * block
        assert value(samples, "kvpool_peer_received_bytes_total", peer=pair.to_b) == 2 * block
        facts = pair.b("(dict(pool.peers.list()[0].sent_bytes), pool.peers.list()[0].received_bytes)")
        assert facts[1] == 3 * block
        assert facts[0] == {name: 2 * block}


def test_the_names_are_those_that_prometheus_wants(pool):
    """OpenMetrics is stricter than Prometheus' own format: it refuses counters without _total."""
    registry = CollectorRegistry()
    registry.register(PoolCollector(pool))
    families = list(parse_openmetrics(generate_openmetrics(registry).decode()))
    assert {family.name for family in families} >= {"kvpool_blocks", "kvpool_matches", "kvpool_index_bytes"}
    assert all(family.name.startswith("kvpool_") and family.documentation for family in families)
    assert {family.type for family in families} <= {"gauge", "counter", "histogram"}


def test_a_closed_pool_is_down_and_the_others_are_still_reported(pool):
    gone = small_pool()
    gone.close()
    samples = scraped({"a": pool, "b": gone})
    assert value(samples, "kvpool_up", pool="a") == 1
    assert value(samples, "kvpool_up", pool="b") == 0
    assert [name for name, labels in samples if ("pool", "b") in labels] == ["kvpool_up"]
    assert value(scraped(gone), "kvpool_up") == 0


def test_pools_share_families(pool):
    with small_pool(4, 4) as other:
        samples = scraped({"a": pool, "b": other})
        assert value(samples, "kvpool_capacity_blocks", pool="a", medium="hbm") == 8
        assert value(samples, "kvpool_capacity_blocks", pool="b", medium="hbm") == 4


def test_a_pool_has_its_name_from_the_start():
    with small_pool() as pool, small_pool(name="b") as named:
        (before,) = (dict(labels)["pool"] for name, labels in scraped(pool) if name == "kvpool_up")
        assert before
        assert pool.peers.name is None
        pool.peers.listen(f"unix:@kvpool-name-{os.getpid()}")
        assert pool.peers.name == before
        assert value(scraped(pool), "kvpool_up", pool=before) == 1
        assert value(scraped(named), "kvpool_up", pool="b") == 1
    assert value(scraped(pool), "kvpool_up", pool=before) == 0
    with small_pool() as one, small_pool() as two:
        assert one._own_name != two._own_name


def test_a_pool_has_the_name_by_which_it_is_attached(url):
    with member(url, "a") as (pool, *_):
        assert value(scraped(pool), "kvpool_up", pool="a") == 1


def test_a_registry_takes_no_two_collectors_of_the_same_names(pool):
    registry = CollectorRegistry()
    registry.register(PoolCollector(pool))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(PoolCollector(pool))


def test_peers_and_transfers_are_reported():
    with pair_of("loopback") as pair:
        pool = pair.a
        pair.b("lent = pool.alloc(2)")
        sent = pool.alloc(3)
        pool.transfer(pair.to_b, sent).wait()
        fetched = pool.fetch(pair.to_b, pair.b("lent")).wait()
        cancelled = pool.transfer(pair.to_b, sent, layerwise=True).transfer
        assert cancelled.cancel()
        assert isinstance(cancelled.exception(), kvpool.Cancelled)
        lent = pool.alloc(1, instance=pair.to_b)
        samples = scraped(pool)
        assert value(samples, "kvpool_peers") == 1
        assert value(samples, "kvpool_peer_borrowed_blocks", peer=pair.to_b) == len(lent)
        assert value(samples, "kvpool_peer_transfers_under_way", peer=pair.to_b) == 0
        assert value(samples, "kvpool_peer_route", peer=pair.to_b, route="loopback") == 1
        assert value(samples, "kvpool_peer_route_failures", peer=pair.to_b, route="loopback") == 0
        routes = [number for (name, _), number in samples.items() if name == "kvpool_peer_route"]
        assert sum(routes) == 1
        assert len(routes) == len(set(pool.peers.list()[0].routes))
        assert value(samples, "kvpool_transfers_total", kind="send", outcome="ok") == 1
        assert value(samples, "kvpool_transfers_total", kind="send", outcome="Cancelled") == 1
        assert value(samples, "kvpool_transfers_total", kind="fetch", outcome="ok") == 1
        block_bytes = pool.kv_layout.block_bytes
        assert value(samples, "kvpool_transfer_bytes_total", kind="send") == 3 * block_bytes
        assert value(samples, "kvpool_transfer_bytes_total", kind="fetch") == len(fetched.addrs) * block_bytes
        assert value(samples, "kvpool_transfer_seconds_count", kind="send") == 1
        assert value(samples, "kvpool_transfer_seconds_bucket", kind="send", le="+Inf") == 1
        assert value(samples, "kvpool_transfer_seconds_sum", kind="send") > 0
        pool.free(lent)
        (totals, _) = pool.peers.totals().values()
        assert [bound for bound, _ in totals.durations] == sorted(bound for bound, _ in totals.durations)


def test_a_member_reports_the_other_members_and_its_lease(url):
    with member(url, "a", role="prefill") as (a, *_), member(url, "b", role="decode") as (b, *_):
        eventually(lambda: len(a._attachment._members.names()) == 1)
        b._attachment._registration.publish(state="draining")
        eventually(lambda: a._attachment._membership()["events"]["changed"] > 0)
        samples = scraped(a)
        roles = {
            (dict(labels)["role"], dict(labels)["state"]): number
            for (name, labels), number in samples.items()
            if name == "kvpool_members"
        }
        assert len(roles) == 6
        assert {who for who, number in roles.items() if number} == {("prefill", "up"), ("decode", "draining")}
        assert value(samples, "kvpool_member_events_total", kind="joined") == 2
        assert value(samples, "kvpool_member_events_total", kind="lost") == 0
        assert value(samples, "kvpool_lease_valid") == 1
        assert value(samples, "kvpool_leases_lost_total") == 0
        assert value(samples, "kvpool_lease_renewals_failed_total") == 0
        b.close()
        eventually(lambda: value(scraped(a), "kvpool_member_events_total", kind="left") == 1)
        assert value(scraped(a), "kvpool_members", role="decode", state="draining") == 0
        a._attachment.close()
        assert value(scraped(a), "kvpool_lease_valid") == 0


def test_a_pool_outside_a_cluster_reports_none(pool):
    assert not [name for name, _ in scraped(pool) if "member" in name or "lease" in name]


def test_series_of_peers_have_a_bound():
    with pair_of("loopback") as pair:
        lent = pair.a.alloc(2, instance=pair.to_b)
        samples = scraped(pair.a, peers_max=0)
        peers = {dict(labels).get("peer") for name, labels in samples} - {None}
        assert peers == {"(others)"}
        assert value(samples, "kvpool_peer_borrowed_blocks", peer="(others)") == len(lent)
        pair.a.free(lent)


def test_a_server_answers_on_loopback_until_it_is_closed(pool):
    threads = threading.active_count()
    with serve_metrics(pool) as server:
        assert server.address == f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(server.address, timeout=30) as answer:
            text = answer.read().decode()
        assert value(parsed(text), "kvpool_up") == 1
        assert not any(name.startswith(("python_", "process_")) for name, _ in parsed(text))
    server.close()
    assert threading.active_count() == threads
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.address, timeout=30)
    assert not pool.closed


def test_scrapes_while_the_pool_closes_all_work():
    pool = small_pool()
    store(pool, prompt(2))
    with serve_metrics(pool) as server:
        seen = []

        def scrape():
            while not seen or seen[-1]:
                with urllib.request.urlopen(server.address, timeout=30) as answer:
                    seen.append(value(parsed(answer.read().decode()), "kvpool_up"))

        thread = threading.Thread(target=scrape)
        thread.start()
        pool.close()
        thread.join(60)
        assert not thread.is_alive()
        assert seen[-1] == 0


def test_wrong_arguments_of_a_server_are_refused(pool):
    with serve_metrics(pool) as server:
        with refused(pool, kvpool.StateError, str(server.port), "in use"):
            serve_metrics(pool, port=server.port)
    with refused(pool, kvpool.ArgumentError, "65536"):
        serve_metrics(pool, port=65536)
    with refused(pool, kvpool.ArgumentError, "203.0.113.1"):
        serve_metrics(pool, "203.0.113.1")
    with refused(pool, kvpool.ArgumentTypeError, "str"):
        serve_metrics("pool")
    with refused(pool, kvpool.ArgumentError, "-1"):
        PoolCollector(pool, peers_max=-1)
