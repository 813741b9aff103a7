"""Attention over sequences whose blocks lie with peers: they move there and home."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from attention_kit import BLOCK, layout_of, pool_of, write_kv
from attention_peers_kit import LEAF, become_free, free_of, listening, out, query, three_pools, written

import kvpool


@pytest.fixture
def three():
    with three_pools() as pools:
        yield pools


def test_offloaded_leaves_give_the_same_bits_and_come_home_again(three):
    a, b, c = three
    with a.sequence(written(a, 3 * LEAF + 2, 3 * 1024 + 20), tokens=3 * 1024 + 20) as seq:
        here = out(a, seq)
        a.free(seq.offload(LEAF, "b"))
        a.free(seq.offload(LEAF, to="c"))
        assert seq.instances[:LEAF].all()
        assert seq.instances[LEAF : 2 * LEAF].all()
        assert len(set(seq.instances)) == 3
        become_free(3 * LEAF - 2, a)
        become_free(3 * LEAF, b, c)
        handle = a.attend(1, query(), [seq], where="there")
        assert dict(handle.explain().sequences[0].there) == {"b": 1024, "c": 1024}
        part = handle.wait()
        assert part.exact
        assert part.covers == [[(0, 3 * 1024 + 20)]]
        assert np.array_equal(part.finish("float32"), here)
        a.free(seq.bring_home(2 * LEAF))
        assert not seq.instances.any()
        assert np.array_equal(out(a, seq), here)
        become_free(4 * LEAF, b, c)
        addrs = seq.addrs
    a.free(addrs)
    become_free(4 * LEAF, a)


def test_the_block_with_the_newest_token_stays_and_more_than_there_is_is_refused(three):
    a, *_ = three
    with a.sequence(written(a, 4), tokens=3 * BLOCK) as seq:
        with pytest.raises(kvpool.ArgumentError) as caught:
            seq.offload(3, "b")
        assert caught.value.blocks == 2
        with pytest.raises(kvpool.ArgumentError):
            seq.offload(0, "b")
        with pytest.raises(kvpool.ArgumentError):
            seq.bring_home(1)
        assert list(seq.offload(2))
        assert seq.instances[:2].all()
        assert not seq.instances[2:].any()


def test_an_offload_that_fails_leaves_the_sequence_and_both_pools_as_before(three):
    a, b, _ = three
    taken = b.alloc(4 * LEAF - 1, kvpool.DRAM)
    with a.sequence(written(a, 4)) as seq:
        before, want = seq.addrs, out(a, seq)
        with pytest.raises(kvpool.OutOfBlocks):
            seq.offload(2, "b")
        with pytest.raises(kvpool.PeerLost):
            seq.offload(2, "nobody", timeout=0.2)
        assert np.array_equal(seq.addrs, before)
        assert np.array_equal(out(a, seq), want)
        become_free(1, b)
        a.free(seq.offload(2))  # c has room
        assert set(seq.instances) == {0, *(peer.instance for peer in a.peers if peer.name == "c")}
        a.alloc(free_of(a), kvpool.DRAM)
        with pytest.raises(kvpool.OutOfBlocks):
            seq.bring_home(1)
    b.free(taken)


def test_a_peers_cached_prefix_is_attended_to_where_it_lies(three):
    a, b, _ = three
    tokens = list(range(4 * BLOCK))
    addrs = written(b, 4)
    b.insert(tokens, addrs)
    write_kv(a, own := a.alloc(4, kvpool.DRAM), np.random.default_rng(1))
    with a.sequence(own) as here, a.sequence(b.match(tokens).addrs) as there:
        assert np.array_equal(out(a, here), out(a, there))
        b.delete(tokens)
        assert np.array_equal(out(a, here), out(a, there))  # held


def test_several_sequences_of_several_queries_are_computed_as_if_they_were_here(three):
    a, *_ = three
    seqs = [a.sequence(written(a, n), tokens=n * BLOCK - 3) for n in (5, 70, 9)]
    q = query(rows=2 + 1 + 4)
    call = {"query_tokens": [2, 1, 4], "scale": 0.3}
    want = a.attend(0, q, seqs, **call).wait().finish("float32")
    for seq, n in zip(seqs, (3, 64, 8), strict=True):
        a.free(seq.offload(n, "b"))
    got = asyncio.run(_awaited(a.attend(0, q, seqs, **call))).finish("float32")
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
    for seq in seqs:
        seq.close()


async def _awaited(handle):
    return await handle


def test_attention_goes_on_while_blocks_move(three):
    a, *_ = three
    with a.sequence(written(a, 2 * LEAF + 1)) as seq:
        want, over, bad = out(a, seq), threading.Event(), []

        def engine():
            while not over.is_set():
                if not np.array_equal(out(a, seq), want):
                    bad.append(seq.addrs)

        thread = threading.Thread(target=engine)
        thread.start()
        try:
            for peer in ("b", "c", "b"):
                a.free(seq.offload(2 * LEAF, peer))
                until = time.monotonic() + 60
                while free_of(a) < 2 * LEAF and time.monotonic() < until:  # what the engine still reads is not free
                    time.sleep(0.001)
                a.free(seq.bring_home(LEAF))
                a.free(seq.bring_home(LEAF))
        finally:
            over.set()
            thread.join()
        assert not bad


def test_blocks_that_a_peer_recalls_are_stale(three):
    a, b, _ = three
    with a.sequence(written(a, 4)) as seq:
        a.free(seq.offload(2, "b"))
        result = b.peers.recall("a", timeout=0.05)
        assert result.freed + result.quarantined == 2
        become_free(4 * LEAF, b)  # quarantined until this pool has said that it no longer reads them
        with a.sequence(written(a, 2)) as other, pytest.raises(kvpool.StaleAddress) as caught:
            a.attend(1, query(rows=2), [other, seq]).wait()
        assert caught.value.position == 1
        assert seq.lost == [(0, 2 * BLOCK)]
        seq.replace(0, written(a, 2))
        assert seq.lost == []
        assert out(a, seq).shape == (1, 4, 16)


def test_a_pool_that_lends_no_attention_says_so():
    with (
        pool_of(hbm=0, dram=8, name="a", secret="s") as a,
        pool_of(hbm=0, dram=8, name="b", secret="s", attend_lent_max=0) as b,
    ):
        a.peers.connect(listening(b))
        with a.sequence(written(a, 3)) as seq:
            want = out(a, seq)
            seq.offload(2, "b")
            with pytest.raises(kvpool.Unsupported):
                out(a, seq, where="there")
            for where in ("here", "auto"):
                np.testing.assert_allclose(out(a, seq, where=where), want, rtol=2e-6, atol=2e-6)


def test_a_peer_that_neither_computes_nor_shows_its_memory_gets_no_blocks():
    pools = [pool_of(hbm=0, dram=8, name=name, secret="s") for name in "ac"]
    a, c = pools
    a.peers.connect(listening(c))
    with a.sequence(written(a, 4)) as seq:
        with pool_of(hbm=0, dram=8, name="d", secret="s", attend_lent_max=0, routes=["sock"]) as d:
            a.peers.connect(listening(d))
            with pytest.raises(kvpool.Unsupported):
                seq.offload(2, "d")
            become_free(8, d)
            a.free(seq.offload(2))  # c takes them, whichever is asked first
            assert {peer.name for peer in a.peers if peer.instance in seq.instances} == {"c"}
    for pool in pools:
        pool.close()


def test_blocks_come_home_from_all_peers_or_from_none(three):
    a, _b, c = three
    with a.sequence(written(a, 2 * LEAF + 1)) as seq:
        a.free(seq.offload(LEAF, "b"))
        a.free(seq.offload(LEAF, "c"))
        before, room = seq.addrs, free_of(a)
        c.close()
        with pytest.raises(kvpool.PeerLost):
            seq.bring_home(2 * LEAF)
        assert np.array_equal(seq.addrs, before)
        become_free(room, a)


def test_tokens_are_not_taken_back_into_blocks_that_lie_with_a_peer(three):
    a, *_ = three
    with a.sequence(written(a, 4), tokens=3 * BLOCK + 1) as seq:
        a.free(seq.offload(2, "b"))
        with pytest.raises(kvpool.StateError) as caught:
            seq.tokens = BLOCK + 9
        assert caught.value.block == 1
        seq.tokens = 2 * BLOCK  # block 2 is here
        assert seq.tokens == 2 * BLOCK
        a.free(seq.bring_home(1))
        seq.tokens = BLOCK + 9


def test_a_block_that_was_written_while_it_was_copied_does_not_move(three):
    a, b, _ = three
    with a.sequence(written(a, 4), tokens=3 * BLOCK + 1) as seq:
        before, mark = seq.addrs, seq._set_backs
        lent = a.alloc(2, kvpool.DRAM, instance="b")
        seq.tokens = BLOCK + 9  # what was speculated is rejected, and written anew
        seq.tokens = 3 * BLOCK + 1
        with pytest.raises(kvpool.StateError):
            seq._switch([0, 1], before[:2], lent, mark, None)
        assert np.array_equal(seq.addrs, before)
        seq._switch([0], before[:1], lent[:1], mark, None)  # that one was not written
        a.free(lent[1:])
        become_free(4 * LEAF - 1, b)


def test_every_way_gives_the_same_bits_over_every_route():
    for routes in (["shm", "loopback"], ["sock"]):
        a, b = (pool_of(hbm=0, dram=3 * LEAF, name=name, secret="s", routes=routes) for name in "ab")
        with a, b:
            a.peers.connect(listening(b))
            with a.sequence(written(a, 2 * LEAF + 1)) as seq:
                want = out(a, seq)
                a.free(seq.offload(2 * LEAF, "b"))
                for where in ("there", "auto", "here", "auto"):
                    if where == "here" and routes == ["sock"]:
                        with pytest.raises(kvpool.Unsupported):
                            out(a, seq, where=where)
                        continue
                    handle = a.attend(1, query(), [seq], where=where)
                    assert np.array_equal(handle.wait().finish("float32"), want)
                    plan = handle.explain().sequences[0]
                    assert dict(plan.there + plan.mapped) == {"b": 2048}
                    assert where == "auto" or (plan.mapped == ()) == (where == "there")


def test_wrong_arguments_change_nothing(three):
    a, *_ = three
    with a.sequence(written(a, 3)) as seq:
        before = seq.addrs
        with pytest.raises(kvpool.ArgumentError):
            a.attend(0, query(), [seq], where="elsewhere")
        with pytest.raises(kvpool.ArgumentTypeError):
            a.attend(0, query(), [seq], where=None)
        for first, addrs in ((3, before[:1]), (-1, before[:1]), (0, [1 << 60])):
            with pytest.raises(kvpool.Error):
                seq.replace(first, addrs)
        with pytest.raises(kvpool.ArgumentTypeError):
            seq.replace("0", before[:1])
        with pytest.raises(kvpool.NotOwner if len(a.peers.list()) == 0 else kvpool.Error):
            seq.append([(9999 << 50) | 5])
        assert np.array_equal(seq.addrs, before)
    with pytest.raises(kvpool.StateError):
        seq.replace(0, before[:1])
    with pytest.raises(kvpool.StateError):
        seq.offload(1, "b")


def test_a_layout_without_heads_cannot_be_viewed_by_a_peer():
    layout = kvpool.RawLayout(block_bytes=4096)
    with kvpool.Pool(layout, 8, name="a") as a, pytest.raises(kvpool.Unsupported):
        a.sequence(a.alloc(1))


def test_half_precision_is_attended_to_at_peers():
    for dtype in ("bfloat16", "float16"):
        layout = layout_of(dtype=dtype)
        with (
            pool_of(layout, hbm=0, dram=8, name="a", secret="s") as a,
            pool_of(layout, hbm=0, dram=8, name="b", secret="s") as b,
        ):
            a.peers.connect(listening(b))
            with a.sequence(written(a, 4)) as seq:
                want = out(a, seq)
                seq.offload(2, "b")
                np.testing.assert_allclose(out(a, seq), want, rtol=2e-6, atol=2e-6)
