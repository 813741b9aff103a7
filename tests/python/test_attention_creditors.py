"""Attention over blocks at a creditor that is killed, stopped or closed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from attention_kit import BLOCK, layout_of, pool_of
from attention_peers_kit import LEAF, listening, out, three_pools, written

import kvpool


@pytest.fixture
def three():
    with three_pools() as pools:
        yield pools


CREDITOR = """
    import sys, time, kvpool
    sys.path.insert(0, {tests!r})
    from attention_kit import pool_of
    pool = pool_of(hbm=0, dram=256, name="creditor", secret="s", lease_s=60.0)
    print(pool.peers.listen({address!r}), flush=True)
    time.sleep(600)
"""


def creditor(address):
    code = textwrap.dedent(CREDITOR.format(tests=os.path.dirname(__file__), address=address))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def stop(process):
    """Returns when none of its threads runs any more."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def test_own_blocks_are_appended_while_another_change_waits_for_a_peer(three):
    a, *_ = three
    process, address = creditor(f"unix:@kvpool-slow-{os.getpid()}")
    try:
        a.peers.connect(address)
        with a.sequence(written(a, 3)) as seq:
            lent = a.alloc(1, kvpool.DRAM, instance="creditor")
            stop(process)
            replacing = threading.Thread(target=lambda: _refused(lambda: seq.replace(0, lent, timeout=60)))
            replacing.start()
            mine = written(a, 1)
            with pytest.raises(kvpool.DeadlineExceeded):  # these take turns, and the other one has its turn soon
                while replacing.is_alive():
                    mine = seq.replace(0, mine, timeout=0.05)
            seq.append(written(a, 1), tokens=4 * BLOCK)
            assert replacing.is_alive()  # it was not waited for
            process.send_signal(signal.SIGCONT)
            replacing.join()
            assert len(seq.addrs) == 4
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _refused(call):
    try:
        return call()
    except kvpool.Error as error:
        return error


def test_a_creditor_that_is_killed_costs_only_what_it_had(three):
    a, *_ = three
    process, address = creditor(f"unix:@kvpool-creditor-{os.getpid()}")
    try:
        a.peers.connect(address)
        with a.sequence(written(a, 2 * LEAF + 1, 2 * 1024 + 7), tokens=2 * 1024 + 7) as seq:
            want, own = out(a, seq), seq.addrs
            seq.offload(LEAF, "b")
            seq.offload(LEAF, "creditor")
            assert np.array_equal(out(a, seq), want)
            process.send_signal(signal.SIGKILL)
            with pytest.raises(kvpool.PeerLost) as caught:
                while True:
                    out(a, seq, timeout=10)
            assert caught.value.lost == [(0, [(1024, 2048)])]
            assert seq.lost == [(1024, 2048)]
            seq.replace(LEAF, own[LEAF : 2 * LEAF])  # as if they had been computed again
            assert seq.lost == []
            assert np.array_equal(out(a, seq), want)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_creditor_that_is_stopped_costs_no_more_than_the_deadline(three):
    a, *_ = three
    process, address = creditor(f"unix:@kvpool-stopped-{os.getpid()}")
    try:
        a.peers.connect(address)
        with a.sequence(written(a, 3)) as seq:
            want = out(a, seq)
            seq.offload(2, "creditor")
            stop(process)
            with pytest.raises(kvpool.DeadlineExceeded):
                out(a, seq, timeout=0.2, where="there")
            process.send_signal(signal.SIGCONT)
            # A late answer to the first call is not taken for one to this.
            np.testing.assert_allclose(out(a, seq, where="there"), want, rtol=2e-6, atol=2e-6)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_creditor_that_is_closed_while_it_computes_is_lost_and_its_callers_have_cancelled_nothing():
    layout, ends = layout_of(kv_heads=8, head_dim=128), []
    q = np.zeros((256, 64, 128), np.float32)
    for round_ in range(4):
        with pool_of(layout, 0, 4, name="a", secret="s") as a, pool_of(layout, 0, 256, name="b", secret="s") as b:
            a.peers.connect(listening(b))
            with a.sequence(a.alloc(256, kvpool.DRAM, instance="b")) as seq:
                handle = a.attend(0, q, [seq] * 16, query_tokens=[16] * 16, where="there")
                time.sleep(0.1 + 0.2 * round_)
                b.close()
                ends.append(type(handle.exception(60)))
    assert set(ends) <= {type(None), kvpool.PeerLost}
    assert kvpool.PeerLost in ends
