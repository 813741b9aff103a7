"""Views of a GPU's memory, and adopted tensors on one."""

from __future__ import annotations


def test_a_view_on_a_gpu_is_for_dlpack_and_the_cuda_array_interface(on_fake):
    on_fake("""
with small_pool(device="cuda:1", layout=small_layout(dtype="float16")) as pool:
    view = pool.tensor(HBM)
    assert view.__dlpack_device__() == (2, 1)
    interface = view.__cuda_array_interface__
    assert (interface["version"], interface["typestr"], interface["stream"]) == (3, "<f2", None)
    assert interface["shape"] == view.shape and interface["strides"] == view.strides
    address, read_only = interface["data"]
    assert not read_only
    kind, ordinal = ctypes.c_int(), ctypes.c_int()
    call("cuPointerGetAttribute", ctypes.byref(kind), 2, ctypes.c_ulonglong(address + view.nbytes - 1))
    call("cuPointerGetAttribute", ctypes.byref(ordinal), 9, ctypes.c_ulonglong(address))
    assert (kind.value, ordinal.value) == (2, 1)
    assert not hasattr(pool.tensor(DRAM), "__cuda_array_interface__")
    assert pool.tensor(DRAM).__dlpack_device__() == (1, 0)
""")


def test_types_without_a_name_are_integers_of_their_size_in_the_cuda_array_interface(on_fake):
    on_fake("""
names = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "float8_e4m3fn": "|u1", "float8_e5m2": "|u1",
         "int8": "|i1"}
for dtype, typestr in names.items():
    with small_pool(device="cuda", layout=small_layout(dtype=dtype)) as pool:
        assert pool.tensor(HBM).__cuda_array_interface__["typestr"] == typestr
""")


def test_a_consumer_may_name_its_stream_as_in_dlpack(on_fake):
    on_fake("""
with small_pool(device="cuda") as pool:
    view = pool.tensor(HBM)
    for stream in (None, -1, 1, 2, new_stream()):
        assert '"dltensor"' in repr(view.__dlpack__(stream=stream))
    assert '"dltensor_versioned"' in repr(view.__dlpack__(stream=1, max_version=(1, 1), dl_device=(2, 0)))
    raises(kvpool.ArgumentError, lambda: view.__dlpack__(stream=0), "stream 0")
    raises(kvpool.ArgumentTypeError, lambda: view.__dlpack__(stream="1"), "stream")
    raises(kvpool.Unsupported, lambda: view.__dlpack__(dl_device=(1, 0)), "on cuda:0")
    raises(kvpool.Unsupported, lambda: view.__dlpack__(copy=True), "copy")
""")


def test_numpy_learns_that_it_cannot_read_a_gpu(on_fake):
    on_fake("""
with small_pool(device="cuda") as pool:
    view = pool.tensor(HBM)
    for read in (lambda: np.asarray(view), lambda: np.array(view), view.numpy, view.__array__):
        raises(kvpool.Unsupported, read, "this memory is on cuda:0", "torch.from_dlpack")
    try:
        memoryview(view)
    except (kvpool.Unsupported, BufferError):
        pass
    else:
        raise AssertionError("a buffer of device memory")
    assert np.asarray(pool.tensor(DRAM)).shape == view.shape
""")


def test_a_view_keeps_the_memory_of_a_closed_pool(on_fake):
    on_fake("""
pool = small_pool(device="cuda")
capsule = pool.tensor(HBM).__dlpack__()
view = pool.tensor(HBM)
pool.close()
del pool
assert fake_counts("bytes") == 2 << 20
del view
assert fake_counts("bytes") == 2 << 20
del capsule
assert left() == "", left()
""")


def test_an_engines_tensors_on_a_gpu_are_adopted_by_either_protocol(on_fake):
    on_fake("""
layout = small_layout()  # two layers, [2, 2, 4, 4] of float32 each
engine = kvpool.Pool(small_layout(layers=1), 6, device="cuda:0")
stream = new_stream()  # its context is current: allocations below are on this GPU
by_interface = EngineTensor((6, 2, 2, 4, 4))
pool = kvpool.Pool(layout, hbm=[engine.tensor(HBM), by_interface], dram_blocks=6, audit=True)
assert pool.arena(HBM).device == "cuda:0" and not pool.arena(HBM).owned and pool.arena(DRAM).pinned
assert pool.stats().device_bytes == 0
first = content(engine, HBM)
addrs = store(pool, prompt(2))
ids = kvpool.block_ids(addrs)
first[ids] = 7
pool.swap_out(2, stream=stream)
first[:] = 0
with pool.match(prompt(2)) as hit, pool.swap_in(hit.addrs) as held:
    assert (first[kvpool.block_ids(held.addrs)] == 7).all()
pool.close()
assert (fake_counts("pageable")) == 0
""")


def test_adopted_tensors_of_different_devices_or_layouts_are_refused(on_fake):
    on_fake("""
layout = small_layout()
one, two = (kvpool.Pool(small_layout(layers=1), 6, device=f"cuda:{i}") for i in (0, 1))
on_cpu = np.zeros((6, 2, 2, 4, 4), np.float32)
adopt = lambda tensors, **options: lambda: kvpool.Pool(layout, hbm=tensors, **options)
a, b = one.tensor(HBM), two.tensor(HBM)
raises(kvpool.LayoutMismatch, adopt([a, b]), "not on the device of tensor 0")
raises(kvpool.LayoutMismatch, adopt([on_cpu, a]), "not on the device of tensor 0")
raises(kvpool.ArgumentError, adopt([a, a], device="cuda:1"), "cuda:1", "cuda:0")
raises(kvpool.ArgumentError, adopt([on_cpu, on_cpu.copy()], device="cuda:0"), "on the CPU")
raises(kvpool.LayoutMismatch, adopt([a, a]), "overlap")

class Changed:
    def __init__(self, **changes):
        self.__cuda_array_interface__ = a.__cuda_array_interface__ | changes

for changes, text in [
    ({"data": (a.__cuda_array_interface__["data"][0], True)}, "read-only"),
    ({"data": (64, False)}, "does not know its memory"),
    ({"typestr": "f"}, "has no size"),
    ({"typestr": "<fx"}, "invalid type"),
    ({"strides": (1, 2)}, ""),
    ({"shape": None}, "is not one"),
    ({"data": None}, "is not one"),
]:
    raises(kvpool.LayoutMismatch, adopt([Changed(**changes), b]), text)

class Managed:
    def __dlpack_device__(self):
        return (13, 0)
    def __dlpack__(self, **_):
        raise AssertionError("asked for what cannot be used")
raises(kvpool.Unsupported, adopt([Managed()]), "neither on the CPU nor on a CUDA device")
""")
