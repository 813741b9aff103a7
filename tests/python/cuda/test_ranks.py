"""Logical instances with ranks on GPUs, over a library that stands in for the CUDA driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transfer.kit import SECRET, Child, address_of, eventually

import kvpool
from kvpool import KVLayout, ParallelConfig

TESTS = Path(__file__).resolve().parents[2]
LAYOUT = KVLayout(layers=4, kv_heads=4, head_dim=8, dtype="float16", block_tokens=4)
TP2 = ParallelConfig(tp=2)
STAGES = ParallelConfig(pp=2)

# In each process: its part of the blocks as NumPy sees it. Every word of what the whole block has at one place is the
# same number, no matter which rank holds it.
SETUP = """
import ctypes
from kit import content
fake = ctypes.CDLL(os.environ["KVPOOL_CUDA_LIBRARY"])
fake.fake_cuda_count.restype = ctypes.c_size_t
fake.fake_cuda_host.restype = ctypes.c_void_p
fake.fake_cuda_host.argtypes = [ctypes.c_ulonglong, ctypes.c_size_t]

def whole(seed):
    raw = np.random.default_rng(seed).integers(0, 1 << 16, layout.shape, np.uint16)
    return raw if part is None else raw[part]

def layers_of(addr):
    place = kvpool.decode_address(addr)
    if hbm and place.medium == kvpool.HBM:
        return [tensor.words[place.block] for tensor in hbm]
    # Beside adopted tensors, DRAM is seen as bytes.
    return list(content(memory, place.medium)[place.block].view(np.uint16).reshape(whole(0).shape))

def put(addrs, seed):
    for i, addr in enumerate(addrs):
        for layer, values in zip(layers_of(addr), whole(seed + i), strict=True):
            layer[...] = values

def holds(addrs, seed):
    return [
        all((layer == values).all() for layer, values in zip(layers_of(addr), whole(seed + i), strict=True))
        for i, addr in enumerate(addrs)
    ]
