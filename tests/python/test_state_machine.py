"""Random calls of the whole local API beside a model that is a few dicts (local_model.py).

The test predicts the result of each call from the model: so index, events, states, counts and bytes must agree after
every call.

KVPOOL_LONG=1 runs 10,000 examples of 200 calls instead of 200 of 50. Over the fake CUDA driver there are 60: the moves
are others there, not the index nor the blocks.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from kit import LONG, refused, repeats
from local_model import medium_of
from local_prompts import LocalPrompts, media, seeds

import kvpool
from kvpool import DRAM, HBM, MIXED


class LocalApi(LocalPrompts):
    # ---- tiers

    @rule(n=st.integers(0, 6), medium=media)
    def evict(self, n: int, medium: int) -> None:
        evictable = sum(self.evictable(own) for own in (HBM, DRAM) if medium in (own, MIXED))
        where = dict(self.where)
        dropped = self.pool.evict(n, medium=medium)
        stored, removed, moved = self.apply_events()
        assert (stored, moved) == ([], {})
        assert dropped <= min(n, evictable)
        own = [key for key in removed if medium in (medium_of(where[key]), MIXED)]
        assert len(own) >= dropped
        if medium != MIXED:
            assert dropped == len(own) == min(n, evictable)

    @rule(n=st.integers(1, 6))
    def swap_out(self, n: int) -> None:
        stats = self.pool.stats()
        if not stats.hbm.capacity or not stats.dram.capacity:
            with refused(self.pool, kvpool.StateError):
                self.pool.swap_out(n)
            return
        room = stats.dram.free + self.evictable(DRAM)
        wanted = min(n, self.evictable(HBM), room)
        where = dict(self.where)
        addrs = self.pool.swap_out(n)
        stored, removed, moved = self.apply_events()
        assert not stored
        assert list(moved.values()) == addrs.tolist()
        assert all(medium_of(addr) == DRAM for addr in addrs.tolist())
        lost = [key for key in removed if medium_of(where[key]) == HBM]  # hung below dropped DRAM blocks
        assert wanted - len(lost) <= len(addrs) <= wanted

    @rule(seed=seeds, choose=st.booleans(), keep=st.booleans())
    def swap_in(self, seed: int, choose: bool, keep: bool) -> None:
        if not self.where:
            return
        dice = random.Random(seed)
        if dice.random() < 0.6:
            in_dram = sorted(key for key, addr in self.where.items() if medium_of(addr) == DRAM)
            keys = dice.choice(in_dram or sorted(self.where)).up_to()
            if dice.random() < 0.5:
                self.match(keys[-1].namespace, keys[-1].pages, [], True)  # a reader that keeps the old addresses
        else:
            keys = dice.sample(sorted(self.where), dice.randint(0, min(6, len(self.where))))
        addrs = [self.where[key] for key in keys]
        down = [addr for addr in addrs if medium_of(addr) == DRAM]
        closure = {page for key in keys for page in key.up_to()}
        own = [addr for addr in self.active if medium_of(addr) == HBM]
        into = dice.sample(own, len(down)) if choose and down and len(own) >= len(down) else None
        if self.filling().intersection(addrs):
            with refused(self.pool, kvpool.Busy):
                self.pool.swap_in(addrs, into=into)
            return
        free, evictable = self.free_blocks(HBM), self.evictable(HBM, but=closure)
        if down and not self.pool.stats().hbm.capacity:
            with refused(self.pool, kvpool.StateError):
                self.pool.swap_in(addrs)
            return
        if into is None and len(down) > free + evictable:
            with refused(self.pool, kvpool.OutOfBlocks, requested=len(down), free=free, evictable=evictable):
                self.pool.swap_in(addrs)
            assert self.apply_events() == ([], [], {})
            return
        held = self.pool.swap_in(addrs, into=into)
        stored, removed, moved = self.apply_events()
        assert not stored
        assert not closure & set(removed)
        assert held.addrs.tolist() == [moved[addr] if addr in down else addr for addr in addrs]
        up = {old: new for old, new in moved.items() if medium_of(new) == HBM}
        assert set(up) == set(down)
        if into is not None or len(down) <= free:
            assert (removed, len(moved)) == ([], len(down))
        if into is not None:
            assert [up[addr] for addr in down] == into
            for addr in into:
                del self.active[addr]
        self.hold(held, keys, [self.stamp_of[key] for key in keys], keep)

    # ---- addresses that are not what the call wants

    @rule(seed=seeds, verb=st.sampled_from(["free", "swap_in", "insert", "into"]))
    def wrong_address(self, seed: int, verb: str) -> None:
        dice = random.Random(seed)
        some = next(iter([*self.active, *self.where.values(), *self.stale]), 1 << 47 | 1 << 24)
        wrong = {
            "foreign": (some | 5 << 50, kvpool.NotOwner),
            "nowhere": (some & ~(7 << 47), kvpool.ArgumentError),
            "beyond": (some | 0xFFFFFF, kvpool.ArgumentError),
        }
        if self.stale:
            wrong["stale"] = (dice.choice(self.stale), kvpool.StaleAddress)
        if self.active:
            wrong["active"] = (min(self.active), kvpool.StateError)
        if self.where:
            wrong["cached"] = (min(self.where.values()), kvpool.StateError)
        if self.limbo:
            wrong["limbo"] = (min(self.limbo), kvpool.StateError)
        filling = self.filling()
        if kept := self.forgotten.keys() - filling:
            wrong["forgotten"] = (min(kept), kvpool.StateError)
        skip = {
            "free": {"active"},
            "swap_in": {"cached", "limbo"},  # a block in limbo names its page, wherever that lies now
            "insert": {"active", "foreign", "cached"},
            "into": {"active"},
        }
        addr, error = wrong[dice.choice(sorted(set(wrong) - skip[verb]))]
        good = [
            a for a in (self.where.values() if verb == "swap_in" else self.active) if a != addr and a not in filling
        ]
        good = good[:2]
        if verb == "into":
            down = [a for a in self.where.values() if medium_of(a) == DRAM and a not in filling]
            good = [a for a in good if medium_of(a) == HBM][: len(down) - 1]
            if len(down) <= len(good):
                return
        position = dice.randint(0, len(good))
        addrs = [*good[:position], addr, *good[position:]]
        with refused(self.pool, error, address=addr, position=position):
            if verb == "insert":
                self.pool.insert([9, 9] * len(addrs), addrs)
            elif verb == "into":
                self.pool.swap_in(down[: len(addrs)], into=addrs)
            else:
                getattr(self.pool, verb)(addrs)
        assert self.apply_events() == ([], [], {})


@pytest.mark.timeout(0 if LONG else 120)
def test_the_local_api_agrees_with_its_model() -> None:
    run_state_machine_as_test(
        LocalApi,
        settings=settings(
            max_examples=repeats(60 if os.environ.get("KVPOOL_CUDA_LIBRARY") else 200, long=10_000),
            stateful_step_count=200 if LONG else 50,
            suppress_health_check=list(HealthCheck),
        ),
    )
