"""Objects whose own methods lie, raise, or never end, for every argument: a typed error, and nothing changed."""

from __future__ import annotations

import itertools
from array import array
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
from kit import prompt, refused, small_layout, small_pool, state_of, store

import kvpool

pytestmark = pytest.mark.timeout(120)


class Oops(Exception):
    pass


class Sized:
    """A sequence that says that it has n items."""

    def __init__(self, n: Any, item: Any = None) -> None:
        self.n, self.item = n, item

    def __len__(self) -> Any:
        if isinstance(self.n, Exception):
            raise self.n
        return self.n

    def __getitem__(self, at: int) -> Any:
        if isinstance(self.item, Exception):
            raise self.item
        return self.item


class Raising:
    """Whatever is asked of it."""

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise Oops("asked")

    __index__ = __int__ = __float__ = __bool__ = __len__ = __getitem__ = __iter__ = __repr__ = __str__ = _raise
    __dlpack__ = __dlpack_device__ = __cuda_stream__ = __array__ = __eq__ = __hash__ = __next__ = _raise

    @property
    def ptr(self) -> Any:
        raise Oops("asked")


class Number(int):
    def __repr__(self) -> str:
        raise Oops("asked")

    __str__ = __format__ = __repr__  # type: ignore[assignment]


class Text(str):
    __slots__ = ()

    def __repr__(self) -> str:
        raise Oops("asked")

    __str__ = __format__ = __repr__  # type: ignore[assignment]


HOSTILE: dict[str, Any] = {
    "a length of 2**62": Sized(2**62, [1, 2, 3, 4]),
    "a length of 2**31": Sized(2**31, [1, 2, 3, 4]),
    "a negative length": Sized(-1),
    "a length that is no int": Sized("3"),
    "a length that raises": Sized(Oops("length")),
    "an item that raises": Sized(3, Oops("item")),
    "a length that does not end": Sized(3, IndexError("no such item")),
    "everything raises": Raising(),
    "a list of what raises": [Raising()],
    "an iterator": iter([[1, 2, 3, 4]]),
    "a generator": (number for number in range(4)),
    "no end": itertools.count(),
    "text": "text",
    "hostile text": Text("\ud800"),
    "bytes": b"12345",
    "None": None,
    "nested": [[[1]]],
    "a dict": {1: 2},
    "a set": {1, 2},
    "an object": object(),
    "a type": int,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "too many digits": 10**5000,
    "too many negative digits": -(10**5000),
    "a list of too many digits": [10**5000],
    "a hostile number": Number(-1),
    "a hostile huge number": Number(10**30),
    "a complex number": 1j,
    "0-d": np.array(3),
    "2-d": np.zeros((2, 2), np.int32),
    "2-d of three": np.zeros((2, 3), np.uint64),
    "floats": np.zeros(4),
    "objects": np.array([None, 1], object),
    "big-endian": np.zeros(4, ">u8"),
    "read-only": np.broadcast_to(np.int32(7), 4),
    "no end of elements": np.broadcast_to(np.uint64(1 << 48), 1 << 40),
    "no end of tokens": np.broadcast_to(np.int64(1), 1 << 40),
    "bytes in two dimensions": memoryview(bytes(16)).cast("B", (4, 4)),
    "every other byte": memoryview(bytes(16))[::2],
    "an array of floats": array("d", [1.0]),
}  # fmt: skip


def hostile() -> Any:
    return pytest.mark.parametrize("name", HOSTILE)


def check(call: Any, pools: list[kvpool.Pool]) -> None:
    """The call works, or raises one of our errors and has changed nothing."""
    before = [state_of(pool) for pool in pools]
    try:
        result = call()
    except kvpool.Error:
        after = [state_of(pool) for pool in pools]
        for state in (*before, *after):
            for counter in ("match_calls", "requested_tokens", "matched_tokens", "allocated_blocks", "freed_blocks"):
                del state[counter]
        assert after == before
        return
    for one in result if isinstance(result, list) else [result]:
        if hasattr(one, "close"):
            one.close()


