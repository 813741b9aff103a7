"""A timeout of None is the setting timeout_s in every verb that takes one, and no verb waits forever."""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Callable

import pytest
from kit import prompt
from transfer.kit import address_of, small_layout, small_pool

import kvpool

SHORT = 0.3


def took(call: Callable[[], object]) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def times_out(call: Callable[[], object]) -> None:
    def timed() -> None:
        with pytest.raises(TimeoutError):
            call()

    assert SHORT * 0.9 <= took(timed) < 10 * SHORT + 5


def test_the_default_is_a_setting():
    assert kvpool.Settings().timeout_s == 30.0
    for wrong in (0, -1, float("nan"), 1e9):
        with pytest.raises(kvpool.ArgumentError, match="timeout_s"):
            kvpool.Settings(timeout_s=wrong)


def test_verbs_that_wait_for_a_silent_peer_give_up_after_the_default(child):
    settings = {"routes": ("sock",), "lease_s": 600.0}
    where = child(
        "pool = small_pool(**settings)\npool.peers.listen(where)", settings=settings, where=address_of("sock")
    )
    with small_pool(timeout_s=SHORT, **settings) as pool:
        peer = pool.peers.connect(where, timeout=60)
        addrs, lent = pool.alloc(1), pool.alloc(1, instance=peer, timeout=60)
        child.kill(signal.SIGSTOP)
        try:
            for call in (
                lambda: pool.alloc(1, instance=peer),
                lambda: pool.alloc(1, instance=peer, timeout=None),
                lambda: pool.transfer(peer, addrs).wait(),
                lambda: pool.transfer_with_insert(peer, prompt(1), addrs, timeout=None).wait(None),
                lambda: pool.batch.transfer([kvpool.TransferSpec(peer, addrs)])[0].wait(),
                lambda: pool.fetch(peer, lent).wait(),
                lambda: pool.transfer(peer, addrs, layerwise=True).wait(),
            ):
                times_out(call)
        finally:
            os.kill(child.process.pid, signal.SIGCONT)


def test_connect_waits_for_a_listener_for_the_default():
    with small_pool(timeout_s=SHORT) as pool:
        for given in ({}, {"timeout": None}):

            def call(given: dict[str, None] = given) -> None:
                with pytest.raises(kvpool.PeerLost, match="nobody listened"):
                    pool.peers.connect(address_of("shm"), **given)

            assert SHORT * 0.8 <= took(call) < 10 * SHORT + 5


def test_an_empty_inbox_is_none_after_the_default():
    with small_pool(timeout_s=SHORT) as pool:
        pool.peers.listen(address_of("shm"))
        for call in (pool.inbox.receive, lambda: pool.inbox.receive(None)):
            assert (
                SHORT * 0.9 <= took(lambda call=call: call() is None or pytest.fail("something came")) < 10 * SHORT + 5
            )


def test_ranks_are_waited_for_as_long_as_the_default():
    layout = small_layout()
    parallel = kvpool.ParallelConfig(pp=2)
    with kvpool.Pool(layout, 4, parallel=parallel, timeout_s=SHORT, check_memory=False) as pool:
        ticket = pool.ranks.export(0)
        times_out(pool.ranks.wait)
        with kvpool.RankArena.join(ticket, timeout_s=SHORT, check_memory=False) as rank:
            assert SHORT * 0.9 <= took(lambda: rank.wait_lost() and pytest.fail("it is lost")) < 10 * SHORT + 5


def test_all_verbs_have_the_same_default():
    """Where a signature can be read: the default is None, or there is no default."""
    for owner in (kvpool.peers.Peers, kvpool.peers.Ranks, kvpool.peers.Inbox, kvpool.Pool, kvpool.RankArena,
                  kvpool.Attachment, kvpool.TransferStream):  # fmt: skip
        for name, member in inspect.getmembers(owner):
            if name.startswith("_") or not inspect.isroutine(member):
                continue
            try:
                parameters = inspect.signature(member).parameters
            except (TypeError, ValueError):  # a method of C++
                assert "timeout: float" not in (member.__doc__ or "").partition("\n")[0]
                continue
            if "timeout" in parameters:
                assert parameters["timeout"].default is None, (owner, name)
