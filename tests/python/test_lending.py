"""Pools of a cluster that lend each other blocks: attention has the same bits wherever the blocks lie."""

from __future__ import annotations

import contextlib
import gc

import numpy as np
import pytest
from attach_kit import eventually, join, url
from space_kit import layered, space_of

import kvpool
from kvpool.control.lending import Lending
from kvpool.peers.callback import RecallResult

LAYOUT = kvpool.KVLayout(layers=1, kv_heads=1, head_dim=16, dtype="float32", block_tokens=256)
__all__ = ["url"]


@contextlib.contextmanager
def members(url, *sizes, **options):
    """(pool, lending) of each, when each knows the rows of all."""
    with contextlib.ExitStack() as stack:
        made = []
        for number, blocks in enumerate(sizes):
            cluster = stack.enter_context(join(url, heartbeat=0.1))
            pool = stack.enter_context(kvpool.Pool(LAYOUT, hbm_blocks=0, dram_blocks=blocks, attend_threads=2))
            pool.attach(cluster, name=f"m{number}")
            made.append((pool, stack.enter_context(Lending(pool, cluster, **options))))
        eventually(lambda: all(knows(lending, len(sizes)) for _, lending in made))
        yield made


def knows(lending, count):
    with contextlib.suppress(kvpool.StateError):
        lending.publish()
    return len(lending._members.ledger) == count


def filled(pool, blocks):
    addrs = pool.alloc(blocks, kvpool.DRAM)
    rng = np.random.default_rng(blocks)
    memory = pool.tensor(kvpool.DRAM).numpy()
    for block in kvpool.block_ids(addrs):
        memory[block] = rng.standard_normal(memory[block].shape)
    return pool.sequence(addrs)


def attention(pool, seq):
    q = np.random.default_rng(3).standard_normal((1, 2, 16)).astype(np.float32)
    return pool.attend(0, q, [seq]).wait(30).finish("float32")


def test_blocks_go_to_two_creditors_and_come_home_with_the_same_bits(url):
    with members(url, 24, 8, 8) as [(a, lending), (b, b_lending), (c, _)]:
        seq = filled(a, 20)
        before = attention(a, seq)
        assert lending.offload(seq, 16) == 16
        assert a.stats().dram.free == 20
        assert (b.stats().dram.lent, c.stats().dram.lent) == (8, 8)
        assert np.array_equal(attention(a, seq), before)
        assert lending.row.debts == {b._attachment.instance: 8, c._attachment.instance: 8}
        eventually(lambda: knows(b_lending, 3) and len(b_lending._members.ledger.debts()) == 2)
        with pytest.raises(kvpool.ArgumentError):
            lending.offload(seq, 1)  # the tail is here
        filler = a.alloc(8, kvpool.DRAM)
        assert lending.payback() == 12  # into what is free
        a.free(filler)
        assert lending.payback() == 4
        assert (b.stats().dram.lent, c.stats().dram.lent) == (0, 0)
        assert np.array_equal(attention(a, seq), before)
        seq.close()


def test_what_a_creditor_recalls_comes_home_in_time(url):
    with members(url, 24, 8) as [(a, lending), (b, _)]:
        seq = filled(a, 12)
        before = attention(a, seq)
        assert lending.offload(seq, 8) == 8
        with a.peers.on_change(lambda event: lending.give_back(event.addrs) if event.kind == "recalled" else None):
            assert b.peers.recall("m0", seq.addrs[4:8], timeout=20) == RecallResult(4, 0, 0)  # a leaf
        assert owners(seq) == {a._attachment.instance, b._attachment.instance}
        assert b.stats().dram.lent == 4
        assert np.array_equal(attention(a, seq), before)


def test_without_room_anywhere_nothing_changes(url):
    with members(url, 24, 8) as [(a, lending), (b, _)]:
        seq = filled(a, 20)
        addrs = seq.addrs.tolist()
        with pytest.raises(kvpool.OutOfBlocks):
            lending.offload(seq, 12)
        assert seq.addrs.tolist() == addrs
        assert (a.stats().dram.free, b.stats().dram.lent) == (4, 0)


