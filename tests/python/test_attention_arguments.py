"""What attention does with bad arguments: a typed error, and nothing has changed."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import pytest
from attention_kit import layout_of, pool_of, query

import kvpool
from kvpool import PartialAttention


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def test_an_empty_batch_keeps_its_shape(rng):
    with pool_of() as pool:
        part = pool.attend(0, query(rng, 0), []).wait()
        assert len(part) == 0
        assert part.finish("float16").shape == (0, 4, 16)
        assert part.lse(base=2, order="heads_first").shape == (4, 0)
        part.merge(part).finish(out=np.empty((0, 4, 16), np.float32))


class DLTensor(ctypes.Structure):
    """The content of DLPack's capsule: a DLManagedTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


class Shaped:
    """A tensor by DLPack that says what it likes of its device and shape."""

    def __init__(self, device, shape):
        self.memory = ctypes.create_string_buffer(4096)
        extents = (ctypes.c_int64 * len(shape))(*shape)
        self.tensor = DLTensor(ctypes.addressof(self.memory), device, 0, len(shape), 2, 32, 1, extents)

    def __dlpack__(self, **_):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


@pytest.mark.parametrize(("device", "shape"), [(2, (1, 4, 16)), (1, (1, -4, 16)), (1, (1, 2**40, 2**40))])
def test_a_tensor_that_lies_about_itself_is_refused(rng, device, shape):
    with pool_of() as pool, pool.sequence(pool.alloc(1)) as seq:
        with pytest.raises(kvpool.ArgumentError):
            pool.attend(0, Shaped(device, shape), [seq])
        with pytest.raises(kvpool.ArgumentError):
            PartialAttention.from_lse(
                Shaped(device, shape), Shaped(1, (shape[1], 1)), base=2, order="heads_first", covers=[[(0, 1)]]
            )


def test_numbers_that_overflow_are_refused_before_anything_is_computed(rng):
    with pool_of() as pool, pool.sequence(pool.alloc(1)) as seq:
        q = query(rng)
        for call in (
            lambda: pool.attend(0, q, [seq], scale=3e38),
            lambda: pool.attend(0, q, [seq], scale=10**400),
            lambda: pool.attend(0, np.zeros((1, (1 << 20) + 2, 16), np.float32), [seq]),
            lambda: PartialAttention.from_lse(
                q, np.full((4, 1), 3e38, np.float32), base="e", order="heads_first", covers=[[(0, 1)]]
            ),
        ):
            with pytest.raises(kvpool.ArgumentError):
                call()


def test_what_a_number_raises_is_not_swallowed(rng):
    class Interrupts:
        def __float__(self):
            raise KeyboardInterrupt

    with pool_of() as pool, pool.sequence(pool.alloc(1)) as seq, pytest.raises(KeyboardInterrupt):
        pool.attend(0, query(rng), [seq], scale=Interrupts())


def test_a_forked_child_is_told_so(rng):
    with pool_of() as pool, pool.sequence(pool.alloc(1)) as seq:
        handle = pool.attend(0, query(rng), [seq])
        handle.wait()

        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert "parent" in repr(seq)
                for call in (lambda: seq.tokens, seq.close, handle.wait, lambda: pool.attend(0, query(rng), [seq])):
                    with pytest.raises(kvpool.ForkError):
                        call()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_part_that_is_missing_or_merged_twice_is_no_result(rng):
    out, lse = query(rng), np.zeros((4, 1), np.float32)

    def part(begin, end):
        return PartialAttention.from_lse(out, lse, base="e", order="heads_first", covers=[[(begin, end)]])

    both = part(0, 10).merge(part(20, 30))
    with pytest.raises(kvpool.StateError) as missing:
        both.finish(tokens=[30])
    assert (missing.value.begin, missing.value.end) == (10, 20)
    with pytest.raises(kvpool.ArgumentError):
        both.merge(part(25, 26))
    with pytest.raises(kvpool.StateError):
        part(0, 10).finish(tokens=[9])
    with pytest.raises(kvpool.ArgumentError, match="pass tokens"):
        part(0, 10).finish()
    target = np.full(out.shape, 7, np.float32)
    with pytest.raises(kvpool.StateError):
        both.finish(tokens=[30], out=target)
    assert (target == 7).all()
    assert both.merge(part(10, 20)).finish(tokens=[30], out=target) is target
    np.testing.assert_allclose(target, out, atol=2e-6)


