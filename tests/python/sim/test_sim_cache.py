"""The blocks of a simulated instance, beside a real pool: the same hits in the same tier, request by request."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import small_layout, small_pool

import kvpool
from kvpool.sim.cache import InstanceCache
from kvpool.sim.generators import generate


def in_simulation(hbm, dram, prompts):
    """(blocks found in HBM, in either tier) of each prompt, served one after the other with a block for its answer."""
    cache, found = InstanceCache(hbm, dram), []
    for ids in prompts:
        held = cache.admit(ids, len(ids) + 1)
        assert held is not None
        found.append((held.found, held.cached))
        cache.store(held, ids)
        cache.release(held)
        cache.audit(idle=True)
    return found


def in_a_pool(hbm, dram, prompts):
    """The same with an engine's calls on a pool."""
    found = []
    with small_pool(hbm, dram, small_layout(block_tokens=1)) as pool:
        for ids in prompts:
            with pool.match(ids) as match:
                tiers = kvpool.media(match.addrs)
                found.append((int((tiers == kvpool.HBM).sum()), len(tiers)))
                with pool.swap_in(match.addrs) as here:
                    own = pool.alloc(len(ids) - len(tiers) + 1, evict=True)
                    with pool.insert(ids, np.concatenate([here.addrs, own[:-1]])):
                        pool.free(own[-1:])
        pool.audit()
    return found


@pytest.mark.parametrize(("hbm", "dram"), [(100, 0), (100, 100), (60, 300), (200, 50)])
def test_a_simulated_instance_has_the_hits_of_a_real_pool(hbm, dram):
    workload = generate(
        "documents", rate=1.0, requests=300, seed=5, sigma=0.0, shared=20 * 16, shared_count=12, prompt=40
    )
    prompts = [request.ids for request in workload.start()]
    found = in_simulation(hbm, dram, prompts)
    assert found == in_a_pool(hbm, dram, prompts)
    assert sum(hbm_blocks for hbm_blocks, _ in found) > 0
    assert any(cached > hbm_blocks for hbm_blocks, cached in found) == bool(dram)


@settings(max_examples=60)
@given(
    st.integers(6, 30),
    st.sampled_from([0, 5, 40]),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 2), st.booleans()), max_size=60),
)
def test_blocks_add_up_however_requests_overlap(hbm, dram, moves):
    """Requests begin, are stored and end in any order; the audit holds after each, and at the end nothing is held."""
    cache, running = InstanceCache(hbm, dram), []
    for name, blocks, answer, ends in moves:
        ids = np.arange(100 * name, 100 * name + blocks, dtype=np.int32)
        held = cache.admit(ids, blocks + answer)
        cache.audit()
        if held is not None:
            running.append((held, ids))
        if running and (ends or held is None):
            oldest, stored = running.pop(0)
            cache.store(oldest, stored)
            cache.audit()
            cache.release(oldest)
            cache.audit()
    for held, _ in running:
        cache.release(held)
    cache.audit(idle=True)


def test_a_request_that_does_not_fit_beside_running_ones_is_not_admitted_and_evicts_nothing():
    cache = InstanceCache(10)
    done = cache.admit(np.arange(4, dtype=np.int32), 4)
    cache.store(done, np.arange(4, dtype=np.int32))
    cache.release(done)
    cache.admit(np.arange(50, 55, dtype=np.int32), 5)
    assert cache.admit(np.arange(90, 96, dtype=np.int32), 6) is None
    assert cache.peek(np.arange(4, dtype=np.int32)) == 4
    assert cache.admit(np.arange(90, 94, dtype=np.int32), 4) is not None
    assert cache.peek(np.arange(4, dtype=np.int32)) == 1


@pytest.mark.parametrize("blocks", [(0, 0), (1, -1)])
def test_an_instance_without_blocks_is_refused(blocks):
    with pytest.raises(kvpool.ArgumentError):
        InstanceCache(*blocks)
