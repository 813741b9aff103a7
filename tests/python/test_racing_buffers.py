"""Arrays that another thread (NumPy writes without the GIL) or process writes while a verb reads them.

What is in them is always right, only not the same from one moment to the next: the caller's own addresses in changing
order, tokens of one prompt or of another. So a verb does its work, or says what is wrong with what it has read. It must
not check one thing and use another: that was a crash, or an index that contradicts the blocks.
"""

from __future__ import annotations

import pytest
from kit import LONG, run_script

SECONDS = 60.0 if LONG else 1.5

WRITER = """
import mmap, os, signal, time
N = 2000

class Changing:
    \"\"\"An array that a process without our GIL sets to one of several values, as often as it can.\"\"\"
    def __init__(self, *values):
        self.values = [np.ascontiguousarray(value) for value in values]
        first = self.values[0]
        self.array = np.frombuffer(mmap.mmap(-1, first.nbytes), first.dtype)
        self.array[:] = first
        self.offset = np.frombuffer(mmap.mmap(-1, 8), first.dtype)[:1]  # is added to each value
        self.writer = os.fork()
        if self.writer == 0:
            self.write(os.getppid())
    def write(self, reader):
        pauses = np.random.default_rng(1).integers(0, N // 2, 1000).tolist()  # so that a call may fall into any moment
        while os.getppid() == reader:
            for pause in pauses:
                for value in self.values:
                    np.add(value, self.offset[0], out=self.array)
                    for _ in range(pause):
                        pass
        os._exit(0)
    def __enter__(self):
        return self.array
    def move(self, offset):
        self.offset[0] = offset
    def __exit__(self, *_):
        os.kill(self.writer, signal.SIGKILL)
        os.waitpid(self.writer, 0)

def orders(addrs):
    return Changing(addrs, np.roll(addrs, 1), addrs[::-1])

def repeat(seconds, *calls):
    done = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for call in calls:
            try:
                result = call()
            except kvpool.Error:
                continue
            done += 1
            for one in result if isinstance(result, list) else [result]:
                if hasattr(one, "close"):
                    one.close()
    return done

def give_back(pool):
    \"\"\"Whatever the calls have made of the blocks: all are free again.\"\"\"
    pool.evict(1 << 30, kvpool.MIXED)
    for medium in (kvpool.HBM, kvpool.DRAM):
        stats = pool.audit()
        tier = stats.hbm if medium == kvpool.HBM else stats.dram
        assert tier.pinned == 0, tier

def pool_of(blocks=2 * N, **options):
    return kvpool.Pool(kvpool.RawLayout(block_bytes=64, block_tokens=1), blocks, huge_pages="never", audit=False,
                       **options)

tokens = np.arange(N, dtype=np.int32)
prompts = [tokens, tokens + 1, np.where(np.arange(N) % 97 == 0, -1, tokens).astype(np.int32)]
"""


def race(code: str) -> None:
    run_script(WRITER + f"\nSECONDS = {SECONDS}\n" + code)


@pytest.mark.parametrize("verb", ["insert", "insert_batch", "free"])
def test_addresses_that_change_order_while_they_are_read(verb):
    race(f"""
N = 20000  # so that a call takes as long as the writer's pauses
many = np.arange(N, dtype=np.int32)
verbs = {{
    "insert": lambda: pool.insert(many, addrs).close(),
    "insert_batch": lambda: [held.close() for held in pool.batch.insert([(many, addrs)], free_duplicates=True)],
    "free": lambda: pool.free(addrs),
}}
verb = verbs[{verb!r}]
until = time.monotonic() + SECONDS
worked = 0
with pool_of(N) as pool:
    own = pool.alloc(N)
    blocks = own - own[0]
    with (changing := Changing(blocks, np.roll(blocks, 1))) as addrs:
        changing.move(own[0])
        while time.monotonic() < until or not worked:
            try:
                verb()
            except (kvpool.ArgumentError, kvpool.StateError, kvpool.StaleAddress):
                continue  # an address was read twice
            worked += 1
            pool.audit()
            pool.evict(N, kvpool.HBM)
            own = pool.alloc(N)  # all of them again, of the next generation
            assert np.array_equal(own - own[0], blocks)
            changing.move(own[0])
""")


def test_tokens_that_change_while_they_are_matched_inserted_and_deleted():
    race("""
with pool_of(8 * N, dram_blocks=0) as pool:
    for prompt in prompts:
        pool.insert(prompt, pool.alloc(N), free_duplicates=True).close()
    with Changing(*prompts) as changing, Changing(*(one.astype(np.int64) for one in prompts)) as wide:
        views = [changing, wide, memoryview(changing), changing.view(np.uint8).data, wide[::-1]]
        def found(view):
            held = pool.match(view)
            assert len(held.addrs) == held.tokens <= N
            return held
        def insert():
            own = pool.alloc(N)
            try:
                return pool.insert(changing, own, free_duplicates=True)
            except BaseException:
                pool.free(own)
                raise
        for view in views:
            assert repeat(SECONDS / 5, lambda: found(view), lambda: pool.batch.match([view, view]),
                          lambda: pool.explain_match(view))
            pool.audit()
        assert repeat(SECONDS, insert, lambda: pool.delete(changing), lambda: pool.delete(wide, descendants=True),
                      lambda: found(changing))
        pool.audit()
    give_back(pool)
    assert pool.audit().hbm.free == pool.audit().hbm.capacity
""")


