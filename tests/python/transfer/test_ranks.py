"""Logical instances of several ranks: the other side's ranks get every byte of a block once."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transfer.kit import eventually, route_or_skip
from transfer.ranks_kit import LAYOUT, Instance, contents, instances_of, label, left, same

import kvpool
from kvpool import DRAM, HBM, KVLayout, ParallelConfig

TP2 = ParallelConfig(tp=2)
TP4 = ParallelConfig(tp=4)
GRID = ParallelConfig(tp=2, pp=2)
PAIRS = [
    (None, TP2),
    (TP2, None),
    (TP2, TP4),
    (TP4, GRID),
    (ParallelConfig(tp=1, pp=4), ParallelConfig(tp=8)),
    (ParallelConfig(tp=8), ParallelConfig(tp=1, pp=2)),
    (TP2, TP2),
    (ParallelConfig(pp=3, stage_layers=(4, 0, 2)), TP2),
]
# Each pair has one side that is a pool, or none has.
SHAPES = [(TP2, GRID), (None, GRID), (GRID, None)]


@pytest.fixture
def instances() -> Iterator[Any]:
    with instances_of() as make:
        yield make


def pair_of(instances: Any, pair: Any, **options: Any) -> tuple[Instance, Instance]:
    a, b = instances("a", pair[0], **options), instances("b", pair[1], **options)
    assert a.pool.peers.connect(b.address) == "b"
    return a, b


def send(source: Instance, target: Instance, blocks: int, seed: int = 0, **options: Any) -> None:
    """Sends, checks the items that arrive, and frees all of it."""
    addrs, kv = source.filled(blocks, seed)
    handle = source.pool.transfer(target.name, addrs, private=b"x", **options)
    handle.wait(60)
    with target.pool.inbox.receive(timeout=60) as item:
        assert (item.peer, item.private) == (source.name, b"x")
        assert same(target.read(item.addrs), kv)
        target.pool.free(item.take())
    source.pool.free(addrs)


@pytest.mark.parametrize("pair", PAIRS, ids=label)
def test_blocks_arrive_whole_no_matter_which_side_connects(instances: Any, pair: Any) -> None:
    a, b = pair_of(instances, pair)
    send(a, b, 5)
    send(b, a, 5)
    assert left(a.pool, b.pool) == []


@pytest.mark.parametrize("pair", [(TP2, TP4), (None, GRID), (GRID, TP2)], ids=label)
def test_heads_that_come_after_tokens_are_cut_right(instances: Any, pair: Any) -> None:
    a, b = pair_of(instances, pair, layout=replace(LAYOUT, dims="NHD"))
    send(a, b, 5)
    send(b, a, 5)
    assert left(a.pool, b.pool) == []


@pytest.mark.parametrize("pair", [(TP2, TP4), (None, GRID), (GRID, TP2)], ids=label)
@pytest.mark.parametrize("dims", ["HND", "NHD"])
def test_pages_of_k_beside_v_are_cut_right(instances: Any, pair: Any, dims: Any) -> None:
    a, b = pair_of(instances, pair, layout=replace(LAYOUT, dims=dims, pages="fused"))
    send(a, b, 5)
    send(b, a, 5, strategy="by_layer")
    assert left(a.pool, b.pool) == []


# Blocks of the same size, which hold other things.
OTHERS = {"NHD": {"dims": "NHD"}, "fused": {"pages": "fused"}, "bfloat16": {"dtype": "bfloat16"}}


@pytest.mark.parametrize("pair", [(TP2, None), (None, TP2), (TP2, TP4)], ids=label)
@pytest.mark.parametrize("said", OTHERS)
def test_instances_whose_blocks_hold_other_contents_do_not_connect(instances: Any, pair: Any, said: str) -> None:
    a, b = instances("a", pair[0]), instances("b", pair[1], layout=replace(LAYOUT, **OTHERS[said]))
    for caller, other in ((a, b), (b, a)):
        with pytest.raises(kvpool.LayoutMismatch, match="6 layers of 4 KV heads x 8") as caught:
            caller.pool.peers.connect(other.address)
        assert said in str(caught.value)
        assert "float16, HND, K and V split" in str(caught.value)
    assert a.pool.peers.list() == b.pool.peers.list() == []


@pytest.mark.parametrize("pair", SHAPES, ids=label)
@pytest.mark.parametrize("route", ["loopback", "sock-unix", "sock-tcp"])
def test_every_route_between_ranks_carries_the_same(instances: Any, pair: Any, route: str) -> None:
    route_or_skip(route)
    far = route == "sock-tcp"
    options: dict[str, Any] = {"routes": (route.partition("-")[0],), "prefer_unix_socket": not far}
    if far:
        options["listen"] = "tcp:127.0.0.1:0"
    a, b = pair_of(instances, pair, **options)
    for seed in range(3):
        send(a, b, 4, seed, medium=(HBM, DRAM, kvpool.MIXED)[seed])
        send(b, a, 4, seed)
    assert left(a.pool, b.pool) == []


@pytest.mark.parametrize("pair", SHAPES, ids=label)
def test_blocks_that_were_swapped_are_moved_in_every_rank(instances: Any, pair: Any) -> None:
    a, b = pair_of(instances, pair)
    addrs, kv = a.filled(4)
    tokens = np.arange(16, dtype=np.int32)
    a.pool.insert(tokens, addrs).close()
    a.write(a.pool.alloc(1), contents(1))  # something else is there, too
    low = a.pool.swap_out(4)
    assert all(kvpool.decode_address(int(addr)).medium == DRAM for addr in low)
    assert same(a.read(low), kv)
    a.write(addrs, np.zeros_like(kv))  # the old content must not be sent
    with a.pool.match(tokens) as hit:
        a.pool.transfer_with_insert("b", tokens, hit.addrs).wait(60)
        with a.pool.swap_in(hit.addrs) as high:
            assert same(a.read(high.addrs), kv)
    with b.pool.match(tokens) as hit:
        assert hit.tokens == 16
        assert same(b.read(hit.addrs), kv)
    assert left(a.pool, b.pool) == []


@pytest.mark.parametrize("pair", SHAPES, ids=label)
def test_lent_blocks_are_written_and_fetched(instances: Any, pair: Any) -> None:
    a, b = pair_of(instances, pair)
    addrs, kv = a.filled(3)
    lent = a.pool.alloc(3, instance="b")
    a.pool.transfer("b", addrs, to=lent).wait(60)
    assert same(b.read(lent), kv)
    other = contents(3, seed=9)
    b.write(lent, other)
    fetched = a.pool.fetch("b", lent).wait(60).addrs
    assert same(a.read(fetched), other)
    low = a.pool.fetch("b", lent, medium=DRAM).wait(60).addrs
    assert same(a.read(low), other)
    with pytest.raises(kvpool.NotOwner):
        a.pool.transfer("b", addrs[:1], to=b.pool.alloc(1)).wait(60)
    a.pool.free(lent)
    assert left(a.pool, b.pool) == []


@pytest.mark.parametrize("pair", SHAPES, ids=label)
def test_layers_are_sent_as_they_are_computed(instances: Any, pair: Any) -> None:
    a, b = pair_of(instances, pair)
    addrs = a.pool.alloc(4)
    kv = contents(4)
    with a.pool.transfer("b", addrs, private=b"layers", layerwise=True) as stream:
        for layer in (3, 0, 1, 5, 4, 2):
            computed = a.read(addrs)
            computed[:, layer] = kv[:, layer]
            a.write(addrs, computed)
            stream.send_layer(layer)
    stream.transfer.wait(60)
    assert stream.transfer.progress == (stream.transfer.progress[1],) * 2
    with b.pool.inbox.receive(60) as item:
        assert same(b.read(item.addrs), kv)
    assert left(a.pool, b.pool) == []


def test_many_at_once_in_both_directions(instances: Any) -> None:
    a, b = pair_of(instances, (TP4, GRID), blocks=64)
    wrong: list[str] = []

    def work(source: Instance, target: Instance, number: int) -> None:
        try:
            for turn in range(10):
                addrs, kv = source.filled(2, number * 100 + turn)
                lent = source.pool.alloc(2, instance=target.name)
                source.pool.transfer(target.name, addrs, to=lent).wait(60)
                if not same(target.read(lent), kv):
                    wrong.append(f"{source.name} {number} {turn}")
                source.pool.free(lent)
                source.pool.free(addrs)
        except Exception as error:
            wrong.append(repr(error))

    threads = [
        threading.Thread(target=work, args=(*sides, number)) for number in range(4) for sides in ((a, b), (b, a))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert left(a.pool, b.pool) == []


BIG = KVLayout(layers=4, kv_heads=4, head_dim=64, dtype="float16", block_tokens=256)  # a block of 1 MiB


@pytest.mark.parametrize("pair", SHAPES, ids=label)
@pytest.mark.parametrize("route", ["loopback", "sock"])
def test_a_transfer_is_cancelled_at_any_moment(instances: Any, pair: Any, route: str) -> None:
    a, b = pair_of(instances, pair, layout=BIG, blocks=24, dram=0, routes=(route,))
    addrs, kv = a.filled(12)
    for turn in range(12):
        if not a.pool.peers.list():  # a frame that was cut short ends the link, as between two pools
            reconnect(a, b)
        try:
            handle = a.pool.transfer("b", addrs, private=b"%d" % turn)
            time.sleep(0.0004 * turn)
            handle.cancel()
            handle.wait(60)
            with b.pool.inbox.receive(60) as item:
                assert same(b.read(item.addrs), kv)
        except (
            kvpool.Cancelled,
            kvpool.OutOfBlocks,
            kvpool.PeerLost,
        ):  # OutOfBlocks: blocks of cancelled ones come back later
            dropped(b.pool)  # it may have come all the same
    assert left(a.pool, b.pool) == []
    eventually(lambda: dropped(b.pool))
    if not a.pool.peers.list():
        reconnect(a, b)
    send(a, b, 2)


@pytest.mark.parametrize("pair", SHAPES, ids=label)
def test_a_deadline_ends_a_transfer_and_leaves_nothing(instances: Any, pair: Any) -> None:
    a, b = pair_of(instances, pair, layout=BIG, blocks=24, dram=0)
    addrs, _ = a.filled(12)
    stream = a.pool.transfer("b", addrs, timeout=0.2, layerwise=True)
    with pytest.raises(kvpool.DeadlineExceeded):
        stream.send_layer(0)  # if it comes in time
        stream.transfer.wait(60)
    for timeout in (0.0005, 0.001, 0.002):
        with contextlib.suppress(kvpool.DeadlineExceeded):
            a.pool.transfer("b", addrs, timeout=timeout).wait(60)
        assert left(a.pool, b.pool) == []  # or there is no room for the next one
        eventually(lambda: dropped(b.pool))  # also items that arrived although the sender had stopped waiting
    send(a, b, 2)


@pytest.mark.parametrize("pair", [*SHAPES, (TP2, TP2)], ids=label)
def test_instances_disconnect_and_reconnect(instances: Any, pair: Any) -> None:
    a, b = instances("a", pair[0]), instances("b", pair[1])
    for turn in range(4):
        one, other = ((a, b), (b, a))[turn % 2]
        reconnect(one, other)
        lent = one.pool.alloc(2, instance=other.name)
        send(one, other, 2, turn)
        send(other, one, 2, turn)
        assert len(lent) == 2
        one.pool.peers.disconnect(other.name)
        assert left(a.pool, b.pool) == []


def dropped(pool: kvpool.Pool) -> bool:
    """Closes the items that have come. The sender is confirmed first: items may still be on their way."""
    while item := pool.inbox.receive(0):
        item.close()
    return pool.stats().hbm.active == 0


def reconnect(one: Instance, other: Instance) -> None:
    """The other side may not have noticed yet that it was left."""
    until = time.monotonic() + 60
    while True:
        try:
            one.pool.peers.connect(other.address)
            return
        except (kvpool.StateError, kvpool.Busy, kvpool.PeerLost, kvpool.DeadlineExceeded):
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def test_both_connect_at_the_same_time(instances: Any) -> None:
    for turn in range(6):
        a, b = instances(f"a{turn}", TP2, blocks=4, dram=0), instances(f"b{turn}", GRID, blocks=4, dram=0)
        failures: list[Exception] = []

        def call(one: Instance, other: Instance, failures: list[Exception] = failures) -> None:
            try:
                one.pool.peers.connect(other.address)
            except (kvpool.StateError, kvpool.PeerLost) as error:
                failures.append(error)

        threads = [threading.Thread(target=call, args=sides) for sides in ((a, b), (b, a))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(failures) < 2, failures
        send(a, b, 2)
        send(b, a, 2)
        assert left(a.pool, b.pool) == []


def test_one_instance_connects_to_several(instances: Any) -> None:
    a = instances("a", GRID, blocks=32)
    others = [instances(f"b{i}", parallel) for i, parallel in enumerate((None, TP2, TP4, GRID))]
    for other in others:
        other.pool.peers.connect(a.address)
    for other in others:
        send(a, other, 3)
        send(other, a, 3)
    others[1].close()
    send(a, others[2], 3)
    assert left(a.pool, others[0].pool, others[2].pool) == []