# For each call, the arguments that are passed when it is not their turn.
LOCAL: dict[str, dict[str, Any]] = {
    "alloc": {"n": 1, "medium": kvpool.HBM, "evict": False, "instance": None, "timeout": 1, "stream": None},
    "free": {"addrs": "mine"},
    "match": {"tokens": prompt(2), "namespace": "", "into": kvpool.HBM, "stream": None},
    "batch.match": {"prompts": [prompt(1)], "namespace": ""},
    "insert": {"tokens": prompt(2, 5), "addrs": "mine", "namespace": "", "free_duplicates": False},
    "batch.insert": {"prompts": [], "namespace": "", "free_duplicates": False},
    "delete": {"tokens": prompt(2), "namespace": "", "descendants": False},
    "evict": {"n": 0, "medium": kvpool.DRAM},
    "swap_out": {"n": 0, "stream": None, "wait": True},
    "swap_in": {"addrs": [], "into": None, "stream": None, "wait": True},
    "adopt": {"blocks": []},
    "explain_match": {"tokens": prompt(2), "namespace": ""},
    "tensor": {"medium": kvpool.HBM},
    "arena": {"medium": kvpool.HBM},
    "subscribe": {"capacity_tokens": 100, "include_cached": False},
}
AT_PEERS: dict[str, dict[str, Any]] = {
    "alloc": {"n": 0, "medium": kvpool.HBM, "evict": False, "instance": "peer", "timeout": 5},
    "transfer": {
        "peer": "peer", "addrs": "mine", "to": None, "medium": kvpool.HBM, "evict": True, "private": b"",
        "priority": "decode", "strategy": "auto", "route": None, "checksum": False, "stream": None, "layerwise": True,
        "timeout": 5,
    },
    "transfer_with_insert": {"peer": "peer", "tokens": prompt(2, 3), "addrs": "mine", "namespace": "", "private": None},
    "batch.transfer": {"specs": []},
    "fetch": {"peer": "peer", "addrs": "theirs", "to": None, "medium": kvpool.HBM, "evict": True, "priority": "decode",
              "route": None, "checksum": False, "timeout": 5},
    "fetch_with_insert": {"peer": "peer", "tokens": prompt(2, 4), "namespace": "", "medium": kvpool.HBM, "evict": True,
                          "priority": "decode", "timeout": 5},
    "peers.match": {"peer": "peer", "tokens": prompt(2, 4), "namespace": "", "hold": 5, "timeout": 5, "wait": True},
    "inbox.receive": {"timeout": 0},
    "peers.disconnect": {"peer": "nobody"},
    "peers.listen": {"address": "unix:@"},
    "peers.connect": {"address": "unix:@kvpool-nobody", "timeout": 0, "wait": False},
    "inbox.on_received": {"callback": None},
    "peers.on_change": {"callback": None},
    "ranks.export": {"rank": 0, "address": None},
    "ranks.wait": {"timeout": 0},
}  # fmt: skip


@hostile()
def test_calls_of_a_pool(name):
    with small_pool(audit=False) as pool:
        store(pool, prompt(2))
        for verb, arguments in LOCAL.items():
            for argument in arguments:
                mine = pool.alloc(2)
                given = {key: mine if isinstance(value, str) and value == "mine" else value
                         for key, value in arguments.items()} | {argument: HOSTILE[name]}  # fmt: skip
                check(lambda verb=verb, given=given: attrgetter(verb)(pool)(**given), [pool])
                pool.evict(100, kvpool.MIXED)
                for address in mine:
                    try:
                        pool.free([address])
                    except kvpool.Error:
                        pass
                store(pool, prompt(2))


@hostile()
def test_batches_of_a_pool_and_of_an_index(name):
    value = HOSTILE[name]
    index = kvpool.PromptIndex(block_tokens=4)
    with small_pool(audit=False) as pool:
        mine = pool.alloc(2)
        for call in (
            lambda: pool.batch.match([prompt(1), value]),
            lambda: pool.batch.insert([(prompt(1, 7), mine[:1]), value]),
            lambda: pool.batch.insert([(prompt(1, 7), mine[:1]), (value, mine[1:])]),
            lambda: pool.batch.insert([(prompt(1, 7), mine[:1]), (prompt(1, 8), value)]),
            lambda: index.batch.match([prompt(1), value]),
            lambda: index.batch.insert([(prompt(1), [1]), value]),
            lambda: index.batch.insert([(prompt(1), [1]), (value, value)]),
        ):
            check(call, [pool])