def test_tokens_and_values_that_change_while_separate_indices_read_them():
    race("""
index = kvpool.PromptIndex(block_tokens=2)
router = kvpool.InstanceIndex(block_tokens=2)
values = np.arange(N // 2, dtype=np.uint64)
with Changing(*prompts) as changing, orders(values) as some:
    assert repeat(SECONDS,
        lambda: index.insert(changing, some), lambda: index.batch.insert([(changing, some)] * 2),
        lambda: index.match(changing), lambda: index.batch.match([changing] * 2), lambda: index.peek(changing),
        lambda: index.delete(changing, descendants=True), lambda: index.evict(100))
    index.audit()
    assert repeat(SECONDS,
        lambda: router.insert(changing, 1), lambda: router.insert(changing, 2, now=3), lambda: router.match(changing),
        lambda: router.match(changing, now=4), lambda: router.match_arrays(changing), lambda: router.find(changing),
        lambda: router.remove(changing, 1, first_block=3))
    router.audit()
""")


def test_addresses_that_change_while_they_are_swapped_adopted_and_looked_up():
    race("""
with pool_of(2 * N, dram_blocks=2 * N) as pool:
    held = pool.insert(tokens, pool.alloc(N))
    cached = held.addrs
    held.close()
    def swap(into=None, wait=True):
        pool.swap_out(N // 2)
        now = pool.explain_match(tokens).addrs
        with orders(now) as addrs:
            brought = pool.swap_in(addrs, into=into, wait=wait)
            if not wait:
                brought = brought.wait().result
            assert len(brought.addrs) == N
            return brought
    def swap_into():
        own = pool.alloc(N)
        try:
            with orders(own) as into:
                return swap(into)
        finally:
            for addr in own:
                try:
                    pool.free([addr])
                except kvpool.Error:
                    pass
    assert repeat(SECONDS, swap, swap_into, lambda: swap(wait=False))
    pool.audit()
    with orders(cached) as addrs:
        def ids():
            assert sorted(set(kvpool.block_ids(addrs))) and set(kvpool.media(addrs)) == {kvpool.HBM}
        assert repeat(SECONDS / 4, ids)
engine = [np.zeros((2 * N, 64), np.uint8)]
with kvpool.Pool(kvpool.RawLayout(block_bytes=64, block_tokens=1), hbm=engine, engine_allocates=True) as pool:
    with orders(np.arange(N)) as blocks:
        def adopt():
            own = pool.adopt(blocks)
            assert len(set(own.tolist())) == N
            pool.free(own)
        assert repeat(SECONDS / 2, adopt)
    assert pool.audit().hbm.active == 0
""")


def test_blocks_that_change_while_they_are_sent_to_a_peer():
    race(
        """
layout = kvpool.RawLayout(block_bytes=64, block_tokens=1)
with pool_of(4 * N) as here, pool_of(8 * N) as there:
    peer = here.peers.connect(there.peers.listen("unix:@kvpool-test-%d-%d" % (os.getpid(), time.monotonic_ns())))
    own = here.alloc(N)
    lent = here.alloc(N, instance=peer)
    private = bytearray(N * 8)
    def sent(handle):
        for one in handle if isinstance(handle, list) else [handle]:
            one.wait(60)
        while item := there.inbox.receive(0):
            item.close()
    def fetched(handle):
        here.free(handle.wait(60).addrs)
    def streamed():
        with here.transfer_with_insert(peer, changing, addrs, private=private, layerwise=True) as stream:
            stream.send_layer(0)
        sent(stream.finish())
    theirs = there.alloc(N)
    with (orders(own) as addrs, orders(lent) as to, Changing(*prompts) as changing, orders(theirs) as wanted,
          Changing(*(np.full(N, number, np.uint64) for number in range(3))) as noise):
        private = memoryview(noise).cast("B")
        calls = {
            "transfer": lambda: sent(here.transfer(peer, addrs, private=private)),
            "to": lambda: sent(here.transfer(peer, addrs, to=to)),
            "insert": lambda: sent(here.transfer_with_insert(peer, changing, addrs, private=private)),
            "batch": lambda: sent(here.batch.transfer(
                [kvpool.TransferSpec(peer, addrs), kvpool.TransferSpec(peer, addrs, tokens=changing)])),
            "fetch": lambda: fetched(here.fetch(peer, wanted)),
            "open": streamed,
        }
        worked = dict.fromkeys(calls, 0)
        until = time.monotonic() + 2 * SECONDS
        while time.monotonic() < until or not all(worked.values()):
            for name, call in calls.items():
                try:
                    call()
                    worked[name] += 1
                except (kvpool.ArgumentError, kvpool.StateError, kvpool.StaleAddress, kvpool.OutOfBlocks, kvpool.Busy):
                    pass  # an address was read twice
                there.evict(1 << 30, kvpool.HBM)
            assert time.monotonic() < until + 120, worked
        here.audit()
        there.audit()
    with orders(here.alloc(N, instance=peer)) as mixed:
        for _ in range(100):
            try:
                here.free(mixed)
                break
            except kvpool.ArgumentError:
                pass
    here.audit()
    there.audit()
"""
    )
