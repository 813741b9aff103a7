"""Blocks of any shape, order and place go to peers, to the host and back, and every bit stays where it belongs.

The reference is what NumPy keeps of each block, as [layer, k/v, head, token, dim], or with tokens before heads or K and
V fused, whatever lies where. Peers whose blocks hold other things do not meet.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from kit import BLOCK, prompt, repeats, small_pool
from kit import content as elements_of
from transfer.kit import ON_GPU, address_of

import kvpool
from kvpool import DRAM, HBM, MIXED

ORDERS = ["aggregated", "discrete"]
BLOCKS = 6  # of each tier
EXAMPLES = repeats(40, long=400)

orders = st.sampled_from(ORDERS)
media = st.sampled_from([HBM, DRAM, MIXED])
shapes = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 5),
        "kv_heads": st.integers(1, 4),
        "head_dim": st.sampled_from([1, 2, 3, 5, 8, 16, 33]),
        "block_tokens": st.sampled_from([1, 2, 3, BLOCK, 16]),
        "dtype": st.sampled_from(sorted(kvpool.types.DTYPES)),
        "dims": st.sampled_from(["HND", "NHD"]),
        "pages": st.sampled_from(["split", "fused"]),
    }
)
bounded = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def written(pool: kvpool.Pool, addrs: Any, seed: int) -> np.ndarray:
    """Writes random bits into every element of these blocks, and returns them."""
    layout = pool.kv_layout
    bits = np.random.default_rng(seed).integers(0, 256, (len(addrs), layout.block_bytes), np.uint8)
    bits = bits.view(layout.numpy_dtype).reshape(len(addrs), *layout.shape)
    for addr, block in zip(addrs, bits, strict=True):
        place = kvpool.decode_address(int(addr))
        elements_of(pool, place.medium)[place.block] = block
    return bits


def read(pool: kvpool.Pool, addrs: Any) -> np.ndarray:
    places = [kvpool.decode_address(int(addr)) for addr in addrs]
    return np.stack([elements_of(pool, place.medium)[place.block] for place in places])


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()  # NaNs, too


def pool_of(shape: dict[str, Any], order: str, *, on_cpu: bool = False, **options: Any) -> kvpool.Pool:
    device = {"device": "cpu"} if on_cpu else {}
    return small_pool(BLOCKS, BLOCKS, kvpool.KVLayout(**shape, order=order), **device, **options)


@bounded
@given(
    shape=shapes, ours=orders, theirs=orders, route=st.sampled_from(["loopback", "sock"]), peer_on_cpu=st.booleans(),
    strategy=st.sampled_from(["auto", "by_layer", "by_layer_agg", "by_request", "by_request_agg"]),
    checksum=st.booleans(), source=media, target=media,
    blocks=st.permutations(range(BLOCKS)), holes=st.permutations(range(BLOCKS)),
    count=st.integers(1, BLOCKS // 2), seed=st.integers(0, 1 << 32),
)  # fmt: skip
def test_blocks_of_any_layout_go_to_a_peer_of_another_and_come_back(
    shape, ours, theirs, route, peer_on_cpu, strategy, checksum, source, target, blocks, holes, count, seed
):
    """With HBM on a GPU here and, half of the time, there."""
    on_cpu = peer_on_cpu and ON_GPU
    routes = {"routes": ("loopback", "sock") if on_cpu else (route,)}
    with pool_of(shape, ours, **routes) as here, pool_of(shape, theirs, on_cpu=on_cpu, **routes) as there:
        peer = here.peers.connect(there.peers.listen(address_of("sock-unix")))
        # Scattered blocks, in any order, go to scattered ones; all others are unchanged.
        mine = here.alloc(BLOCKS, medium=source)
        bits = written(here, mine, seed)
        addrs = mine[blocks[:count]]
        full = np.stack([there.alloc(BLOCKS, medium=medium) for medium in (HBM, DRAM)])
        own = full[:, holes[BLOCKS // 2 :]].ravel()
        kept = written(there, own, seed + 1)
        there.free(full[:, holes[: BLOCKS // 2]].ravel())
        sent = here.transfer(peer, addrs, medium=target, strategy=strategy, checksum=checksum).wait().addrs
        assert same(read(there, sent), bits[blocks[:count]])
        assert same(read(there, own), kept)
        with there.inbox.receive(60) as item:
            assert item.addrs.tolist() == sent.tolist()
            bits[blocks[:count]] = written(there, sent, seed + 2)
            here.fetch(peer, sent, to=addrs).wait()
        assert same(read(here, mine), bits)
        here.free(mine)
        there.free(own)
        for pool in (here, there):
            stats = pool.audit()
            assert stats.hbm.free == stats.dram.free == BLOCKS


@bounded
@given(shape=shapes, order=orders, swaps=st.lists(st.integers(0, 2 * BLOCKS), min_size=1, max_size=6),
       seed=st.integers(0, 1 << 32))  # fmt: skip
def test_cached_blocks_of_any_layout_are_swapped_down_and_up(shape, order, swaps, seed):
    with pool_of(shape, order) as pool:
        tokens = prompt(BLOCKS, block_tokens=shape["block_tokens"])
        addrs = pool.alloc(BLOCKS)
        bits = written(pool, addrs, seed)
        pool.insert(tokens, addrs).close()
        for count in swaps:
            low = pool.swap_out(count)
            assert len(low) <= count
            with pool.match(tokens) as hit:
                assert set(low.tolist()) <= set(hit.addrs.tolist())
                assert same(read(pool, hit.addrs), bits)
                some = hit.addrs[count % BLOCKS :]
                with pool.swap_in(some) as held:
                    assert set(kvpool.media(held.addrs)) == {HBM}
                    assert same(read(pool, held.addrs), bits[count % BLOCKS :])
        pool.audit()


KV = {"layers": 2, "kv_heads": 8, "head_dim": 16, "dtype": "bfloat16", "block_tokens": 4}
SAID = {
    "K": "2 layers of 8 KV heads x 16 (bfloat16, HND, K and V split), 4 tokens a block",
    "raw": "raw blocks of 4096 bytes in 1 piece, 4 tokens a block",
}
# Blocks of the same number of bytes, most in as many pieces: nothing but the declaration tells them apart.
OTHERS = {
    "dtype": ({"dtype": "float16"}, "8 KV heads x 16 (float16,"),
    "heads": ({"kv_heads": 16, "head_dim": 8}, "16 KV heads x 8 (bfloat16,"),
    "int8": ({"dtype": "int8", "head_dim": 32}, "8 KV heads x 32 (int8,"),
    "layers": ({"layers": 4, "kv_heads": 4}, "4 layers of 4 KV heads x 16"),
    "tokens": ({"block_tokens": 8, "kv_heads": 4}, "4 KV heads x 16 (bfloat16, HND, K and V split), 8 tokens a block"),
    "dims": ({"dims": "NHD"}, "(bfloat16, NHD, K and V split)"),
    "pages": ({"pages": "fused"}, "(bfloat16, HND, K and V fused)"),
    "pieces": (
        {"pages": "fused", "layers": 4, "head_dim": 8},
        "4 layers of 8 KV heads x 8 (bfloat16, HND, K and V fused)",
    ),
}


def meet_and_differ(a: kvpool.Pool, b: kvpool.Pool, *texts: str) -> None:
    for caller, other in ((a, b), (b, a)):
        address = other.peers.listen(address_of("sock-unix"))
        with pytest.raises(kvpool.LayoutMismatch, match="the layouts differ") as caught:
            caller.peers.connect(address)
        for text in texts:
            assert text in str(caught.value)
        assert caught.value.offered_bytes == caught.value.layout_bytes == 4096
        assert a.peers.list() == b.peers.list() == []


@pytest.mark.parametrize("other", OTHERS)
def test_peers_whose_blocks_have_the_same_size_and_other_contents_do_not_connect(other):
    changes, text = OTHERS[other]
    with (
        small_pool(layout=kvpool.KVLayout(**KV), name="a") as a,
        small_pool(layout=kvpool.KVLayout(**KV | changes), name="b") as b,
    ):
        meet_and_differ(a, b, SAID["K"], text)


def test_raw_blocks_connect_only_to_raw_blocks_of_the_same_size_and_tokens():
    raw = kvpool.RawLayout(4096, 4)
    with small_pool(layout=raw, name="a") as a, small_pool(layout=kvpool.KVLayout(**KV), name="b") as b:
        meet_and_differ(a, b, SAID["raw"], SAID["K"])
    with small_pool(layout=raw, name="a") as a, small_pool(layout=kvpool.RawLayout(4096, 8), name="b") as b:
        meet_and_differ(a, b, SAID["raw"], "raw blocks of 4096 bytes in 1 piece, 8 tokens a block")
    with small_pool(layout=raw, name="a") as a, small_pool(layout=raw, name="b") as b:
        assert a.peers.connect(b.peers.listen(address_of("sock-unix"))) == "b"


def test_pools_that_store_the_same_blocks_differently_connect():
    discrete = kvpool.KVLayout(**KV, order="discrete")
    with small_pool(layout=discrete, name="a") as a, small_pool(layout=kvpool.KVLayout(**KV), name="b") as b:
        assert a.peers.connect(b.peers.listen(address_of("sock-unix"))) == "b"