@hostile()
def test_calls_of_the_indices(name):
    value = HOSTILE[name]
    index, router = kvpool.PromptIndex(block_tokens=4), kvpool.InstanceIndex(block_tokens=4)
    index.insert(prompt(2), [1, 2]).close()
    router.insert(prompt(2), 1)
    hits = router.find(prompt(2))
    for call in (
        lambda: kvpool.PromptIndex(value), lambda: kvpool.PromptIndex(4, value),
        lambda: kvpool.InstanceIndex(value), lambda: kvpool.InstanceIndex(4, blocks_max=value),
        lambda: index.match(value), lambda: index.match(prompt(1), value), lambda: index.batch.match(value),
        lambda: index.peek(value), lambda: index.insert(value, [1]), lambda: index.insert(prompt(1), value),
        lambda: index.batch.insert(value), lambda: index.batch.insert([], value),
        lambda: index.delete(value), lambda: index.delete(prompt(1), descendants=value), lambda: index.evict(value),
        lambda: router.insert(value, 1), lambda: router.insert(prompt(1), value),
        lambda: router.insert(prompt(1), 1, value), lambda: router.insert(prompt(1), 1, 0, value),
        lambda: router.insert(prompt(1), 1, lasting=value),
        lambda: router.match(value), lambda: router.match(prompt(1), value), lambda: router.match_arrays(value),
        lambda: router.find(value), lambda: router.find(prompt(1), value), lambda: router.remove(value, 1),
        lambda: router.remove(prompt(1), value), lambda: router.remove(prompt(1), 1, value),
        lambda: router.remove_instance(value), lambda: router.expire(value), lambda: router.blocks(value),
        lambda: hits.level(value), lambda: hits.instances(value, 1), lambda: hits.instances(0, value),
    ):  # fmt: skip
        check(call, [])
        index.audit()
        router.audit()


@hostile()
def test_calls_with_keys(name):
    value = HOSTILE[name]
    index = kvpool.KeyedIndex(8)
    verbs = ("exists", "count", "match", "forget", "evict")
    keys, row = [b"12345678"], np.zeros(small_layout().block_bytes, np.uint8)
    with small_pool() as pool, kvpool.KeyedCache(pool, 2, 8) as cache:
        mine = pool.alloc(1)
        cache.put(keys, row)
        named, other = kvpool.KeyedCache(pool, 1, 8, "kv"), [b"another1"]
        for call in (
            lambda: kvpool.KeyedIndex(value), lambda: index.put(value, [1]), lambda: index.put(keys, value),
            lambda: index.put([value], [1]), lambda: index.match(keys, value),
            *(lambda verb=verb: getattr(index, verb)(value) for verb in verbs),
            *(lambda verb=verb: getattr(cache, verb)(value) for verb in verbs),
            lambda: kvpool.KeyedCache(value, 1), lambda: kvpool.KeyedCache(pool, value),
            lambda: kvpool.KeyedCache(pool, 1, value), lambda: kvpool.KeyedCache(pool, 1, 8, value),
            lambda: pool.peers.match_keys(value, named, keys), lambda: pool.peers.match_keys("b", value, keys),
            lambda: pool.peers.match_keys("b", named, value), lambda: pool.peers.fetch_keys(value, named, other),
            lambda: pool.peers.fetch_keys("b", value, other), lambda: pool.peers.fetch_keys("b", named, value),
            lambda: pool.peers.fetch_keys("b", named, other, timeout=value),
            lambda: pool.peers.fetch_keys("b", named, other, ask_timeout=value),
            lambda: cache.save(value, mine), lambda: cache.save([b"87654321"], value), lambda: cache.load(value, mine),
            lambda: cache.load(keys, value), lambda: cache.load(keys, mine, stream=value),
            lambda: cache.put(value, row), lambda: cache.put(keys, value),
            lambda: cache.get(value, row), lambda: cache.get(keys, value),
        ):  # fmt: skip
            check(call, [pool])
        index.audit()
        cache.audit()


@hostile()
def test_addresses_layouts_and_pools(name):
    value = HOSTILE[name]
    layout = small_layout()
    view = small_pool().tensor()
    for call in (
        lambda: kvpool.decode_address(value), lambda: kvpool.block_ids(value), lambda: kvpool.media(value),
        lambda: kvpool.block_ids([value]), lambda: kvpool.RawLayout(value, 1), lambda: kvpool.RawLayout(64, value),
        lambda: small_layout(layers=value), lambda: small_layout(dtype=value), lambda: small_layout(dims=value),
        lambda: small_layout(order=value), lambda: small_layout(block_tokens=value),
        lambda: kvpool.Pool(value, 4), lambda: kvpool.Pool(layout, 0, hbm=value),
        lambda: kvpool.Pool(layout, hbm=[value]),
        lambda: kvpool.Pool(layout, hbm=[np.zeros((4, 1))], block_dim=value),
        lambda: kvpool.Pool(layout, hbm=[np.zeros((4, 1))], hbm_blocks=value),
        lambda: kvpool.Pool(layout, 4, device=value), lambda: kvpool.Pool(layout, 4, parallel=value),
        lambda: kvpool.Pool(layout, 4, engine_allocates=value),
        lambda: kvpool.ParallelConfig(tp=value), lambda: kvpool.ParallelConfig(tp=1, pp=value),
        lambda: view.__dlpack__(stream=value), lambda: view.__dlpack__(copy=value),
        lambda: view.__dlpack__(dl_device=value), lambda: view.__dlpack__(max_version=value),
        *(lambda setting=setting: kvpool.Pool(layout, 4, **{setting: value}) for setting in SETTINGS),
        *(lambda count=count: kvpool.Pool(layout, **{count: value}) for count in ("hbm_blocks", "dram_blocks")),
    ):  # fmt: skip
        check(call, [])


