"""Logical instances: the errors of newcomers, and what is left when a rank or its scheduler closes at any moment."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kit import run_script
from transfer.ranks_kit import LAYOUT, SETTINGS, Instance, grown, instances_of, left, same, things

import kvpool
from kvpool import KVLayout, ParallelConfig, RankArena

TP2 = ParallelConfig(tp=2)
GRID = ParallelConfig(tp=2, pp=2)
BIG = KVLayout(layers=4, kv_heads=4, head_dim=64, dtype="float16", block_tokens=256)  # a block of 1 MiB


@pytest.fixture
def instances() -> Iterator[Any]:
    with instances_of() as make:
        yield make


@pytest.fixture
def scheduler() -> Iterator[kvpool.Pool]:
    pool = kvpool.Pool(LAYOUT, hbm_blocks=4, dram_blocks=2, parallel=TP2, name="sched", audit=True, **SETTINGS)
    yield pool
    pool.close()


def join(ticket: str, **settings: Any) -> RankArena:
    return RankArena.join(ticket, **SETTINGS | settings)


# ---- the errors of newcomers


def test_an_instance_without_its_ranks_says_so(scheduler: kvpool.Pool) -> None:
    other = kvpool.Pool(LAYOUT, 4, **SETTINGS)
    where = other.peers.listen(f"unix:@kvpool-ranks-early-{os.getpid()}")
    ticket = scheduler.ranks.export(0)
    with join(ticket):
        with pytest.raises(kvpool.Busy, match="1 of 2 ranks of this instance have joined"):
            scheduler.peers.connect(where, timeout=0.3)  # it asks again until then: ranks may be on their way
        with pytest.raises((kvpool.Busy, kvpool.DeadlineExceeded)):  # whichever comes first at the end of its time
            other.peers.connect(scheduler.peers.listen(f"unix:@kvpool-ranks-early-2-{os.getpid()}"), timeout=0.3)
        with pytest.raises(kvpool.DeadlineExceeded, match=r"ranks \[1\] have not joined"):
            scheduler.ranks.wait(0.05)
        assert [rank.joined for rank in scheduler.ranks.list()] == [True, False]
    other.close()


def test_a_different_secret_is_refused(scheduler: kvpool.Pool) -> None:
    before = things()
    with pytest.raises(kvpool.AuthError):
        join(scheduler.ranks.export(0), secret="another")
    assert [rank.joined for rank in scheduler.ranks.list()] == [False, False]
    join(scheduler.ranks.export(0)).close()
    assert grown(before | {"threads": 40, "descriptors": before["descriptors"] + 4}) == {}


def test_a_rank_joins_once(scheduler: kvpool.Pool) -> None:
    ticket = scheduler.ranks.export(1)
    with join(ticket) as rank:
        with pytest.raises(kvpool.StateError, match="rank 1 has joined already"):
            join(ticket)
        assert rank.lost is None
        assert [one.joined for one in scheduler.ranks.list()] == [False, True]
        scheduler.alloc(1)


@pytest.mark.parametrize("parallel", [None, TP2])
def test_a_ticket_of_a_dead_scheduler_has_its_own_error(parallel: Any) -> None:
    where = f"unix:@kvpool-ranks-dead-{parallel is None}-{os.getpid()}"
    first = kvpool.Pool(LAYOUT, 4, parallel=TP2, **SETTINGS)
    ticket = first.ranks.export(0, address=first.peers.listen(where))
    first.close()
    with pytest.raises(kvpool.PeerLost):
        join(ticket)
    second = kvpool.Pool(LAYOUT, 4, parallel=parallel, **SETTINGS)
    second.peers.listen(where)
    with pytest.raises(kvpool.PeerLost, match="gone"):
        join(ticket)
    second.close()


def test_a_ticket_that_was_changed_is_refused(scheduler: kvpool.Pool) -> None:
    ticket = scheduler.ranks.export(0)
    for change in ({"hbm_blocks": 3}, {"dram_blocks": 0}, {"layout": json.loads(ticket)["layout"] | {"head_dim": 16}}):
        with pytest.raises(kvpool.LayoutMismatch):
            join(json.dumps(json.loads(ticket) | change))
    for change in ({"dtype": "bfloat16"}, {"dims": "NHD"}, {"pages": "fused"}):  # parts of the same size
        with pytest.raises(kvpool.LayoutMismatch, match="its part of this instance's blocks has") as caught:
            join(json.dumps(json.loads(ticket) | {"layout": json.loads(ticket)["layout"] | change}))
        assert "6 layers of 2 KV heads x 8 (float16, HND, K and V split)" in str(caught.value)
        assert next(iter(change.values())) in str(caught.value)
    for text in (
        "",
        "{}",
        "[]",
        "null",
        '{"kvpool_rank": 1}',
        ticket.replace('"incarnation":', '"incarnation":"x","e":'),
    ):
        with pytest.raises(kvpool.ArgumentError):
            join(text)
    with pytest.raises(kvpool.ArgumentError, match=r"the text that Ranks\.export returned, not 'foo'$"):
        join("foo")
    with pytest.raises(kvpool.ArgumentError, match=r"the text that Ranks\.export returned, not 'x{40}'\.\.\.$"):
        join("x" * 1000)
    with pytest.raises(kvpool.ArgumentError, match="format 2"):
        join(json.dumps(json.loads(ticket) | {"kvpool_rank": 2}))
    with pytest.raises(kvpool.ArgumentTypeError):
        join(7)  # type: ignore[arg-type]
    assert not any(rank.joined for rank in scheduler.ranks.list())


def test_a_pool_without_ranks_says_so() -> None:
    one = kvpool.Pool(LAYOUT, 4, **SETTINGS)
    one.peers.listen(f"unix:@kvpool-ranks-none-{os.getpid()}")
    for call in (one.ranks.list, one.ranks.wait, lambda: one.ranks.export(0)):
        with pytest.raises(kvpool.StateError):
            call()
    one.close()
    several = kvpool.Pool(LAYOUT, 4, parallel=ParallelConfig(pp=3, stage_layers=(6, 0, 0)), **SETTINGS)
    for call in (several.ranks.list, several.ranks.wait, lambda: several.ranks.export(0, address="unix:@nobody")):
        with pytest.raises(kvpool.StateError):
            call()
    several.ranks.export(0)
    for rank in (-1, 1, 3, 99):
        with pytest.raises(kvpool.ArgumentError):
            several.ranks.export(rank)
    for wrong in ("0", 0.0, None, True):
        with pytest.raises(kvpool.ArgumentTypeError, match="rank must be an int"):
            several.ranks.export(wrong)  # type: ignore[arg-type]
    with pytest.raises(kvpool.ArgumentTypeError):
        several.ranks.export(0, address=7)  # type: ignore[arg-type]
    with pytest.raises(kvpool.ArgumentError):
        several.ranks.export(0, address="somewhere")
    assert [rank.rank for rank in several.ranks.list()] == [0]
    with pytest.raises(kvpool.StateError):
        several.tensor()
    several.close()


def test_other_shapes_and_raw_bytes_are_refused(instances: Any) -> None:
    a = instances("a", TP2)
    for layout in (
        KVLayout(layers=6, kv_heads=4, head_dim=16, dtype="float16", block_tokens=4),
        KVLayout(layers=5, kv_heads=4, head_dim=8, dtype="float16", block_tokens=4),
        KVLayout(layers=6, kv_heads=4, head_dim=8, dtype="float16", block_tokens=8),
        KVLayout(layers=6, kv_heads=8, head_dim=4, dtype="float16", block_tokens=4),
        KVLayout(layers=6, kv_heads=4, head_dim=8, dtype="bfloat16", block_tokens=4),
        kvpool.RawLayout(LAYOUT.block_bytes, 4),
    ):
        other = kvpool.Pool(layout, 4, **SETTINGS)
        with pytest.raises(kvpool.LayoutMismatch):
            other.peers.connect(a.address)
        with pytest.raises(kvpool.LayoutMismatch):
            a.pool.peers.connect(other.peers.listen(f"unix:@kvpool-ranks-shape-{os.getpid()}"))
        other.close()
    assert a.pool.peers.list() == []
    with pytest.raises(kvpool.ArgumentError):
        kvpool.Pool(kvpool.RawLayout(4096), 4, parallel=TP2, **SETTINGS)


def test_the_address_of_a_rank_is_not_that_of_its_instance(instances: Any) -> None:
    a, b = instances("a", TP2), instances("b", None)
    for pool in (b.pool, instances("c", GRID).pool):
        before = things() | {"threads": 200}  # they start when there is work
        for rank in a.ranks:
            with pytest.raises(kvpool.Error, match="scheduler"):
                pool.peers.connect(rank.address)
        assert pool.peers.list() == []
        assert grown(before) == {}
    a.pool.peers.connect(b.address)


def test_a_checksum_of_the_whole_block_is_refused(instances: Any) -> None:
    a, b = instances("a", TP2), instances("b", None)
    a.pool.peers.connect(b.address)
    for one, other in ((a, b), (b, a)):
        addrs = one.pool.alloc(1)
        with pytest.raises(kvpool.Unsupported):
            one.pool.transfer(other.name, addrs, checksum=True)
        with pytest.raises(kvpool.Unsupported):
            one.pool.transfer(other.name, addrs, route="shm")
        one.pool.free(addrs)
    assert left(a.pool, b.pool) == []


def test_ranks_that_share_no_route_with_a_peer_say_so(instances: Any) -> None:
    a, b = instances("a", TP2, routes=("loopback",)), instances("b", TP2, routes=("sock",))
    with pytest.raises(kvpool.Unsupported, match=r"rank [01] of b"):
        a.pool.peers.connect(b.address)
    assert left(a.pool, b.pool) == []


# ---- a rank or a scheduler goes


def work(one: Instance, addrs: Any, other: str, over: threading.Event, told: list[BaseException]) -> None:
    """Sends these blocks until the test ends that, or an error does, which goes into `told`."""
    try:
        while not over.is_set():
            with contextlib.suppress(kvpool.OutOfBlocks, kvpool.Busy):
                one.pool.transfer(other, addrs, private=b"x").wait(60)
    except BaseException as error:
        told.append(error)


def take(one: Instance, over: threading.Event) -> None:
    with contextlib.suppress(kvpool.PeerLost, kvpool.ClosedError):
        while not over.is_set():
            if (item := one.pool.inbox.receive(0.02)) is not None:
                item.close()


@pytest.mark.parametrize("route", ["loopback", "sock"])
@pytest.mark.parametrize("who", ["a.ranks[0]", "a.ranks[1]", "a.pool", "b.ranks[0]", "b.ranks[3]", "b.pool"])
def test_closing_any_process_in_mid_transfer_leaves_the_others_whole(instances: Any, who: str, route: str) -> None:
    for turn in range(3):
        names = f"a{turn}", f"b{turn}"
        options: dict[str, Any] = {"layout": BIG, "blocks": 16, "dram": 0, "routes": (route,)}
        a, b = instances(names[0], TP2, **options), instances(names[1], GRID, **options)
        a.pool.peers.connect(b.address)
        survivor = b if who.startswith("a") else a
        third = instances(f"c{turn}", None, **options)
        third.pool.peers.connect(survivor.address)
        over = threading.Event()
        told: list[BaseException] = []

        threads = [threading.Thread(target=take, args=(one, over)) for one in (a, b)]
        # Before any peer sends: items may fill the pool.
        sides = [(one, one.pool.alloc(6), other.name) for one, other in ((a, b), (b, a))]
        threads += [threading.Thread(target=work, args=(*side, over, told)) for side in sides]
        for thread in threads:
            thread.start()
        time.sleep(0.02 + 0.01 * turn)
        eval(who).close()
        for thread in threads[2:]:
            thread.join(60)
            assert not thread.is_alive()
        over.set()
        for thread in threads:
            thread.join(60)
        assert len(told) == 2
        assert all(isinstance(error, (kvpool.PeerLost, kvpool.ClosedError)) for error in told), told
        assert left(survivor.pool) == []
        addrs, kv = third.filled(3)
        third.pool.transfer(survivor.name, addrs, private=b"still").wait(60)
        while (item := survivor.pool.inbox.receive(60)) and item.private != b"still":
            item.close()
        assert same(survivor.read(item.addrs), kv)
        item.close()
        assert left(survivor.pool, third.pool) == []
        for instance in (a, b, third):
            instance.close()


def test_an_instance_that_lost_a_rank_says_why(instances: Any) -> None:
    a, b = instances("a", TP2), instances("b", TP2)
    a.pool.peers.connect(b.address)
    lent = b.pool.alloc(2, instance="a")
    ticket = a.pool.ranks.export(1)
    a.ranks[1].close()
    until = time.monotonic() + 60
    with pytest.raises(kvpool.PeerLost, match="rank 1 of this instance is lost"):
        while time.monotonic() < until:
            a.pool.free(a.pool.alloc(1))
    for call in (lambda: a.pool.match(np.arange(4)), lambda: a.pool.ranks.wait(1)):
        with pytest.raises(kvpool.PeerLost):
            call()
    with pytest.raises(kvpool.PeerLost):
        a.pool.peers.connect(b.address)
    assert a.ranks[0].lost is None
    with pytest.raises(kvpool.StateError, match="rank 1 of this instance is lost"):
        a.join(ticket)
    assert left(b.pool) == []
    assert len(lent) == 2
    a.pool.close()
    assert a.ranks[0].wait_lost(60)
    with pytest.raises(kvpool.PeerLost, match="scheduler"):
        a.ranks[0].check()


def test_everything_may_be_closed_in_any_order_and_twice() -> None:
    before = things()
    for order in range(6):
        pool = kvpool.Pool(LAYOUT, 4, 4, parallel=TP2, **SETTINGS)
        tickets = [pool.ranks.export(rank) for rank in range(2)]
        ranks = [join(ticket) for ticket in tickets[: order % 3]]
        steps = [*ranks, pool] if order < 3 else [pool, *ranks]
        for step in steps + steps:
            step.close()
        for rank in ranks:
            assert rank.tensor is not None
            assert isinstance(rank.lost, kvpool.Error)
            rank.close()
        with pytest.raises(kvpool.Error):
            pool.ranks.wait(0.1)
    del ranks, steps, pool, step, rank
    assert grown(before) == {}


def test_a_rank_that_is_no_longer_referenced_is_closed() -> None:
    before = things()
    pool = kvpool.Pool(LAYOUT, 4, 4, parallel=TP2, **SETTINGS)
    view = join(pool.ranks.export(0)).tensor().numpy()  # nothing refers to the rank
    gc.collect()
    with pytest.raises(kvpool.PeerLost):
        pool.ranks.wait(60)
    view[...] = 1  # the memory lives as long as its views
    pool.close()
    del view, pool
    assert grown(before) == {}


def test_waiting_ends_when_the_pool_is_closed() -> None:
    pool = kvpool.Pool(LAYOUT, 4, 4, parallel=TP2, **SETTINGS)
    pool.ranks.export(0)
    told: list[BaseException] = []

    def wait() -> None:
        try:
            pool.ranks.wait(20)
        except BaseException as error:
            told.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    pool.close()
    thread.join(60)
    assert [type(error) for error in told] == [kvpool.ClosedError]


def test_a_forked_child_leaves_ranks_as_they_are() -> None:
    run = run_script(
        """
