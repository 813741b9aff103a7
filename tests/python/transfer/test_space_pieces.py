"""Transfers of blocks that lie in several pieces of a space. Scatter is forced: no two free units lie together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kit import cached_tokens, prompt
from space_kit import comb, layered, layers_of, layout, space_of
from transfer.kit import SECRET, Child, address_of, blocks_at_peers, eventually

import kvpool
from kvpool import DRAM, HBM

LAYERS = 4
ROUTES = ["loopback", "sock"]
SIDES = [("cut", "cut"), ("cut", "whole"), ("whole", "cut")]
SETTINGS = {"secret": SECRET, "lease_s": 60.0}


@contextlib.contextmanager
def pool_of(side: str, **settings: Any) -> Iterator[Any]:
    """A pool for 6 blocks in each tier, in pieces with others' units between them, which nobody may touch."""
    settings = SETTINGS | settings
    if side == "whole":
        with kvpool.Pool(layered(LAYERS), 6, 6, **settings) as pool:
            yield pool
            pool.audit()
        return
    with space_of(12 * LAYERS, 12 * LAYERS) as space:
        small = space.load("small", layout(1))
        between = [comb(small, 12 * LAYERS, medium) for medium in (HBM, DRAM)]
        for medium, addrs in zip((HBM, DRAM), between, strict=True):
            small.tensor(medium).numpy()[kvpool.block_ids(addrs)] = 77
        pool = space.load("large", layered(LAYERS), pieces="layer", **settings)
        yield pool
        for medium, addrs in zip((HBM, DRAM), between, strict=True):
            assert (small.tensor(medium).numpy()[kvpool.block_ids(addrs)] == 77).all()
        space.audit()


@contextlib.contextmanager
def two_of(route: str, sides: tuple[str, str]) -> Iterator[tuple[Any, Any, str]]:
    """Two pools of this process that are connected, and the second's name for the first."""
    with pool_of(sides[0], routes=(route,)) as a, pool_of(sides[1], routes=(route,)) as b:
        to_b = a.peers.connect(b.peers.listen(address_of("sock")), timeout=60)
        yield a, b, to_b
        eventually(lambda: blocks_at_peers(a) == blocks_at_peers(b) == 0)


def write(pool: Any, addrs: Any, seed: int) -> list[bytes]:
    dice = np.random.default_rng(seed)
    for layers in layers_of(pool, addrs):
        for layer in layers:
            layer[...] = dice.integers(0, 1 << 20, layer.shape)
    return contents(pool, addrs)


def contents(pool: Any, addrs: Any) -> list[bytes]:
    return [b"".join(layer.tobytes() for layer in layers) for layers in layers_of(pool, addrs)]


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("sides", SIDES, ids="-".join)
@pytest.mark.parametrize("route", ROUTES)
def test_each_piece_arrives_where_the_receiver_has_its_place(route, sides, checksum):
    with two_of(route, sides) as (a, b, to_b):
        addrs = a.alloc(3)
        sent = write(a, addrs, 1)
        done = a.transfer(to_b, addrs, private=b"x", checksum=checksum).wait()
        assert done.stats.bytes == 3 * a.kv_layout.block_bytes
        if route == "loopback":
            assert done.stats.calls == 3 * LAYERS  # no two pieces lie together on the side that is cut
        with b.inbox.receive(60) as item:
            assert contents(b, item.addrs) == sent
        assert contents(a, addrs) == sent


@pytest.mark.parametrize("strategy", ["by_layer", "by_request"])
@pytest.mark.parametrize("sides", SIDES, ids="-".join)
@pytest.mark.parametrize("route", ROUTES)
def test_strategies_cut_pieces_like_other_blocks(route, sides, strategy):
    with two_of(route, sides) as (a, b, to_b):
        addrs = a.alloc(5)
        sent = write(a, addrs, 2)
        a.transfer(to_b, addrs, private=b"", strategy=strategy, medium=DRAM).wait()
        with b.inbox.receive(60) as item:
            assert set(kvpool.media(item.addrs).tolist()) == {DRAM}
            assert contents(b, item.addrs) == sent


