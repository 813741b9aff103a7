"""A GPU that is lost or reset: a typed error from every verb, an end of everything, and peers that are informed."""

from __future__ import annotations

import pytest
from lost_verbs import VERBS
from transfer.kit import SECRET, Child, address_of, eventually

import kvpool

LOSSES = [700, 719, 709]  # an illegal address, a failed launch, a context that was destroyed by a reset


@pytest.mark.parametrize("code", LOSSES)
def test_every_verb_says_that_the_gpu_is_lost_and_close_works(on_fake, code):
    on_fake(f"""
pool, there = pair_on_gpu("cuda_ipc", device="cuda:1")
{VERBS}
where = pool.peers.listen(address_of("before"))
cuda.fake_cuda_lose(0, {code})
first = raises(kvpool.DeviceLost, verbs["swap_out"], "({code})")
assert first.driver_code == {code}
silent = []
for name, verb in verbs.items():
    try:
        verb()
    except kvpool.DeviceLost as error:
        assert error.driver_code == {code}, name
    else:
        silent.append(name)
assert silent == []
# Calls that end something, or only read state, still work.
assert pool.stats().hbm.capacity == pool.audit().hbm.capacity == 8
assert [peer.name for peer in pool.peers.list()] == ["there"]
opened.transfer.cancel()
assert type(opened.transfer.exception(60)) is kvpool.Cancelled
hit.close()
# No new peer connects to it, and connected ones are told.
with small_pool(device="cuda:1") as late:
    raises(kvpool.PeerLost, lambda: late.peers.connect(where), "({code})")
theirs = there.alloc(2)
for verb in (
    lambda: there.transfer(pool.peers.name, theirs).wait(30),
    lambda: there.transfer_with_insert(pool.peers.name, prompt(2), theirs).wait(30),
    lambda: there.alloc(1, instance=pool.peers.name, timeout=30),
    lambda: there.fetch(pool.peers.name, addrs).wait(30),
):
    raises(kvpool.PeerLost, verb)
there.free(theirs)
pool.close()
raises(kvpool.ClosedError, verbs["alloc"])
wait_for(lambda: there.peers.list() == [], 30)
wait_for(lambda: there.audit().hbm.free == 8, 30)
there.close()
# Nothing is left but the stream of this test.
del pool, there, hit, opened, late
gc.collect()
assert left() == "contexts=1 streams=1", left()
""")


def test_losing_the_gpu_in_any_driver_call_is_reported_and_everything_can_be_closed(on_fake):
    """From the making of a pool to its end: each call in turn answers that the GPU is lost."""
    on_fake(
        """
told, n = set(), 0
cuda.fake_cuda_failed.restype = ctypes.c_bool
cuda.fake_cuda_calls.restype = ctypes.c_char_p
GIVES_BACK = "cuMemRelease", "cuMemUnmap", "cuMemAddressFree", "cuMemFree", "cuMemHostUnregister", "cuStreamDestroy", \
    "cuEventDestroy", "cuDevicePrimaryCtxRelease"
while True:
    n += 1
    pools, where = [], "made"
    cuda.fake_cuda_reset()
    cuda.fake_cuda_fail_nth(n, 700)
    try:
        pools.append(small_pool(4, 4, device="cuda:0", routes=("cuda_ipc",), name="here", lease_s=10.0))
        here = pools[0]
        store(here, prompt(3))
        where = "swapped out"
        here.swap_out(2)
        where = "swapped in"
        with here.match(prompt(3)) as hit, here.swap_in(hit.addrs):
            pass
        where = "met"
        pools.append(small_pool(4, 4, device="cuda:1", routes=("cuda_ipc",), name="there", lease_s=10.0))
        here.peers.connect(pools[1].peers.listen(address_of("x")))
        where = "sent"
        with here.match(prompt(3)) as hit:
            here.transfer("there", hit.addrs, timeout=30).wait(60)
        pools[1].inbox.receive(30).close()
        where = "fetched"
        here.fetch("there", pools[1].alloc(1), timeout=30).wait(60)
        where = ""
    except (kvpool.DeviceLost, kvpool.PeerLost) as error:
        told.add((where, type(error).__name__))
    except kvpool.Unsupported as error:
        assert where == "met", (n, where, error)  # and the routes of both have none in common then
    failed = cuda.fake_cuda_calls().decode().split()[n - 1] if cuda.fake_cuda_failed() else ""
    cuda.fake_cuda_fail_nth(0, 0)
    for pool in pools:
        pool.close()
    pool = here = hit = error = None
    pools.clear()
    gc.collect()
    # What the driver refuses to take back stays with it, as does what is out of reach: then no verb has failed.
    gives_back = failed.startswith(GIVES_BACK) or (not where and failed.startswith("cuCtxPushCurrent"))
    if not gives_back:
        wait_for(lambda: left() == "", 30)
    if not failed:
        break
assert n > 100, n  # calls of the driver
assert {("made", "DeviceLost"), ("swapped out", "DeviceLost"), ("swapped in", "DeviceLost")} <= told
assert {where for where, _ in told} >= {"sent", "fetched"}
""",
        timeout=250,
    )


@pytest.mark.parametrize("route", ["cuda_ipc", "sock"])
def test_peers_in_other_processes_notice_a_lost_gpu_in_bounded_time(fake_cuda, route):
    """The sender's, in the middle of a transfer, and the receiver's."""
    for lost in ("a", "b"):
        sides = {name: Child(KVPOOL_CUDA_LIBRARY=str(fake_cuda)) for name in "ab"}
        a, b = sides.values()
        try:
            for name, child in sides.items():
                child(
                    "from gpu_memory import driver\ncuda = driver()\n"
                    "pool = small_pool(device='cuda:0', secret=secret, name=name, routes=(route,), lease_s=10.0)",
                    secret=SECRET, name=name, route=route,
                )  # fmt: skip
            where = b("pool.peers.listen(where)", where=address_of(route))
            a("pool.peers.connect(where, timeout=30); addrs = pool.alloc(4); fill(pool, addrs); None", where=where)
            if lost == "a":  # in one order, for the copy goes on meanwhile
                a(
                    "cuda.fake_cuda_set(b'delay_us', 1_000_000)\n"
                    "sent = pool.transfer('b', addrs); cuda.fake_cuda_lose(0, 719); None"
                )
            else:
                b("cuda.fake_cuda_lose(0, 719)")
                a("sent = pool.transfer('b', addrs); None")
            told = a("type(sent.exception(60)).__name__")
            if lost == "a":
                assert told == "DeviceLost"
                with pytest.raises(kvpool.PeerLost):
                    b("pool.transfer('a', pool.alloc(1)).wait(60)")
            else:  # by cuda_ipc it is the sender's GPU that writes, and finds out by itself
                assert told == "PeerLost" if route == "sock" else told in ("PeerLost", "DeviceLost", "NoneType")
            a("pool.close()")
            eventually(lambda: b("pool.peers.list() == []"), seconds=60)  # noqa: B023
            if lost == "a":
                if route == "cuda_ipc":  # its GPU's writes here have certainly ended when its process has
                    assert b("blocks_at_peers(pool)") == 4
                    a.close()
                eventually(lambda: b("blocks_at_peers(pool)") == 0, seconds=60)  # noqa: B023
                b("pool.audit(); pool.free(pool.alloc(pool.stats().hbm.free)); None")
            b("pool.close()")
        finally:
            for child in sides.values():
                child.close()