SETTINGS = ("policy", "copy_threads", "huge_pages", "numa_node", "audit", "lease_s", "routes", "name", "secret")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with small_pool(16, audit=False) as here, small_pool(16, audit=False) as there:
        peer = here.peers.connect(there.peers.listen(f"unix:{tmp_path_factory.mktemp('pair')}/socket"))
        yield here, there, {"peer": peer, "mine": here.alloc(2), "theirs": there.alloc(2)}


@hostile()
def test_calls_that_need_peers(pair, name):
    here, there, known = pair
    for verb, arguments in AT_PEERS.items():
        for argument in arguments:
            if argument == "timeout" and HOSTILE[name] is None:
                continue  # waits for as long as it takes
            given = {key: known.get(value, value) if isinstance(value, str) else value
                     for key, value in arguments.items()} | {argument: HOSTILE[name]}  # fmt: skip

            def call(verb=verb, given=given):
                result = attrgetter(verb)(here)(**given)
                for one in result if isinstance(result, list) else [result]:
                    if isinstance(one, (kvpool.Transfer, kvpool.TransferStream)):
                        one.cancel() if isinstance(one, kvpool.Transfer) else one.finish().cancel()
                    elif isinstance(one, np.ndarray):
                        here.free(one)
                    elif hasattr(one, "close"):
                        one.close()

            check(call, [])
    for field in ("peer", "addrs", "tokens", "private", "evict", "checksum", "medium", "timeout"):
        spec = {"peer": known["peer"], "addrs": known["mine"]} | {field: HOSTILE[name]}
        check(lambda spec=spec: [one.cancel() for one in here.batch.transfer([kvpool.TransferSpec(**spec)])], [])
    here.audit()
    there.audit()


# ---- what the error says


def test_a_batch_is_a_list_of_pairs_and_a_flag_is_a_bool():
    with small_pool() as pool:
        for call, text in (
            (lambda: pool.batch.match(5), "prompts must be a list, and is int"),
            (lambda: pool.batch.insert([(1, 2, 3)]), r"prompts[0] must be (tokens, addresses), and has 3 items"),
            (lambda: pool.alloc(1, evict="perhaps"), "evict must be a bool, and is str"),
            (lambda: pool.swap_out(1, wait=1), "wait must be a bool, and is int"),
        ):
            with refused(pool, kvpool.ArgumentTypeError, text):
                call()
        assert len(pool.alloc(1, evict=np.bool_(False))) == 1
        with pytest.raises(kvpool.PeerLost):
            pool.peers.connect("unix:@kvpool-nobody-listens-here", wait=np.bool_(False))


def test_the_exception_of_an_argument_is_the_cause_and_ctrl_c_is_not_swallowed():
    class Interrupted:
        def __index__(self) -> int:
            raise KeyboardInterrupt

    with small_pool() as pool:
        with refused(pool, kvpool.ArgumentTypeError, "prompts", "Sized") as caught:
            pool.batch.match(HOSTILE["a length that raises"])
        assert isinstance(caught.value.__cause__, Oops)
        with refused(pool, kvpool.ArgumentTypeError, "prompts[0]") as caught:
            pool.batch.insert(HOSTILE["an item that raises"])
        assert isinstance(caught.value.__cause__, Oops)
        with refused(pool, kvpool.ArgumentTypeError, "medium", "Raising") as caught:
            pool.tensor(Raising())
        assert isinstance(caught.value.__cause__, Oops)
        for call in (pool.alloc, pool.tensor, lambda value: pool.match([value])):
            with refused(pool, KeyboardInterrupt):
                call(Interrupted())


def test_impossible_lengths_are_refused_with_their_number():
    with small_pool() as pool:
        with refused(pool, kvpool.ArgumentError, 2**62, given=2**62, maximum=1 << 20):
            pool.batch.match(Sized(2**62))
        with refused(pool, kvpool.ArgumentError, 2**62, given=2**62):
            pool.batch.insert(Sized(2**62))
        with refused(pool, kvpool.ArgumentError, 1 << 40, given=1 << 40, maximum=1 << 28):
            pool.match(HOSTILE["no end of tokens"])
        with refused(pool, kvpool.ArgumentError, 1 << 40, given=1 << 40, maximum=1 << 28):
            pool.free(HOSTILE["no end of elements"])
        with refused(pool, kvpool.ArgumentError, "bits"):
            pool.alloc(-(10**5000))
