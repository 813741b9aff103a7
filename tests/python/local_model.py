"""A model of the local API of a pool, as a few dicts: the base of the state machine of test_state_machine.py.

Every block carries a number that no other block has; the model knows which number belongs to which page of which
prompt. It learns from the event stream what is in the index, and where.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from kit import content, small_pool

import kvpool
from kvpool import DRAM, HBM, MIXED

PAGES = {0: (0, 0), 1: (0, 1), 2: (1, 0)}  # tokens of each page; two of them agree in their first token
BLOCK = 2


class Key(NamedTuple):
    """A page of a prompt: all pages up to it."""

    namespace: str
    pages: tuple[int, ...]

    def up_to(self) -> list[Key]:
        return [Key(self.namespace, self.pages[: end + 1]) for end in range(len(self.pages))]


class Holder:
    """An open handle: the pages that it pins, and what its addresses must read."""

    def __init__(self, handle: Any, pinned: list[Key], stamps: list[int]) -> None:
        self.handle = handle
        self.pinned = {page for key in pinned for page in key.up_to()}
        self.addrs = handle.addrs.tolist()
        self.stamps = stamps


class Fill:
    """Ends what an insertion of blocks that are still to be filled has begun."""

    def __init__(self, pool: kvpool.Pool, addrs: list[int]) -> None:
        self._pool = pool
        self.addrs = np.array(addrs, np.uint64)

    def close(self) -> None:
        self._pool.filled(self.addrs)


def tokens_of(pages: tuple[int, ...] | list[int]) -> list[int]:
    return [token for page in pages for token in PAGES[page]]


def medium_of(addr: int) -> int:
    return kvpool.decode_address(addr).medium


class LocalModel(RuleBasedStateMachine):
    """A pool, the model of it, and what must hold after every call."""

    @initialize(
        policy=st.sampled_from(["lru", "lfu", "fifo"]),
        order=st.sampled_from(["aggregated", "discrete"]),
        hbm=st.sampled_from([8, 6, 4, 2, 0]),
        dram=st.sampled_from([6, 4, 2, 0]),
    )
    def make_pool(self, policy: str, order: Any, hbm: int, dram: int) -> None:
        layout = kvpool.KVLayout(layers=2, kv_heads=1, head_dim=2, dtype="float32", block_tokens=BLOCK, order=order)
        self.pool = small_pool(hbm, max(dram, 1 - hbm), layout, policy=policy)
        self.views = {medium: content(self.pool, medium) for medium in (HBM, DRAM)}
        self.stream = self.pool.subscribe()
        self.stamps = iter(range(1, 1 << 24))  # float32 counts as far
        self.active: dict[int, int] = {}  # address -> stamp
        self.where: dict[Key, int] = {}  # address of each cached page
        self.stamp_of: dict[Key, int] = {}
        self.limbo: dict[int, set[Holder]] = {}  # address that a page left -> the holders that may still read it
        self.forgotten: dict[int, set[Holder]] = {}  # address of a page that is found no more -> who still pins it
        self.holders: list[Holder] = []
        self.stale: list[int] = []
        self.counters: Counter[str] = Counter()

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for holder in self.holders:
            holder.handle.close()
        self.pool.free(list(self.active))
        self.pool.evict(100, medium=MIXED)
        self.pool.evict(100, medium=MIXED)  # what hung below blocks of the other tier
        stats = self.pool.audit()
        assert stats.hbm.free == stats.hbm.capacity
        assert stats.dram.free == stats.dram.capacity
        assert (stats.index_blocks, stats.index_nodes, stats.namespaces) == (0, 0, 1)
        self.pool.close()

    # ---- the model

    def pinned(self) -> set[Key]:
        return set().union(*(holder.pinned for holder in self.holders)) if self.holders else set()

    def filling(self) -> set[int]:
        """Addresses of blocks whose content is still to come, as far as the pool knows."""
        fills = [holder.addrs for holder in self.holders if isinstance(holder.handle, Fill)]
        return {addr for addrs in fills for addr in addrs}

    def evictable(self, medium: int, but: set[Key] | None = None) -> int:
        kept = self.pinned() | (but or set())
        return sum(medium_of(addr) == medium for key, addr in self.where.items() if key not in kept)

    def free_blocks(self, medium: int) -> int:
        stats = self.pool.stats()
        return sum(tier.free for tier, own in ((stats.hbm, HBM), (stats.dram, DRAM)) if medium in (own, MIXED))

    def present(self, namespace: str, pages: tuple[int, ...]) -> int:
        keys = Key(namespace, pages).up_to()
        return next((at for at, key in enumerate(keys) if key not in self.where), len(keys))

    def below(self, key: Key) -> list[Key]:
        """The key's page and everything cached that begins with it."""
        depth = len(key.pages)
        return [k for k in self.where if k.namespace == key.namespace and k.pages[:depth] == key.pages]

    def partial(self, namespace: str, tokens: list[int], pages: int) -> int:
        """Tokens that agree beyond so many pages."""
        rest, best = tokens[pages * BLOCK : (pages + 1) * BLOCK], 0
        for key in self.where:
            if key.namespace == namespace and len(key.pages) == pages + 1:
                stored = tokens_of(key.pages)
                if stored[: pages * BLOCK] == tokens[: pages * BLOCK]:
                    agreed = [a == b for a, b in zip(rest, stored[pages * BLOCK :], strict=False)]
                    best = max(best, (*agreed, False).index(False))
        return best

    def stamp(self, addrs: Any) -> None:
        """Fills each block with other numbers; the blocks are active now."""
        for addr in addrs.tolist():
            place = kvpool.decode_address(addr)
            self.active[addr] = next(self.stamps)
            self.views[place.medium][place.block] = self.active[addr]

    def apply_events(self) -> tuple[list[Key], list[Key], dict[int, int]]:
        """Applies the pool's events to the model: pages stored and removed, addresses moved."""
        stored: list[Key] = []
        removed: list[Key] = []
        moved: dict[int, int] = {}
        pinned = self.pinned()
        by_tokens = {tokens: page for page, tokens in PAGES.items()}
        for event in self.stream:
            pairs = zip(event.tokens[::BLOCK].tolist(), event.tokens[1::BLOCK].tolist(), strict=True)
            keys = Key(event.namespace, tuple(by_tokens[pair] for pair in pairs)).up_to()[event.first_block :]
            assert len(keys) == len(event.addrs)
            for at, (key, addr) in enumerate(zip(keys, event.addrs.tolist(), strict=True)):
                if isinstance(event, kvpool.StoredEvent):
                    assert key not in self.where
                    assert len(key.pages) == 1 or Key(key.namespace, key.pages[:-1]) in self.where
                    self.where[key] = addr
                    stored.append(key)
                elif isinstance(event, kvpool.RemovedEvent):
                    assert key not in pinned
                    assert self.where.pop(key) == addr
                    self.stale.append(addr)
                    removed.append(key)
                else:
                    old = int(event.old_addrs[at])
                    assert self.where[key] == old
                    assert medium_of(old) != medium_of(addr)
                    readers = {holder for holder in self.holders if key in holder.pinned}
                    if readers:
                        assert medium_of(addr) == HBM  # nothing that is pinned goes down
                        self.limbo[old] = readers
                    else:
                        self.stale.append(old)
                    self.where[key] = addr
                    moved[old] = addr
                    self.counters["swapped_out_blocks" if medium_of(addr) == DRAM else "swapped_in_blocks"] += 1
        self.counters["evicted_blocks"] += len(removed)
        assert all(Key(key.namespace, key.pages[:-1]) in self.where for key in self.where if len(key.pages) > 1)
        return stored, removed, moved

    def hold(self, handle: Any, pinned: list[Key], stamps: list[int], keep: bool) -> None:
        if keep and len(self.holders) < 4:
            self.holders.append(Holder(handle, pinned, stamps))
        else:
            handle.close()

    # ---- what must hold at any time

    @invariant()
    def all_tell_one_story(self) -> None:
        if not hasattr(self, "pool"):
            return
        stats = self.pool.audit()
        pinned = self.pinned()
        for medium, tier in ((HBM, stats.hbm), (DRAM, stats.dram)):
            states = (tier.free, tier.active, tier.historical, tier.reserved, tier.lent, tier.quarantined, tier.retired)
            assert sum(states) == tier.capacity
            assert tier.reserved == tier.lent == tier.quarantined == tier.retired == 0
            active = [addr for addr in self.active if medium_of(addr) == medium]
            cached = {key: addr for key, addr in self.where.items() if medium_of(addr) == medium}
            limbo = [addr for addr in [*self.limbo, *self.forgotten] if medium_of(addr) == medium]
            assert tier.active == len(active)
            assert tier.historical == len(cached) + len(limbo)
            assert tier.evictable == sum(key not in pinned for key in cached)
            assert tier.pinned == tier.historical - tier.evictable
            blocks = kvpool.block_ids([*active, *cached.values(), *limbo]).tolist()
            assert len(set(blocks)) == len(blocks)
        assert stats.index_blocks == len(self.where)
        for name, count in self.counters.items():
            assert getattr(stats, name) == count, name

    @invariant()
    def no_byte_is_wrong(self) -> None:
        if not hasattr(self, "pool"):
            return
        wanted = dict(self.active)
        wanted |= {addr: self.stamp_of[key] for key, addr in self.where.items()}
        for holder in self.holders:
            wanted |= dict(zip(holder.addrs, holder.stamps, strict=True))
        for medium, view in self.views.items():
            addrs = [addr for addr in wanted if medium_of(addr) == medium]
            content = view[kvpool.block_ids(addrs)].reshape(len(addrs), int(np.prod(view.shape[1:])))
            stamps = np.array([wanted[addr] for addr in addrs], np.float32).reshape(-1, 1)
            assert (content == stamps).all()