def test_wrong_arguments_are_told_and_change_nothing(rng):
    with pool_of(hbm=4) as pool, pool_of(hbm=4) as other:
        addrs = pool.alloc(2)
        q = query(rng)
        seq, foreign = pool.sequence(addrs, tokens=20), other.sequence(other.alloc(1))
        closed = pool.sequence(addrs)
        closed.close()
        wrong = kvpool.ArgumentError
        for error, match, call in (
            (wrong, "2 layers", lambda: pool.attend(2, q, [seq])),
            (wrong, "layer", lambda: pool.attend(-1, q, [seq])),
            (wrong, "shape", lambda: pool.attend(0, q, [seq, seq])),
            (wrong, "shape", lambda: pool.attend(0, query(rng, dim=8), [seq])),
            (wrong, "heads", lambda: pool.attend(0, query(rng, heads=3), [seq])),
            (wrong, "format 'd'", lambda: pool.attend(0, q.astype(np.float64), [seq])),
            (wrong, "last 30", lambda: pool.attend(0, query(rng, 30), [seq], query_tokens=[30])),
            (wrong, "query_tokens has 2", lambda: pool.attend(0, q, [seq], query_tokens=[1, 1])),
            (wrong, "scale", lambda: pool.attend(0, q, [seq], scale=float("nan"))),
            (kvpool.ArgumentTypeError, "seqs", lambda: pool.attend(0, q, [addrs])),
            (kvpool.ArgumentTypeError, "q must be", lambda: pool.attend(0, "q", [seq])),
            (kvpool.NotOwner, "another pool", lambda: pool.attend(0, q, [foreign])),
            (kvpool.StateError, "closed", lambda: pool.attend(0, q, [closed])),
            (wrong, "hold", lambda: pool.sequence(addrs, tokens=33)),
            (wrong, "hold", lambda: setattr(seq, "tokens", 33)),
            (kvpool.NotOwner, "instance 5", lambda: pool.sequence([int(addrs[0]) | 5 << 50])),
            (kvpool.StaleAddress, "freed or moved", lambda: seq.append([int(addrs[0]) + (1 << 24)])),
        ):
            with pytest.raises(error, match=match):
                call()
        assert (seq.tokens, len(seq.addrs)) == (20, 2)
        seq.close()
        pool.free(addrs)
        assert pool.stats().hbm.free == 4
        pool.audit()


@pytest.mark.parametrize(
    ("layout", "match"),
    [(kvpool.RawLayout(64), "KVLayout"), (layout_of(dtype="int8"), "int8"), (layout_of(dtype="float8_e5m2"), "e5m2")],
)
def test_blocks_that_attention_cannot_read_are_refused(layout, match):
    with pool_of(layout) as pool:
        addrs = pool.alloc(1)
        with pytest.raises(kvpool.Unsupported, match=match):
            pool.sequence(addrs)
        pool.free(addrs)


def test_a_stream_is_for_pools_on_a_gpu(rng):
    with pool_of() as pool, pool.sequence(pool.alloc(1)) as seq:
        q = query(rng, 1)
        with pytest.raises(kvpool.ArgumentError, match="has no streams"):
            pool.attend(0, q, [seq], stream=0)
        with pytest.raises(kvpool.ArgumentTypeError, match="stream"):
            pool.attend(0, q, [seq], stream="default")
        plan = pool.attend(0, q, [seq]).explain()
        assert plan.gpu_kernel is None
        assert plan.sequences[0].on_gpu == 0