"""
ENGINE = """
# As an engine's allocator has it: one allocation of the driver, cut into the tensors of the layers.
import math
context, base = ctypes.c_void_p(), ctypes.c_ulonglong()
number = int(device.partition(":")[2])
assert fake.cuInit(0) == 0
assert fake.cuDevicePrimaryCtxRetain(ctypes.byref(context), number) == 0
assert fake.cuCtxPushCurrent_v2(context) == 0
shape = (blocks, 2, *layer_shape)
nbytes = 2 * math.prod(shape)
assert fake.cuMemAlloc_v2(ctypes.byref(base), ctypes.c_size_t(layers * nbytes + 4096)) == 0
class Tensor:
    def __init__(self, at):
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": "<f2", "data": (at, False), "strides": None, "version": 3}
        host = fake.fake_cuda_host(at, ctypes.c_size_t(nbytes))
        self.words = np.ctypeslib.as_array((ctypes.c_uint16 * (nbytes // 2)).from_address(host)).reshape(shape)
hbm = [Tensor(base.value + 4096 + layer * nbytes) for layer in range(layers)]
"""


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("python/transfer/test_ranks.py", ""),
        ("python/transfer/test_ranks_faults.py", ""),
        ("multiprocess/test_ranks.py", "killed or comes_back"),
    ],
)
def test_the_suite_of_ranks_passes_on_a_gpu(fake_cuda: Path, file: str, chosen: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "KVPOOL_LONG"} | {
        "KVPOOL_CUDA_LIBRARY": str(fake_cuda),
        "KVPOOL_TEST_DEVICE": "cuda:0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(TESTS / file), "-k", chosen],
        cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


class Crew:
    """A scheduler in this process, and a process for each rank; or one pool in a process."""

    def __init__(
        self, start: Callable[[], Child], name: str, parallel: ParallelConfig | None, devices: list[str],
        settings: dict[str, Any], adopts: bool,
    ) -> None:  # fmt: skip
        common = {"secret": SECRET, "lease_s": 10.0, "check_memory": False, "huge_pages": "never"} | settings
        self.name = name
        self.scheduler: kvpool.Pool | None = None
        self.members: list[Child] = []
        if parallel is None:
            self._member(start(), devices[0], LAYOUT, None, adopts)
            self.members[0](
                "memory = pool = kvpool.Pool(layout, 0 if hbm else blocks, 4, device=device, hbm=hbm, name=name,"
                " audit=True, **common); None",
                name=name, common=common,
            )  # fmt: skip
            return
        self.scheduler = kvpool.Pool(LAYOUT, 8, 4, parallel=parallel, name=name, audit=True, **common)
        for part, device in zip(parallel.slices(LAYOUT), devices, strict=True):
            child = start()
            assert part.layout is not None
            self._member(child, device, part.layout, part.index, adopts)
            child(
                "memory = rank = kvpool.RankArena.join(ticket, hbm=hbm, device=device, **common); None",
                ticket=self.scheduler.ranks.export(part.rank), common=common,
            )  # fmt: skip
        self.scheduler.ranks.wait(30)

    def _member(self, child: Child, device: str, own: KVLayout, part: Any, adopts: bool) -> None:
        child("layout = whole_layout; hbm = None\n" + SETUP, whole_layout=LAYOUT, part=part, device=device, blocks=8)
        if adopts and device != "cpu":
            child(ENGINE, layers=own.layers, layer_shape=own.shape[2:])
        self.members.append(child)

    def __call__(self, code: str, **values: Any) -> Any:
        """Runs it with the pool: of the scheduler, or of the only member."""
        if self.scheduler is None:
            return self.members[0](code, **values)
        scope = values | {"pool": self.scheduler, "kvpool": kvpool}
        return eval(code, scope)

    def put(self, addrs: Any, seed: int) -> None:
        for member in self.members:
            member("put(addrs, seed)", addrs=addrs, seed=seed)

    def holds(self, addrs: Any, seed: int) -> bool:
        return all(all(member("holds(addrs, seed)", addrs=addrs, seed=seed)) for member in self.members)

    def close(self) -> None:
        if self.scheduler is not None:
            self.scheduler.close()


@contextmanager
def crews(
    library: Path, a: tuple[ParallelConfig | None, list[str]], b: tuple[ParallelConfig | None, list[str]],
    adopts: bool = False, **settings: Any,
) -> Iterator[tuple[Crew, Crew]]:  # fmt: skip
    """Two connected instances."""
    children: list[Child] = []
    made: list[Crew] = []

    def start() -> Child:
        children.append(Child(KVPOOL_CUDA_LIBRARY=str(library)))
        return children[-1]

    try:
        for name, (parallel, devices) in (("a", a), ("b", b)):
            made.append(Crew(start, name, parallel, devices, settings, adopts))
        address = made[1]("pool.peers.listen(address)", address=address_of("shm"))
        assert made[0]("pool.peers.connect(address, timeout=60)", address=address) == "b"
        yield made[0], made[1]
    finally:
        for crew in made:
            crew.close()
        for child in children:
            child.close()


def send(source: Crew, target: Crew, seed: int, medium: int, there: int) -> None:
    addrs = source("pool.alloc(3, medium=medium).tolist()", medium=medium)
    source.put(addrs, seed)
    source(
        "pool.transfer(name, addrs, medium=medium, private=b'x').wait(60).addrs.tolist()",
        name=target.name, addrs=addrs, medium=there,
    )  # fmt: skip
    got = target("pool.inbox.receive(30).take().tolist()")
    assert set(kvpool.media(got)) == {there}
    assert target.holds(got, seed)
    for crew, blocks in ((source, addrs), (target, got)):
        crew("pool.free(addrs)", addrs=blocks)


SIDES = {
    "gpus to gpus": ((TP2, ["cuda:0", "cuda:1"]), (STAGES, ["cuda:1", "cuda:0"])),
    "gpus to cpus": ((TP2, ["cuda:0", "cuda:1"]), (STAGES, ["cpu", "cpu"])),
    "gpus to gpus that they do not reach": ((TP2, ["cuda:0", "cuda:1"]), (STAGES, ["cuda:2", "cuda:3"])),
    "gpus to one gpu": ((STAGES, ["cuda:0", "cuda:1"]), (None, ["cuda:0"])),
    "gpu to gpu": ((None, ["cuda:0"]), (None, ["cuda:1"])),
}


@pytest.mark.parametrize("adopts", [False, True], ids=["own", "adopted"])
@pytest.mark.parametrize("sides", SIDES)
def test_ranks_in_separate_processes_send_to_each_other_and_back(fake_cuda: Path, sides: str, adopts: bool) -> None:
    with crews(fake_cuda, *SIDES[sides], adopts=adopts) as (a, b):
        seed = 0
        for medium, there in [(1, 1), (1, 2), (2, 1), (2, 2)]:
            send(a, b, seed := seed + 10, medium, there)
            send(b, a, seed := seed + 10, medium, there)
        for crew in (a, b):
            for member in crew.members:
                assert member("fake.fake_cuda_count(b'pageable')") == 0


@pytest.mark.parametrize("adopts", [False, True], ids=["own", "adopted"])
def test_ranks_send_by_kernels(
    fake_cuda: Path, host_kernels: Path, monkeypatch: pytest.MonkeyPatch, adopts: bool
) -> None:
    monkeypatch.setenv("FAKE_CUDA_KERNELS", str(host_kernels))
    with crews(fake_cuda, *SIDES["gpus to gpus"], adopts=adopts) as (a, b):
        count = "fake.fake_cuda_count(b'cuLaunchKernel')"
        before = [member(count) for crew in (a, b) for member in crew.members]
        for seed, medium, there in [(10, 1, 1), (30, 1, 2), (50, 2, 1)]:
            send(a, b, seed, medium, there)
            send(b, a, seed + 10, medium, there)
        after = [member(count) for crew in (a, b) for member in crew.members]
        assert all(x < y for x, y in zip(before, after, strict=True)), (before, after)


# Two ranks that have a communicator have different GPUs.
BY_NCCL = {
    "tp 1 to tp 2": (False, (None, ["cuda:0"]), (TP2, ["cuda:1", "cuda:2"])),
    "tp 2 to tp 4": (False, SIDES["gpus to gpus"][0], (ParallelConfig(tp=4), ["cuda:2", "cuda:3", "cuda:0", "cuda:2"])),
    "heads to stages, adopted": (True, *SIDES["gpus to gpus that they do not reach"]),
}


@pytest.mark.parametrize("sides", BY_NCCL)
def test_ranks_send_to_each_other_by_nccl_and_back(fake_cuda: Path, fake_nccl: Path, sides: str) -> None:
    adopts, *both = BY_NCCL[sides]
    with crews(fake_cuda, *both, adopts=adopts, routes=("nccl",), nccl=str(fake_nccl), nccl_init_s=60.0) as (a, b):
        for member in (*a.members, *b.members):
            member("nccl = ctypes.CDLL(path)\nnccl.fake_nccl_count.restype = ctypes.c_size_t", path=str(fake_nccl))
        for seed, medium, there in [(10, 1, 1), (30, 1, 2), (50, 2, 1)]:
            send(a, b, seed, medium, there)
            send(b, a, seed + 10, medium, there)
        for member in (*a.members, *b.members):
            assert member("nccl.fake_nccl_count(b'messages')") > 0
            assert member("nccl.fake_nccl_count(b'mismatches')") == 0
            assert member("fake.fake_cuda_count(b'pageable')") == 0


@pytest.mark.parametrize("adopts", [False, True], ids=["own", "adopted"])
def test_memory_that_an_engine_allocated_is_opened_once_for_all_its_tensors(fake_cuda: Path, adopts: bool) -> None:
    with crews(
        fake_cuda, (TP2, ["cuda:0"] * 2), (None, ["cuda:1"]), adopts=adopts, routes=("cuda_ipc",)
    ) as (a, b):  # fmt: skip
        send(a, b, 10, 1, 1)
        send(b, a, 20, 1, 1)
        for crew in (a, b):
            for member in crew.members:
                # Each of the two ranks of a opens the memory of b, and b opens the memory of both.
                opened = {"a": 1, "b": 2}[crew.name] if adopts else 0
                assert member("fake.fake_cuda_count(b'cuIpcOpenMemHandle')") == opened
        a("pool.peers.disconnect('b')")
        for crew in (a, b):
            opened = {"a": 1, "b": 2}[crew.name] if adopts else 0
            for member in crew.members:
                closed = "fake.fake_cuda_count(b'cuIpcCloseMemHandle')"
                eventually(lambda member=member, opened=opened, closed=closed: member(closed) == opened)


def test_the_gpu_of_a_rank_copies_between_its_tiers(fake_cuda: Path) -> None:
    with crews(fake_cuda, (TP2, ["cuda:0", "cpu"]), (None, ["cuda:1"])) as (a, b):
        pool = a.scheduler
        assert pool is not None
        tokens = list(range(12))
        addrs = pool.alloc(3)
        a.put(addrs.tolist(), 30)
        pool.insert(tokens, addrs).close()
        low = pool.swap_out(3)
        assert set(kvpool.media(low)) == {kvpool.DRAM}
        a.put(addrs.tolist(), 90)  # the old content must not be sent
        with pool.match(tokens) as hit:
            assert a.holds(hit.addrs.tolist(), 30)
            pool.transfer_with_insert("b", tokens, hit.addrs).wait(30)
            with pool.swap_in(hit.addrs) as high:
                assert a.holds(high.addrs.tolist(), 30)
        found = b("with pool.match(tokens) as hit: found = hit.addrs.tolist()\nfound", tokens=tokens)
        assert len(found) == 3
        assert b.holds(found, 30)


@pytest.mark.parametrize("adopts", [False, True], ids=["own", "adopted"])
@pytest.mark.parametrize("route", ["cuda_ipc", "sock", "nccl"])
def test_killing_a_rank_on_a_gpu_loses_its_instance_and_no_block_of_a_peer(
    fake_cuda: Path, fake_nccl: Path, route: str, adopts: bool
) -> None:
    with crews(
        fake_cuda, (TP2, ["cuda:0", "cuda:1"]), (None, ["cuda:1"]), adopts=adopts, routes=(route,), nccl=str(fake_nccl)
    ) as (a, b):  # fmt: skip
        assert a.scheduler is not None
        addrs = a.scheduler.alloc(4)
        a.put(addrs.tolist(), 10)
        for member in a.members:
            member("fake.fake_cuda_set(b'delay_us', 40_000)")  # of 32 pieces: the write is under way for a second
        handle = a.scheduler.transfer("b", addrs)
        a.members[1].kill(signal.SIGKILL)
        assert isinstance(handle.exception(60), kvpool.PeerLost)
        a.members[0]("fake.fake_cuda_set(b'delay_us', 0)")  # or each call on the way out takes as long
        with pytest.raises(kvpool.PeerLost, match="rank 1 of this instance is lost"):
            a.scheduler.alloc(1)
        eventually(lambda: b("pool.peers.list()") == [], seconds=30)
        eventually(lambda: b("pool.stats().hbm.free") == 8, seconds=30)
        b("pool.audit(); None")


def test_a_rank_whose_gpu_fails_says_so_and_its_instance_is_lost(fake_cuda: Path) -> None:
    with crews(fake_cuda, (TP2, ["cuda:0", "cuda:1"]), (None, ["cuda:1"])) as (a, b):
        assert a.scheduler is not None
        addrs = a.scheduler.alloc(2)
        a.members[1]("fake.fake_cuda_lose(1, 719)")
        with pytest.raises(kvpool.PeerLost):
            a.scheduler.transfer("b", addrs).wait(60)
        eventually(lambda: a.members[1]("type(rank.lost).__name__") == "DeviceLost", seconds=30)
        with pytest.raises(kvpool.PeerLost, match="rank 1 of this instance is lost"):
            eventually(lambda: a.scheduler is None or a.scheduler.alloc(1) is None, seconds=30)
        eventually(lambda: b("pool.peers.list()") == [], seconds=30)


def test_calls_that_a_rank_cannot_do_with_or_without_a_gpu_are_refused(on_fake: Any) -> None:
    on_fake("""
settings = dict(check_memory=False, secret="ranks", lease_s=10.0)
pool = kvpool.Pool(small_layout(), 4, 4, parallel=kvpool.ParallelConfig(tp=2), **settings)
ticket = pool.ranks.export(0)
raises(kvpool.Unsupported, lambda: kvpool.RankArena.join(ticket, routes=("nccl", "sock"), **settings),
       "nccl", "HBM on a GPU")
raises(kvpool.Unsupported,
       lambda: kvpool.RankArena.join(ticket, device="cuda:0", routes=("nccl",), nccl="/nowhere", **settings),
       "kvpool[nccl")
assert left() == "", left()
ranks = [kvpool.RankArena.join(pool.ranks.export(i), device=f"cuda:{i}", **settings) for i in range(2)]
pool.ranks.wait(10)
addrs = pool.alloc(1)
for call in (lambda: pool.transfer("nobody", addrs, stream=0), lambda: pool.swap_out(1, stream=0)):
    raises(kvpool.Unsupported, call, "streams of their own processes")
pool.close()
for rank in ranks:
    rank.close()
del ranks, rank
assert left() == "", left()
""")