@pytest.mark.parametrize("sides", SIDES, ids="-".join)
@pytest.mark.parametrize("route", ROUTES)
def test_a_prompt_is_fetched_and_sent_and_moved_between_the_tiers(route, sides):
    with two_of(route, sides) as (a, b, to_b):
        addrs = b.alloc(3)
        sent = write(b, addrs, 3)
        b.insert(prompt(3), addrs).close()
        a.fetch_with_insert(to_b, prompt(3)).wait()
        assert len(a.swap_out(3)) == 3
        with a.match(prompt(3), into=HBM) as hit:
            assert contents(a, hit.addrs) == sent
            fetched = a.fetch(to_b, hit_at(b, prompt(3)), medium=DRAM).wait()
            assert contents(a, fetched.addrs) == sent
        more = a.alloc(2)
        sent = write(a, more, 4)
        a.transfer_with_insert(to_b, prompt(2, 7), more).wait()
        with b.match(prompt(2, 7)) as hit:
            assert contents(b, hit.addrs) == sent


def hit_at(pool: Any, tokens: Any) -> Any:
    with pool.match(tokens) as hit:
        return hit.addrs


@pytest.mark.parametrize("sides", SIDES, ids="-".join)
@pytest.mark.parametrize("route", ROUTES)
def test_lent_blocks_are_written_piece_by_piece_and_come_back_whole(route, sides):
    with two_of(route, sides) as (a, b, to_b):
        before = b.stats().hbm.free
        lent = a.alloc(2, instance=to_b)
        mine = a.alloc(2)
        sent = write(a, mine, 5)
        a.transfer(to_b, mine, to=lent).wait()
        back = a.fetch(to_b, lent).wait()
        assert contents(a, back.addrs) == sent
        a.free(lent)
        eventually(lambda: b.stats().hbm.free == before)


@pytest.mark.parametrize("route", ROUTES)
def test_a_stale_address_of_a_block_in_pieces_is_refused_also_when_another_has_its_units(route):
    with two_of(route, ("cut", "cut")) as (a, b, to_b):
        gone = b.alloc(6)
        units = sorted(b.block_table(gone).ravel().tolist())
        b.free(gone)
        again = b.alloc(6)
        assert sorted(b.block_table(again).ravel().tolist()) == units
        write(b, again, 6)
        free = a.stats().hbm.free
        with pytest.raises(kvpool.StaleAddress):
            a.fetch(to_b, gone).wait()
        assert a.stats().hbm.free == free


@pytest.mark.parametrize("route", ["shm", "cma", "ucx", "cuda_ipc"])
def test_routes_that_do_not_find_pieces_are_refused_by_name(route):
    with pool_of("cut", routes=(route, "sock")) as pool:
        with pytest.raises(kvpool.Unsupported, match=route):
            pool.peers.listen(address_of("sock"))
        pool.free(pool.alloc(6))


CHILD = """
import contextlib
from transfer.test_space_pieces import *
stack = contextlib.ExitStack()
pool = stack.enter_context(pool_of(side))
"""


@pytest.mark.parametrize("sides", SIDES, ids="-".join)
def test_between_processes_the_route_is_one_that_finds_pieces(sides):
    child = Child()
    try:
        child(CHILD, side=sides[1])
        with pool_of(sides[0]) as pool:
            to_b = pool.peers.connect(child("pool.peers.listen(address)", address=address_of("sock")), timeout=60)
            addrs = pool.alloc(4)
            sent = write(pool, addrs, 8)
            done = pool.transfer_with_insert(to_b, prompt(4), addrs).wait()
            assert done.stats.route == "sock"
            assert child("with pool.match(prompt(4)) as hit:\n    found = contents(pool, hit.addrs)\nfound") == sent
            assert child("pool.audit()\nblocks_at_peers(pool)") == 0
    finally:
        child.close()


def test_a_sender_that_is_killed_leaves_nothing_reserved_and_touches_nobodys_units():
    with pool_of("cut") as pool:
        address = pool.peers.listen(address_of("sock"))
        for life in range(5):
            child = Child()
            try:
                child(CHILD + "to = pool.peers.connect(address, timeout=60)\n", side="cut", address=address)
                before = pool.stats().inserted_blocks
                child.send(
                    "addrs = pool.alloc(5)\nat = 0\n"
                    "while True:\n    at += 1\n    pool.transfer_with_insert(to, prompt(5, at), addrs).wait()"
                )
                eventually(lambda known=before: pool.stats().inserted_blocks > known)
                time.sleep(0.003 * life)
                child.kill()
            finally:
                child.close()
            eventually(lambda: pool.peers.list() == [])
            eventually(lambda: blocks_at_peers(pool) == 0)
            pool.evict(100, HBM)
            assert cached_tokens(pool, prompt(5)) == 0
            assert pool.stats().hbm.free == 6
