"""Pools over an engine's own tensors, in any layout. Allocation by the engine: test_engine_allocates.py."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from kit import BLOCK, cached_tokens, prompt, refused, small_layout

import kvpool
from kvpool import DRAM, HBM

BLOCKS = 6
LAYOUT = small_layout()  # two layers, two heads of four float32, blocks of four tokens


def paged(seed=0):
    """[block, k/v, head, token, dim], a tensor a layer."""
    return [np.zeros((BLOCKS, 2, 2, BLOCK, 4), np.float32) for _ in range(2)]


def halves_first():
    """[k/v, block, head, token, dim]: K of all blocks, then V."""
    return [np.zeros((2, BLOCKS, 2, BLOCK, 4), np.float32) for _ in range(2)]


def heads_with_k_beside_v():
    """[block, head, token, 2 * dim]."""
    return [np.zeros((BLOCKS, 2, BLOCK, 8), np.float32) for _ in range(2)]


def padded():
    """A stride between blocks that is more than a block."""
    return [np.zeros((BLOCKS, 2, 2, BLOCK + 3, 4), np.float32)[:, :, 0] for _ in range(2)]


def interleaved_layers():
    """One buffer [block, layer, ...], of which each layer is a view."""
    whole = np.zeros((BLOCKS, 2, 2, 2, BLOCK, 4), np.float32)
    return [whole[:, 0], whole[:, 1]]


def bytes_of_layers():
    """[block, bytes]: the engine's type is its own business."""
    return [np.zeros((BLOCKS, LAYOUT.block_bytes // 2), np.uint8) for _ in range(2)]


def pieces_two_dimensions_deep():
    """[layer pair, k/v, block, ...]: everything in one tensor, blocks third."""
    return [np.zeros((2, 2, BLOCKS, 2, BLOCK, 4), np.float32)]


# Which dimension counts blocks, and what the layout has to declare.
ENGINES = {
    paged: (0, LAYOUT),
    halves_first: (1, LAYOUT),
    heads_with_k_beside_v: (0, small_layout(pages="fused")),
    interleaved_layers: (0, LAYOUT),
    bytes_of_layers: (0, LAYOUT),
    pieces_two_dimensions_deep: (2, LAYOUT),
}


def adopting(tensors, block_dim=0, layout=LAYOUT, dram_blocks=6, **settings):
    return kvpool.Pool(
        layout, hbm=tensors, dram_blocks=dram_blocks, block_dim=block_dim, huge_pages="never", audit=True, **settings
    )


def block_of(tensors, block_dim, block):
    """The bytes of a block, tensor by tensor."""
    return b"".join(np.moveaxis(tensor, block_dim, 0)[block].tobytes() for tensor in tensors)


# ---- layouts


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.__name__)
def test_blocks_of_any_engine_go_down_and_up_bit_by_bit(engine):
    tensors, (block_dim, layout) = engine(), ENGINES[engine]
    with adopting(tensors, block_dim, layout) as pool:
        random = np.random.default_rng(5)
        for tensor in tensors:
            tensor.view(np.uint8)[...] = random.integers(0, 256, tensor.view(np.uint8).shape, np.uint8)
        before = [block_of(tensors, block_dim, block) for block in range(BLOCKS)]
        assert len(set(before)) == BLOCKS
        addrs = pool.alloc(4)
        ids = kvpool.block_ids(addrs).tolist()
        pool.insert(prompt(4), addrs).close()
        moved = pool.swap_out(4)
        down = pool.tensor(DRAM).numpy()
        assert down.shape == (6, LAYOUT.block_bytes)
        for tensor in tensors:
            tensor.view(np.uint8)[...] = 0
        with pool.match(prompt(4)) as hit, pool.swap_in(hit.addrs) as held:
            assert set(moved.tolist()) == set(hit.addrs.tolist())
            for was, now in zip(ids, kvpool.block_ids(held.addrs).tolist(), strict=True):
                assert block_of(tensors, block_dim, now) == before[was]


def test_a_whole_prompt_keeps_its_bytes_in_dram_in_the_order_of_the_tensors():
    tensors = paged()
    with adopting(tensors) as pool:
        addrs = pool.alloc(2)
        for layer, tensor in enumerate(tensors):
            tensor[kvpool.block_ids(addrs)] = layer + 1
        pool.insert(prompt(2), addrs).close()
        moved = pool.swap_out(2)
        content = pool.tensor(DRAM).numpy()[kvpool.block_ids(moved)].view(np.float32)
        assert (content[:, : content.shape[1] // 2] == 1).all()
        assert (content[:, content.shape[1] // 2 :] == 2).all()


def test_padding_between_blocks_is_never_written():
    whole = [np.full((BLOCKS, 2 * 2 * BLOCK * 4 + 5), 7, np.float32) for _ in range(2)]
    tensors = [buffer[:, :-5] for buffer in whole]
    with adopting(tensors) as pool:
        addrs = pool.alloc(6)
        for tensor in tensors:
            tensor[:] = 1
        pool.insert(prompt(6), addrs).close()
        pool.swap_out(6)
        for tensor in tensors:
            tensor[:] = 0
        with pool.match(prompt(6)) as hit, pool.swap_in(hit.addrs):
            assert all((tensor == 1).all() for tensor in tensors)
    assert all((buffer[:, -5:] == 7).all() for buffer in whole)


def test_the_engines_ids_are_the_blocks():
    tensors = paged()
    with adopting(tensors) as pool:
        assert pool.stats().hbm.capacity == BLOCKS
        assert sorted(kvpool.block_ids(pool.alloc(6)).tolist()) == list(range(6))
        arena = pool.arena(HBM)
        assert not arena.owned
        assert (arena.payload_bytes, arena.mapped_bytes) == (BLOCKS * LAYOUT.block_bytes, 0)


def test_torch_tensors_are_adopted_with_their_own_type():
    torch = pytest.importorskip("torch")
    layout = small_layout(dtype="bfloat16")
    tensors = [torch.zeros(2, BLOCKS, 2, BLOCK, 4, dtype=torch.bfloat16) for _ in range(2)]
    with adopting(tensors, block_dim=1, layout=layout) as pool:
        addrs = pool.alloc(3)
        ids = torch.from_numpy(kvpool.block_ids(addrs))
        for layer, tensor in enumerate(tensors):
            tensor[:, ids] = layer + 1.5
        pool.insert(prompt(3), addrs).close()
        pool.swap_out(3)
        for tensor in tensors:
            tensor.zero_()
        with pool.match(prompt(3)) as hit, pool.swap_in(hit.addrs) as held:
            ids = torch.from_numpy(kvpool.block_ids(held.addrs))
            assert all((tensor[:, ids] == layer + 1.5).all() for layer, tensor in enumerate(tensors))


def test_the_view_of_adopted_memory_is_the_engines_own():
    with adopting(paged()) as pool, refused(pool, kvpool.StateError, "engine's own tensors"):
        pool.tensor(HBM)


def test_a_pool_over_adopted_memory_evicts_as_any_other():
    with adopting(paged()) as pool:
        for name in range(6):
            pool.insert(prompt(2, name), pool.alloc(2)).close()
        assert pool.stats().swapped_out_blocks == 6
        assert all(cached_tokens(pool, prompt(2, name)) == 2 * BLOCK for name in range(6))
        pool.alloc(2)
        assert cached_tokens(pool, prompt(2, 0)) == 0


# ---- refusals


@pytest.mark.parametrize(
    ("tensors", "block_dim", "text"),
    [
        (lambda: paged()[:1], 0, "bytes a block"),  # a layer is missing
        (lambda: [*paged(), *paged()], 0, "bytes a block"),
        (lambda: [tensor.astype(np.float64) for tensor in paged()], 0, "bytes a block"),
        (lambda: [paged()[0], paged()[1][:5]], 0, "5 blocks"),
        (padded, 0, "not contiguous"),
        (lambda: [tensor.swapaxes(2, 3) for tensor in paged()], 0, "not contiguous"),
        (lambda: [tensor[::-1] for tensor in paged()], 0, "negative stride"),
        (lambda: [tensor[:0] for tensor in paged()], 0, "empty"),
        (paged, 5, "5 dimensions"),
        (lambda: [np.zeros(4, np.float32)] * 2, 1, "1 dimensions"),
    ],
)
def test_tensors_that_are_not_the_layout_are_refused(tensors, block_dim, text):
    with pytest.raises(kvpool.LayoutMismatch, match=text):
        adopting(tensors(), block_dim)


def test_the_error_for_a_mismatch_shows_the_bytes():
    with pytest.raises(kvpool.LayoutMismatch) as caught:
        adopting(paged()[:1])
    assert caught.value.offered_bytes == LAYOUT.block_bytes // 2
    assert caught.value.layout_bytes == LAYOUT.block_bytes
    with pytest.raises(kvpool.LayoutMismatch) as caught:
        adopting([paged()[0], paged()[1][:5]])
    assert caught.value.position == 1


def test_tensors_that_overlap_are_refused():
    tensors = paged()
    with pytest.raises(kvpool.LayoutMismatch, match="segments 0 and 1 overlap") as caught:
        adopting([tensors[0], tensors[0]])
    assert (caught.value.segment, caught.value.other_segment) == (0, 1)
    whole = np.zeros(2 * BLOCKS * 64 - 1, np.float32)
    shifted = [whole[: BLOCKS * 64].reshape(BLOCKS, 64), whole[-BLOCKS * 64 :].reshape(BLOCKS, 64)]
    with pytest.raises(kvpool.LayoutMismatch, match="overlap"):
        adopting(shifted)
    repeated = np.broadcast_to(np.zeros((1, 64), np.float32), (BLOCKS, 64))
    writable = np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), repeated.shape, repeated.strides)
    with pytest.raises(kvpool.LayoutMismatch, match="overlap"):
        adopting([writable, paged()[0]])


def test_tensors_of_more_runs_than_the_layout_has_pieces_are_refused_before_they_are_counted():
    page = paged()[0]
    endless = np.lib.stride_tricks.as_strided(page, (1 << 50, *page.shape), (0, *page.strides))
    with pytest.raises(kvpool.LayoutMismatch, match="more than 4 runs") as caught:
        adopting([endless], block_dim=1)
    assert caught.value.position == 0


@pytest.mark.parametrize(
    ("hbm", "error"),
    [
        ([], kvpool.ArgumentError),
        ([5, 6], kvpool.ArgumentTypeError),
        (5, kvpool.ArgumentTypeError),
        ("ab", kvpool.ArgumentTypeError),
        ([bytearray(64)] * 2, kvpool.ArgumentTypeError),
    ],
)
def test_objects_that_are_no_tensors_are_refused(hbm, error):
    with pytest.raises(error) as caught:
        adopting(hbm)
    assert isinstance(caught.value, kvpool.Error)


@pytest.mark.parametrize(
    ("block_dim", "error"), [(-1, kvpool.ArgumentError), (1.5, kvpool.ArgumentTypeError), (99, kvpool.LayoutMismatch)]
)
def test_the_block_dimension_is_checked(block_dim, error):
    with pytest.raises(error, match=str(block_dim).replace(".5", "|float")):
        adopting(paged(), block_dim)


def test_adopted_tensors_and_hbm_blocks_exclude_each_other():
    with pytest.raises(kvpool.ArgumentError, match="not both"):
        kvpool.Pool(LAYOUT, 4, hbm=paged())
    with pytest.raises(kvpool.ArgumentError, match="adopted"):
        kvpool.Pool(LAYOUT, 4, engine_allocates=True)


@pytest.mark.parametrize(
    ("tensors", "block_dim", "layout", "texts"),
    [
        # As many bytes as the layout says, and other pages: a reshard would cut them in the wrong places.
        (heads_with_k_beside_v, 0, LAYOUT, ("[6, 2, 4, 8]", "[k/v 2] [head, token, dim] [2, 4, 4]", 'pages="fused"')),
        (paged, 0, small_layout(pages="fused"), ("[6, 2, 2, 4, 4]", "[head, token, 2 * dim]", 'pages="split"')),
        (halves_first, 1, small_layout(kv_heads=4, head_dim=2), ("[2, 6, 2, 4, 4]", "[4, 4, 2]")),
        (lambda: [np.zeros((BLOCKS, 2, BLOCK, 2, 4), np.float32) for _ in range(2)], 0, LAYOUT, ('dims="NHD"',)),
        (lambda: [np.zeros((2, 2, BLOCKS, 2, BLOCK, 4), np.float32)], 2, small_layout(kv_heads=4, head_dim=2), ()),
        (lambda: [np.zeros((2, BLOCKS, BLOCK, 8), np.float32) for _ in range(2)], 1, LAYOUT, ("does not hold",)),
        (lambda: [tensor.astype(np.int32) for tensor in paged()], 0, LAYOUT, ("int32", "float32")),
        (lambda: [tensor.view(np.float16) for tensor in paged()], 0, LAYOUT, ("float16", "float32")),
    ],
)
def test_tensors_that_contradict_what_the_layout_declares_are_refused(tensors, block_dim, layout, texts):
    with pytest.raises(kvpool.LayoutMismatch) as caught:
        adopting(tensors(), block_dim, layout)
    assert caught.value.position == 0
    for text in texts:
        assert text in str(caught.value)


def test_a_type_that_numpy_lacks_may_be_given_as_bits():
    with adopting([tensor.view(np.uint32) for tensor in paged()]) as pool:
        assert pool.stats().hbm.capacity == BLOCKS
    halves = [np.zeros((BLOCKS, 2, 2, BLOCK, 4), np.uint16) for _ in range(2)]
    with adopting(halves, layout=small_layout(dtype="bfloat16")) as pool:
        assert pool.stats().hbm.capacity == BLOCKS


# ---- lifetime


class Kept:
    """A tensor whose end can be observed."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


def test_the_pool_keeps_the_tensors():
    tensors = [Kept(array) for array in paged()]
    alive = [weakref.ref(tensor) for tensor in tensors]
    pool = adopting(tensors)
    del tensors
    gc.collect()
    assert all(ref() is not None for ref in alive)
    pool.insert(prompt(6), pool.alloc(6)).close()
    assert len(pool.swap_out(6)) == 6
    pool.close()
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_a_list_that_changes_afterwards_changes_nothing():
    tensors = [Kept(array) for array in paged()]
    alive = [weakref.ref(tensor) for tensor in tensors]
    pool = adopting(tensors)
    tensors.clear()
    gc.collect()
    assert all(ref() is not None for ref in alive)
    pool.insert(prompt(6), pool.alloc(6)).close()
    assert len(pool.swap_out(6)) == 6
    pool.close()


def test_a_pool_that_failed_to_be_made_keeps_nothing():
    tensors = [Kept(array) for array in paged()[:1]]
    alive = weakref.ref(tensors[0])
    with pytest.raises(kvpool.LayoutMismatch):
        adopting(tensors)
    del tensors
    gc.collect()
    assert alive() is None


def test_an_open_pin_keeps_the_pool_but_not_the_tensors_of_a_closed_one():
    tensors = [Kept(array) for array in paged()]
    alive = weakref.ref(tensors[0])
    pool = adopting(tensors)
    del tensors
    held = pool.insert(prompt(2), pool.alloc(2))
    del pool
    gc.collect()
    assert alive() is not None
    held.close()
    del held
    gc.collect()
    assert alive() is None