import os, sys, threading, warnings
settings = dict(check_memory=False, secret="ranks", lease_s=20.0)
pool = kvpool.Pool(kit.small_layout(), 4, 4, parallel=kvpool.ParallelConfig(tp=2), **settings)
ranks = [kvpool.RankArena.join(pool.ranks.export(i), **settings) for i in range(2)]
pid = os.fork()
if pid == 0:
    code = 1
    try:
        for call in (lambda: ranks[0].address, lambda: ranks[0].wait_lost(0.1), pool.ranks.list, ranks[0].check):
            try:
                call()
            except kvpool.Error as error:
                assert "parent" in str(error), error
            else:
                raise SystemExit(2)
        ranks[1].close()
        del ranks, pool
        import gc
        gc.collect()
        code = 0
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
pid = os.fork()
if pid == 0:
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert ranks[0].lost is None
pool.ranks.wait(60)
pool.close()
"""
    )
    assert run.stdout == ""


def test_nothing_is_left_after_an_instance_has_come_and_gone_many_times(instances: Any) -> None:
    a = instances("a", TP2)
    before: dict[str, int] = {}
    for turn in range(8):
        b = Instance("b", GRID if turn % 2 else None)
        b.pool.peers.connect(a.address)
        addrs, _ = b.filled(2)
        b.pool.transfer("a", addrs, private=b"x").wait(60)
        a.pool.inbox.receive(60).close()
        b.pool.alloc(2, instance="a")
        b.close()
        del b
        assert left(a.pool) == []
        before = before if turn > 1 else things() | {"threads": 40}  # they start when there is work
    assert grown(before) == {}
