"""Live migration between pools of one process, with an engine whose tokens show every wrong byte."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import numpy as np
import pytest
from control.migration_kit import BLOCK, LENGTH, Place, check, eventually, prompt_of
from prometheus_client import CollectorRegistry

import kvpool
from kvpool.control.migration.mailbox import NAMESPACE
from kvpool.observe.migration_metrics import MigrationCollector
from kvpool.policy import migration as policy


@pytest.mark.parametrize("by", ["kv", "tokens", "auto"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_tokens_are_those_of_a_run_without_migration(places, reader, by, steps):
    a, b = places
    prompt = prompt_of(1)
    a.engine.begin("r", prompt, LENGTH)
    for _ in range(steps):
        a.engine.step("r")
    result = a.migrations.migrate("r", "b", by=by).wait()
    assert result.way == ("tokens" if by == "tokens" else "kv")
    assert result.tokens == len(prompt) + steps
    assert result.blocks_sent == (0 if by == "tokens" else -(-(result.tokens - 1) // BLOCK))
    check(reader, b.engine, "r", prompt)
    eventually(lambda: not b.migrations.arriving())
    for each in places:
        each.check_empty()


@pytest.mark.parametrize("by", ["kv", "tokens"])
def test_a_request_goes_on_decoding_while_its_blocks_move(places, reader, by):
    a, b = places
    prompt = prompt_of(2, 40)
    a.engine.begin("r", prompt, 200)
    a.engine.run(0.05)  # it must not be at the end before it moves
    b.engine.run(0.0005)
    moving = a.migrations.migrate("r", "b", by=by)
    result = moving.wait()
    assert moving.state == "there"
    assert "r" not in a.engine.requests
    eventually(lambda: len(reader.tokens.get("r", ())) == 160)
    for each in places:
        each.engine.end()
    assert {engine for (_, term), engine in reader.by.items() if term == policy.Term(1, a.pool._incarnation())} == {"b"}
    check(reader, b.engine, "r", prompt, 200)
    assert result.stop_s < result.total_s


def test_a_request_goes_there_and_back_and_its_term_grows(places, reader):
    a, b = places
    prompt = prompt_of(3)
    a.engine.begin("r", prompt, LENGTH)
    for number, (here, there) in enumerate([(a, b), (b, a), (a, b)], 1):
        for _ in range(5):
            here.engine.step("r")
        eventually(lambda here=here: not here.migrations.arriving())
        here.migrations.migrate("r", there.name).wait()
        assert there.engine.requests["r"].term.number == number
    check(reader, b.engine, "r", prompt)
    eventually(lambda: not b.migrations.arriving())
    for each in places:
        each.check_empty()


@pytest.mark.parametrize("by", ["kv", "tokens"])
def test_what_the_destination_has_cached_is_neither_sent_nor_computed(places, reader, by):
    a, b = places
    prompt = prompt_of(4, 22)
    own = b.pool.alloc(4)
    b.engine._write(own, 0, [int(token) for token in prompt[:16]])
    b.pool.insert(prompt[:16], own).close()
    a.engine.begin("r", prompt, LENGTH)
    result = a.migrations.migrate("r", "b", by=by).wait()
    assert result.blocks_cached == 4
    if by == "kv":
        assert result.blocks_sent == 2
        assert result.bytes == 2 * a.pool.kv_layout.block_bytes
    else:
        assert next(begin for begin, _ in b.engine.prefilled) == 16
    assert b.pool.stats().hbm.pinned == 5  # it cannot be evicted under the request
    check(reader, b.engine, "r", prompt)
    eventually(lambda: not b.migrations.arriving())
    assert b.pool.audit().hbm.historical == 5  # the cached prefix is as it was


def test_a_prefix_that_others_share_stays_with_them(places, reader):
    a, _ = places
    prompt = prompt_of(5, 20)
    own = a.pool.alloc(4)
    a.engine._write(own, 0, [int(token) for token in prompt[:16]])
    a.pool.insert(prompt[:16], own).close()
    for name in ("r", "s"):
        a.engine.begin(name, prompt, LENGTH)
    a.migrations.migrate("r", "b").wait()
    check(reader, a.engine, "s", prompt)
    with a.pool.match(prompt) as hit:
        assert hit.tokens == 16


def test_an_engine_that_does_not_admit_it_refuses(places, reader):
    a, b = places
    b.engine.admits = False
    prompt = prompt_of(9)
    a.engine.begin("r", prompt, LENGTH)
    with pytest.raises(kvpool.StateError, match="does not admit"):
        a.migrations.migrate("r", "b").wait()
    check(reader, a.engine, "r", prompt)


def test_a_request_that_cannot_go_is_refused_at_once(places):
    a, b = places
    with pytest.raises(kvpool.StateError, match="does not have request 'r'"):
        a.migrations.migrate("r", "b")
    with pytest.raises(kvpool.ArgumentError, match="by is 'air'"):
        a.migrations.migrate("r", "b", by="air")
    with pytest.raises(kvpool.ArgumentError, match="timeout"):
        a.migrations.migrate("r", "b", timeout=0)
    with pytest.raises(kvpool.PeerLost):
        a.migrations.migrate("r", "nobody")
    long = "x" * 1025  # is read by nobody
    a.engine.begin(long, prompt_of(15), LENGTH)
    with pytest.raises(kvpool.ArgumentError, match="name of a request has 1025"):
        a.migrations.migrate(long, "b")
    a.engine.finish(long)
    a.engine.begin("r", prompt_of(15), LENGTH)
    go = threading.Event()
    b.engine.before["admit"] = lambda _: go.wait(20)
    first = a.migrations.migrate("r", "b")
    with pytest.raises(kvpool.StateError, match="on its way already"):
        a.migrations.migrate("r", "b")
    assert a.migrations.under_way() == (first,)
    go.set()
    first.wait()
    a.migrations.close()
    with pytest.raises(kvpool.ClosedError):
        a.migrations.migrate("r", "b")
    b.engine.finish("r")


def test_a_state_that_fits_into_no_message_keeps_the_request_here(places, reader):
    a, _ = places
    prompt = prompt_of(16)
    a.engine.begin("r", prompt, LENGTH)
    stop = a.engine.stop
    a.engine.stop = lambda name: dataclasses.replace(stop(name), state=bytes(1 << 20))
    moving = a.migrations.migrate("r", "b")
    with pytest.raises(kvpool.ArgumentError, match="1048576 are allowed"):
        moving.wait()
    assert moving.state == "here"
    check(reader, a.engine, "r", prompt)


def test_the_budget_of_rounds_is_kept(reader):
    bytes_of_block = 4 * BLOCK * 2 * 2 * 2 * 4
    places = [Place("a", reader), Place("b", reader, bytes_per_s=40 * bytes_of_block)]
    try:
        a, b = places
        a.pool.peers.connect(b.address)
        prompt = prompt_of(17, 41)
        a.engine.begin("r", prompt, LENGTH)
        result = a.migrations.migrate("r", "b").wait()
        assert result.blocks_sent == 10
        assert result.total_s > 0.15  # 10 blocks at 40 a second, the first at once
        check(reader, b.engine, "r", prompt)
    finally:
        for each in places:
            each.close()


def test_a_coroutine_can_wait(places, reader):
    a, b = places
    prompt = prompt_of(18)
    a.engine.begin("r", prompt, LENGTH)

    async def move():
        return await a.migrations.migrate("r", "b")

    assert asyncio.run(move()).way == "kv"
    check(reader, b.engine, "r", prompt)


def test_items_that_are_no_messages_reach_the_application(reader):
    got = []
    places = [Place("a", reader), Place("b", reader, on_received=lambda item: got.append(item.private))]
    try:
        a, b = places
        a.pool.peers.connect(b.address)
        addrs = a.pool.alloc(1)
        a.pool.transfer("b", addrs, private=b"hello").wait()
        eventually(lambda: got == [b"hello"])
        a.pool.transfer_with_insert("b", np.arange(1, BLOCK + 1), addrs, namespace=NAMESPACE, private=b"?").wait()
        a.pool.free(addrs)
        a.engine.begin("r", prompt_of(19), LENGTH)
        a.migrations.migrate("r", "b").wait()
        assert got == [b"hello"]
    finally:
        for each in places:
            each.close()


def test_totals_count_what_became_of_migrations(places):
    a, b = places
    a.engine.begin("r", prompt_of(21), LENGTH)
    b.engine.admits = False
    assert isinstance(a.migrations.migrate("r", "b").exception(), kvpool.StateError)
    b.engine.admits = True
    result = a.migrations.migrate("r", "b", by="kv").wait()
    totals = a.migrations.totals()
    assert sorted(totals.left.items()) == [(("kv", "StateError"), 1), (("kv", "ok"), 1)]
    assert totals.bytes == result.bytes
    assert totals.stop_seconds == result.stop_s
    assert sum(count for _, count in totals.stops) == 1
    eventually(lambda: b.migrations.totals().arrived.get(("kv", "ok")) == 1)
    registry = CollectorRegistry()
    registry.register(MigrationCollector({"a": a.migrations, "b": b.migrations}))

    def value(name, **labels):
        return registry.get_sample_value(name, labels)

    assert value("kvpool_migrations_total", pool="a", direction="out", way="kv", result="ok") == 1
    assert value("kvpool_migrations_total", pool="a", direction="out", way="kv", result="StateError") == 1
    assert value("kvpool_migrations_total", pool="b", direction="in", way="kv", result="ok") == 1
    assert value("kvpool_migration_bytes_total", pool="a") == result.bytes
    assert value("kvpool_migration_stop_seconds_count", pool="a") == 1
    assert value("kvpool_migration_stop_seconds_sum", pool="a") == result.stop_s
    assert value("kvpool_migrations_under_way", pool="b", direction="in") == 0
    b.engine.finish("r")


def test_rounds_end_when_the_source_is_faster_than_the_link(places, reader):
    """Each round leaves a block more: one stop after a few of them, however long that goes on."""
    a, b = places
    prompt = prompt_of(22)
    a.migrations._rules = policy.StopRules(rounds_max=3)
    a.engine.begin("r", prompt, LENGTH)
    a.engine.before["progress"] = lambda name: [a.engine.step(name) for _ in range(5)]
    result = a.migrations.migrate("r", "b").wait()
    assert 1 < result.rounds <= 4
    check(reader, b.engine, "r", prompt)