def test_a_creditor_that_closes_costs_only_what_it_had(url):
    with members(url, 24, 8, 8) as [(a, lending), (b, b_lending), _]:
        seq, other = filled(a, 12), filled(a, 12)
        assert lending.offload(seq, 8) == 8
        assert lending.offload(other, 8) == 8
        lost, kept = (seq, other) if b._attachment.instance in owners(seq) else (other, seq)
        b_lending.close()
        b.close()
        eventually(lambda: knows(lending, 2))
        assert lending.payback() == 8
        assert owners(kept) == {a._attachment.instance}
        assert a._attachment.instance in owners(lost)
        with pytest.raises((kvpool.PeerLost, kvpool.StaleAddress)):
            attention(a, lost)
        attention(a, kept)


def owners(seq):
    return {kvpool.decode_address(addr).instance for addr in seq.addrs}


# ---- prompts that do not fit


def compute(prefill, pool, big):
    """Writes what `big`, a sequence of another pool, has; attends with both behind each chunk."""
    (whole, whole_pool), results = big, []
    memory, source = pool.tensor(kvpool.DRAM).numpy(), whole_pool.tensor(kvpool.DRAM).numpy()
    for chunk in prefill:
        blocks = kvpool.block_ids(whole.addrs)[chunk.first // 256 : -(-chunk.end // 256)]
        assert len(blocks) == len(chunk.addrs)
        for layer in range(LAYOUT.layers):
            memory[kvpool.block_ids(chunk.addrs), layer] = source[blocks, layer]
            chunk.send_layer(layer)
        prefill.sequence.tokens = whole.tokens = chunk.end
        results.append((attention(pool, prefill.sequence), attention(whole_pool, whole)))
    return results


@contextlib.contextmanager
def whole_prompt(blocks):
    with kvpool.Pool(LAYOUT, hbm_blocks=0, dram_blocks=blocks) as pool:
        yield filled(pool, blocks), pool


def test_a_long_prompt_is_streamed_to_creditors_behind_its_computation(url):
    with members(url, 24, 12, 12) as [(a, lending), (b, _), (c, _)], whole_prompt(34) as big:
        tokens = 33 * 256 + 100
        with lending.prefill(tokens) as prefill:
            results = compute(prefill, a, big)
        assert len(results) == 9  # leaves
        assert all(np.array_equal(*pair) for pair in results)
        seq = prefill.sequence
        assert seq.tokens == tokens
        assert (seq.instances != 0).tolist() == [False] * 8 + [True] * 20 + [False] * 6
        assert sorted((b.stats().dram.lent, c.stats().dram.lent)) == [8, 12]
        assert a.stats().dram.free == 24 - 14
        assert np.array_equal(attention(a, seq), results[-1][1])
        used = a.alloc(2, kvpool.DRAM)
        assert lending.payback() == 8  # two leaves: it is one of lending's sequences now
        assert np.array_equal(attention(a, seq), results[-1][1])
        a.free(used)
        seq.close()
        a.free(seq.addrs)
        eventually(lambda: all(pool.stats().dram.free == pool.stats().dram.capacity for pool in (a, b, c)))


def test_chunks_may_be_smaller_than_a_leaf(url):
    with members(url, 16, 8, 8) as [(a, lending), _, _], whole_prompt(26) as big:
        with lending.prefill(26 * 256, chunk_tokens=300) as prefill:
            results = compute(prefill, a, big)
        assert len(results) == 13
        for here, whole in results:  # while a leaf is partly here and partly there it is rounded differently
            np.testing.assert_allclose(here, whole, rtol=1e-5, atol=1e-6)
        assert np.array_equal(attention(a, prefill.sequence), results[-1][1])
        a.free(prefill.sequence.addrs)


def test_a_prompt_that_fits_stays_here(url):
    with members(url, 16, 8) as [(a, lending), (b, _)], whole_prompt(16) as big:
        with lending.prefill(16 * 256) as prefill:
            results = compute(prefill, a, big)
        assert len(results) == 4
        assert all(np.array_equal(*pair) for pair in results)
        assert not prefill.sequence.instances.any()
        assert (b.stats().dram.lent, a.stats().dram.free) == (0, 0)
        a.free(prefill.sequence.addrs)


def test_a_prompt_that_fits_nowhere_leaves_nothing_borrowed(url):
    with members(url, 16, 8) as [(a, lending), (b, _)]:
        with pytest.raises(kvpool.OutOfBlocks):
            lending.prefill(30 * 256, chunk_tokens=512)
        with pytest.raises(kvpool.ArgumentError):
            lending.prefill(0)
        eventually(lambda: (a.stats().dram.free, b.stats().dram.free) == (16, 8))


@pytest.mark.parametrize("chunks", [0, 1, 4, 6])
def test_a_prompt_that_is_abandoned_leaves_nothing(url, chunks):
    with members(url, 16, 16) as [(a, lending), (b, _)]:
        with lending.prefill(26 * 256, chunk_tokens=512) as prefill:
            for number, chunk in enumerate(prefill):
                if number == chunks:
                    break
                chunk.send_layer(0)
        with pytest.raises(kvpool.StateError):
            _ = prefill.sequence
        with pytest.raises(kvpool.StateError):
            next(iter(prefill))
        eventually(lambda: (a.stats().dram.free, b.stats().dram.free) == (16, 16))


@pytest.mark.parametrize("missing", [0, 4])  # of a chunk that stays, and of one that goes
def test_a_layer_that_was_not_sent_is_an_error_and_leaves_nothing(url, missing):
    with members(url, 16, 16) as [(a, lending), (b, _)]:
        with pytest.raises(kvpool.StateError, match="layer"), lending.prefill(26 * 256, chunk_tokens=512) as prefill:
            for number, chunk in enumerate(prefill):
                if number != missing:
                    chunk.send_layer(0)
                    with pytest.raises(kvpool.ArgumentError):
                        chunk.send_layer(0)
                with pytest.raises(kvpool.ArgumentError):
                    chunk.send_layer(1)
        assert number == missing
        eventually(lambda: (a.stats().dram.free, b.stats().dram.free) == (16, 16))


def test_a_prefill_that_is_left_with_an_exception_leaves_nothing_even_if_it_was_complete(url):
    with members(url, 16, 16) as [(a, lending), (b, _)]:
        with pytest.raises(KeyError), lending.prefill(26 * 256, chunk_tokens=512) as prefill:
            for chunk in prefill:
                chunk.send_layer(0)
            raise KeyError
        eventually(lambda: (a.stats().dram.free, b.stats().dram.free) == (16, 16))
        assert lending.payback() == 0


def test_a_recall_in_the_middle_ends_the_prefill_and_nothing_is_left(url):
    with members(url, 16, 16) as [(a, lending), (b, _)]:
        with (
            pytest.raises((kvpool.StaleAddress, kvpool.NotOwner)),
            lending.prefill(26 * 256, chunk_tokens=512) as prefill,
        ):
            for number, chunk in enumerate(prefill):
                if number == 3:  # of what has arrived, and of what is to come
                    b.peers.recall("m0", 5, timeout=0.1)
                chunk.send_layer(0)
            attention(a, prefill.sequence)  # if they were of what had arrived already
        eventually(lambda: (a.stats().dram.free, b.stats().dram.free) == (16, 16))


def test_a_block_that_the_engine_has_freed_keeps_no_other(url):
    with members(url, 16, 16) as [(a, lending), (b, _)]:
        with lending.prefill(26 * 256, chunk_tokens=512) as prefill:
            chunk = next(iter(prefill))
            a.free(chunk.addrs[:1])
        eventually(lambda: (a.stats().dram.free, b.stats().dram.free) == (16, 16))


def test_lending_may_be_closed_while_a_prompt_is_computed(url):
    with members(url, 24, 12, 12) as [(a, lending), _, _], whole_prompt(34) as big:
        with lending.prefill(33 * 256) as prefill:
            memory, source = a.tensor(kvpool.DRAM).numpy(), big[1].tensor(kvpool.DRAM).numpy()
            for number, chunk in enumerate(prefill):
                if number == 4:
                    lending.close()
                blocks = kvpool.block_ids(big[0].addrs)[chunk.first // 256 : chunk.end // 256]
                memory[kvpool.block_ids(chunk.addrs)] = source[blocks]
                chunk.send_layer(0)
        big[0].tokens = 33 * 256
        assert np.array_equal(attention(a, prefill.sequence), attention(big[1], big[0]))
        a.free(prefill.sequence.addrs)


def test_tokens_that_are_taken_back_while_they_are_sent_end_the_prefill(url):
    with members(url, 16, 16) as [(a, lending), (b, _)]:
        with pytest.raises(kvpool.StateError), lending.prefill(26 * 256, chunk_tokens=512) as prefill:
            for number, chunk in enumerate(prefill):
                prefill.sequence.tokens = chunk.end
                if number == 4:
                    prefill.sequence.tokens = chunk.first
                chunk.send_layer(0)
        eventually(lambda: (a.stats().dram.free, b.stats().dram.free) == (16, 16))


def test_a_prefill_is_used_in_its_with(url):
    with members(url, 16, 16) as [(a, lending), (b, _)]:
        prefill = lending.prefill(26 * 256, chunk_tokens=512)
        with pytest.raises(kvpool.StateError):
            next(iter(prefill))
        del prefill  # and without one its blocks are not lost
        gc.collect()
        eventually(lambda: (a.stats().dram.free, b.stats().dram.free) == (16, 16))
    with members(url, 16, 16) as [(a, lending), (b, _)]:
        with lending.prefill(26 * 256, chunk_tokens=512) as prefill:
            chunks = iter(prefill)
            next(chunks).send_layer(0)
        with pytest.raises(kvpool.StateError):
            next(chunks)
        with pytest.raises(kvpool.StateError):
            prefill.__enter__()
        for wrong in (0, -1):
            with pytest.raises(kvpool.ArgumentError):
                lending.prefill(256, chunk_timeout=wrong)
        eventually(lambda: (a.stats().dram.free, b.stats().dram.free) == (16, 16))


def test_a_chunk_may_be_longer_than_the_prompt(url):
    with members(url, 40, 16, tail=1) as [(a, lending), (b, _)]:
        with lending.prefill(17 * 256, chunk_tokens=10**6) as prefill:
            (chunk,) = prefill_of(prefill)
        assert (chunk.first, chunk.end) == (0, 17 * 256)
        with pytest.raises(kvpool.OutOfBlocks) as caught:  # 23 are left: too few for two chunks beside the tail
            lending.prefill(24 * 256, chunk_tokens=10**6)
        assert caught.value.free >= 0
        with prefill.sequence as seq:
            a.free(seq.addrs)
        eventually(lambda: (a.stats().dram.free, b.stats().dram.free) == (40, 16))


def prefill_of(prefill):
    chunks = []
    for chunk in prefill:
        chunk.send_layer(0)
        chunks.append(chunk)
    return chunks


def test_the_cap_of_a_row_counts_what_is_lent_of_the_other_medium(url):
    with join(url, heartbeat=0.1) as cluster, join(url, heartbeat=0.1) as other:
        with kvpool.Pool(LAYOUT, hbm_blocks=8, dram_blocks=8) as b, kvpool.Pool(LAYOUT, 4, 4) as a:
            b.attach(cluster, name="b")
            a.attach(other, name="a")
            with Lending(b, cluster, lend_max=5) as lending:
                lent = eventually_lent(a, 3)
                eventually(lambda: lending.publish() or lending.row.lend_max == 2)
                a.free(lent)


def test_a_pool_whose_blocks_may_lie_in_pieces_joins_a_cluster_and_does_not_lend(url):
    with join(url) as cluster, space_of(48, 48) as space:
        whole = space.load("whole", layered(4))
        cut = space.load("cut", layered(4), pieces="layer")
        cut.attach(cluster, name="cut")
        with pytest.raises(kvpool.Unsupported, match="several pieces"):
            Lending(cut, cluster, lend_max=5)
        assert cut.peers.lend_max is None
        with join(url) as other:
            whole.attach(other, name="whole")
            with Lending(whole, other) as lending:
                assert not lending.closed


def eventually_lent(pool, blocks):
    lent = []

    def borrow():
        with contextlib.suppress(kvpool.PeerLost):
            lent.extend(pool.alloc(blocks, kvpool.HBM, instance="b"))
        return lent

    eventually(borrow)
    return lent


def test_a_creditor_that_dies_ends_the_prefill_and_the_others_get_their_blocks_back(url):
    with members(url, 16, 8, 8) as [(a, lending), (b, _), (c, _)]:
        with pytest.raises(kvpool.PeerLost), lending.prefill(26 * 256, chunk_tokens=512) as prefill:
            for number, chunk in enumerate(prefill):
                if number == 4:
                    b.close()
                chunk.send_layer(0)
        eventually(lambda: (a.stats().dram.free, c.stats().dram.free) == (16, 8))
