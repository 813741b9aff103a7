"""Random calls of several models of one space, with an audit after each.

Every block that a model owns has its stamp, so that two models with one unit are found. What an allocation may do to
others is predicted from what was there before it.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from kit import LONG, prompt, repeats
from space_kit import UNIT, layout, space_of

import kvpool
from kvpool import DRAM, HBM, MIXED

UNITS = {HBM: 60, DRAM: 36}
SIZES = {"a": 1, "b": 3, "c": 4, "d": 6}
names = st.sampled_from(sorted(SIZES))
media = st.sampled_from([HBM, HBM, DRAM, MIXED])
seeds = st.integers(0, (1 << 30) - 1)
reserves = st.integers(0, 24)


def tier_of(quota: kvpool.ModelQuota, medium: int) -> kvpool.TierQuota:
    return quota.hbm if medium == HBM else quota.dram


class Models(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.space = space_of(UNITS[HBM], UNITS[DRAM])
        self.pools: dict[str, kvpool.Pool] = {}
        self.active: dict[str, dict[int, int]] = {name: {} for name in SIZES}
        self.pins: dict[str, list[Any]] = {name: [] for name in SIZES}
        self.given: list[tuple[str, int]] = []
        self.next = 0
        for name in ("a", "c", "d"):
            self.pools[name] = self.space.load(name, layout(SIZES[name]), reserve=6 * UNIT)

    def teardown(self) -> None:
        if hasattr(self, "space"):
            for handles in self.pins.values():
                for handle in handles:
                    handle.close()
            self.space.close()

    def some(self, dice: random.Random) -> str | None:
        return dice.choice(sorted(self.pools)) if self.pools else None

    def stamp(self, name: str, addrs: Any) -> None:
        for addr in addrs.tolist():
            self.next += 1
            self.view(name, addr)[:] = self.next % 251
            self.active[name][addr] = self.next % 251
            self.given.append((name, addr))

    def view(self, name: str, addr: int) -> Any:
        address = kvpool.decode_address(addr)
        return self.pools[name].tensor(address.medium).numpy()[address.block]

    @rule(name=names, reserve=reserves, limit=st.none() | st.integers(1, 60), dram_reserve=st.integers(0, 12))
    def load(self, name: str, reserve: int, limit: int | None, dram_reserve: int) -> None:
        before = self.space.quotas()
        try:
            pool = self.space.load(
                name,
                layout(SIZES[name]),
                reserve=reserve * UNIT,
                limit=None if limit is None else limit * UNIT,
                dram_reserve=dram_reserve * UNIT,
            )
        except (kvpool.ArgumentError, kvpool.OutOfQuota):
            assert self.space.quotas() == before
            return
        self.pools[name] = pool

    @rule(seed=seeds, keep=st.sampled_from(["none", "dram"]))
    def unload(self, seed: int, keep: Any) -> None:
        dice = random.Random(seed)
        name = self.some(dice)
        if name is None or dice.random() < 0.7:
            return
        before = self.space.quotas()
        in_use = bool(self.active[name]) or any(not handle.closed for handle in self.pins[name])
        try:
            self.space.unload(name, keep=keep, drain=0)
        except kvpool.DeadlineExceeded:
            assert in_use
            assert self.space.quotas() == before
            return
        assert not self.active[name]
        self.pins[name] = []
        del self.pools[name]
        found = self.space.quotas().get(name)
        assert (found is not None) == (keep == "dram")
        if found is not None:
            assert found.hbm.active == found.hbm.cached == found.dram.active == 0

    @rule(seed=seeds, n=st.integers(0, 12), medium=media, evict=st.booleans())
    def alloc(self, seed: int, n: int, medium: int, evict: bool) -> None:
        name = self.some(random.Random(seed))
        if name is None:
            return
        before = self.space.quotas()
        units = n * SIZES[name] * UNIT
        try:
            addrs = self.pools[name].alloc(n, medium=medium, evict=evict)
        except kvpool.OutOfBlocks as error:
            if medium != MIXED and evict:
                self.check_refusal(name, units, medium, before, error)
            after = self.space.quotas()
            assert all(after[each].hbm.active == before[each].hbm.active for each in before)
        else:
            self.stamp(name, addrs)
        self.check_reserves(name, before)

    def check_refusal(self, name: str, units: int, medium: int, before: Any, error: kvpool.OutOfBlocks) -> None:
        own = tier_of(before[name], medium)
        committed = sum(max(tier_of(each, medium).active, tier_of(each, medium).reserve) for each in before.values())
        grown = max(own.active + units, own.reserve) - max(own.active, own.reserve)
        admitted = committed + grown <= UNITS[medium] * UNIT and own.active + units <= own.limit
        if isinstance(error, kvpool.OutOfQuota):
            assert not admitted
        elif units <= self.pools[name].stats().hbm.capacity * SIZES[name] * UNIT and medium == HBM and admitted:
            assert error.fragmented is True

    def check_reserves(self, name: str, before: dict[str, kvpool.ModelQuota]) -> None:
        """Nobody has lost active units, or cached ones of HBM within the reserve."""
        after = self.space.quotas()
        for other, was in before.items():
            now = after[other]
            if other == name:
                continue
            assert (now.hbm.active, now.dram.active) == (was.hbm.active, was.dram.active)
            had = was.hbm.active + was.hbm.cached
            assert now.hbm.active + now.hbm.cached >= min(had, was.hbm.reserve)

    @rule(seed=seeds, which=st.integers(0, 5), prompts=st.integers(1, 6), pages=st.integers(1, 4))
    def cache(self, seed: int, which: int, prompts: int, pages: int) -> None:
        name = self.some(random.Random(seed))
        if name is None:
            return
        for at in range(which, which + prompts):
            before = self.space.quotas()
            try:
                addrs = self.pools[name].alloc(pages)
            except kvpool.OutOfBlocks:
                break
            self.check_reserves(name, before)
            self.stamp(name, addrs)
            try:
                self.pools[name].insert(prompt(pages, at), addrs, free_duplicates=True).close()
            except kvpool.OutOfQuota:
                break
            for addr in addrs.tolist():
                del self.active[name][addr]

    @rule(seed=seeds)
    def free(self, seed: int) -> None:
        dice = random.Random(seed)
        name = self.some(dice)
        if name is None:
            return
        addrs = dice.sample(sorted(self.active[name]), dice.randint(0, len(self.active[name])))
        self.pools[name].free(addrs)
        for addr in addrs:
            del self.active[name][addr]

    @rule(seed=seeds)
    def free_of_another(self, seed: int) -> None:
        dice = random.Random(seed)
        name = self.some(dice)
        if name is None or not self.given:
            return
        owner, addr = dice.choice(self.given)
        if owner == name and addr in self.active[name]:
            return
        try:
            self.pools[name].free([addr])
        except (kvpool.NotOwner, kvpool.StaleAddress, kvpool.StateError):
            return
        raise AssertionError("an address was freed that its owner had given up")

    @rule(seed=seeds, which=st.integers(0, 5), keep=st.booleans(), free_duplicates=st.booleans())
    def insert(self, seed: int, which: int, keep: bool, free_duplicates: bool) -> None:
        dice = random.Random(seed)
        name = self.some(dice)
        if name is None:
            return
        mine = sorted(self.active[name])
        dice.shuffle(mine)
        mine = mine[: dice.randint(0, 4)]
        before = self.space.quotas()
        try:
            done = self.pools[name].insert(prompt(len(mine), which), mine, free_duplicates=free_duplicates)
        except kvpool.OutOfQuota:
            assert self.space.quotas() == before
            return
        for addr in mine:
            if free_duplicates or addr not in done.duplicates.tolist():
                del self.active[name][addr]
        self.hold(name, done, keep)

    @rule(seed=seeds, which=st.integers(0, 5), pages=st.integers(0, 4), keep=st.booleans())
    def match(self, seed: int, which: int, pages: int, keep: bool) -> None:
        name = self.some(random.Random(seed))
        if name is not None:
            self.hold(name, self.pools[name].match(prompt(pages, which)), keep)

    def hold(self, name: str, handle: Any, keep: bool) -> None:
        if keep:
            self.pins[name].append(handle)
        else:
            handle.close()

    @rule(seed=seeds)
    def release(self, seed: int) -> None:
        dice = random.Random(seed)
        name = self.some(dice)
        if name is not None and self.pins[name]:
            self.pins[name].pop(dice.randrange(len(self.pins[name]))).close()

    @rule(seed=seeds, n=st.integers(0, 6))
    def swap_out(self, seed: int, n: int) -> None:
        name = self.some(random.Random(seed))
        if name is not None:
            before = self.space.quotas()
            self.pools[name].swap_out(n)
            self.check_reserves(name, before)

    @rule(seed=seeds, which=st.integers(0, 5))
    def swap_in(self, seed: int, which: int) -> None:
        name = self.some(random.Random(seed))
        if name is None:
            return
        before = self.space.quotas()
        try:
            self.pools[name].match(prompt(4, which), into=HBM).close()
        except kvpool.OutOfBlocks:
            pass
        self.check_reserves(name, before)

    @rule(seed=seeds, n=st.integers(0, 6), medium=st.sampled_from([HBM, DRAM]))
    def evict(self, seed: int, n: int, medium: int) -> None:
        name = self.some(random.Random(seed))
        if name is not None:
            self.pools[name].evict(n, medium)

    @rule(seed=seeds, reserve=reserves, limit=st.none() | st.integers(1, 60))
    def set_quota(self, seed: int, reserve: int, limit: int | None) -> None:
        name = self.some(random.Random(seed))
        if name is None:
            return
        before = self.space.quotas()
        try:
            self.space.set_quota(name, reserve=reserve * UNIT, limit=None if limit is None else limit * UNIT)
        except (kvpool.ArgumentError, kvpool.OutOfQuota):
            assert self.space.quotas() == before

    @rule(seed=seeds, elapsed=st.floats(0, 100))
    def adapt(self, seed: int, elapsed: float) -> None:
        dice = random.Random(seed)
        self.space.adapt({name: dice.randrange(9) for name in self.pools}, elapsed_s=elapsed)

    @invariant()
    def audited(self) -> None:
        if not hasattr(self, "space"):
            return
        self.space.audit()
        quotas = self.space.quotas()
        for medium, units in UNITS.items():
            tiers = [tier_of(each, medium) for each in quotas.values()]
            assert sum(max(tier.active, tier.reserve) for tier in tiers) <= units * UNIT
            assert sum(tier.active + tier.cached for tier in tiers) <= units * UNIT
            loaded = [each for name, each in quotas.items() if name in self.pools]
            limits = sum(tier_of(each, medium).limit for each in loaded)
            if loaded:
                wanted = min(units * UNIT, limits)
                got = sum(tier_of(each, medium).quota for each in loaded)
                assert abs(wanted - got) <= sum(SIZES.values()) * UNIT
        for name, blocks in self.active.items():
            for addr, stamp in blocks.items():
                assert (self.view(name, addr) == stamp).all(), name


def test_models_of_one_space_keep_their_quotas_and_their_bytes():
    run_state_machine_as_test(
        Models,
        settings=settings(
            max_examples=repeats(60, long=2000),
            stateful_step_count=60 if LONG else 30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
