"""Random calls of the verbs of blocks and prompts, beside the model of local_model.py: see test_state_machine.py."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import rule
from kit import refused
from local_model import BLOCK, PAGES, Fill, Key, LocalModel, medium_of, tokens_of

import kvpool
from kvpool import DRAM, HBM, MIXED

namespaces = st.sampled_from(["", "", "a"])
prompts = st.lists(st.sampled_from(sorted(PAGES)), min_size=1, max_size=5).map(tuple)
media = st.sampled_from([HBM, DRAM, MIXED])
# Choices among what there is at the time are made by dice of this seed: the index draws from a random hash
# seed, and what Hypothesis draws may not depend on it.
seeds = st.integers(0, (1 << 30) - 1)


class LocalPrompts(LocalModel):
    """Checks what each call returns against the model, and takes it over."""

    # ---- blocks

    @rule(n=st.integers(0, 9), medium=media, evict=st.booleans())
    def alloc(self, n: int, medium: int, evict: bool) -> None:
        free = self.free_blocks(medium)
        evictable = sum(self.evictable(own) for own in (HBM, DRAM) if medium in (own, MIXED))
        if n > free + (evictable if evict else 0):
            with refused(self.pool, kvpool.OutOfBlocks, requested=n, free=free, evictable=evictable):
                self.pool.alloc(n, medium=medium, evict=evict)
            assert self.apply_events() == ([], [], {})
            return
        addrs = self.pool.alloc(n, medium=medium, evict=evict)
        assert len(set(addrs.tolist())) == n
        got = kvpool.media(addrs).tolist()
        assert got == (sorted(got) if medium == MIXED else [medium] * n)
        stored, removed, moved = self.apply_events()
        assert not stored
        if n <= free:
            assert not removed
            assert not moved
        assert all(medium_of(new) == DRAM for new in moved.values())
        self.stamp(addrs)
        self.counters["allocated_blocks"] += n

    @rule(seed=seeds)
    def free(self, seed: int) -> None:
        dice = random.Random(seed)
        addrs = dice.sample(sorted(self.active), dice.randint(0, len(self.active)))
        self.pool.free(addrs)
        for addr in addrs:
            del self.active[addr]
        self.stale += addrs
        self.counters["freed_blocks"] += len(addrs)

    @rule(seed=seeds)
    def write(self, seed: int) -> None:
        addrs = random.Random(seed).sample(sorted(self.active), min(1, len(self.active)))
        self.stamp(np.array(addrs, np.uint64))

    # ---- prompts

    def addresses_for(
        self, dice: random.Random, namespace: str, pages: tuple[int, ...]
    ) -> tuple[tuple[int, ...], list[int]]:
        """Addresses to insert: cached ones or duplicates where the index has the page, own ones beyond; and how many
        pages they are enough for."""
        missing = len(pages) - len(self.active)
        if missing > 0:
            self.alloc(missing, dice.choice((HBM, DRAM, MIXED)), True)
        present = self.present(namespace, pages)
        own = sorted(self.active)
        dice.shuffle(own)
        addrs: list[int] = []
        for at, key in enumerate(Key(namespace, pages).up_to()):
            if at < present and dice.random() < 0.5:
                left_behind = [a for a, readers in self.limbo.items() if any(key in r.pinned for r in readers)]
                addrs.append(dice.choice([self.where[key], *left_behind]))
            elif own:
                addrs.append(own.pop())
            else:
                break
        if len(set(addrs)) < len(addrs):
            addrs = [self.where[key] for key in Key(namespace, pages).up_to()[:present]]
        return pages[: len(addrs)], addrs

    def inserted(
        self, handle: Any, namespace: str, pages: tuple[int, ...], addrs: list[int], present: int, free_duplicates: bool
    ) -> list[Key]:
        """Checks what an insertion returned, and takes it over; its events are applied."""
        keys = Key(namespace, pages).up_to()
        duplicates = [addr for addr in addrs[:present] if addr in self.active]
        assert handle.tokens == len(pages) * BLOCK
        assert handle.inserted == len(pages) - present
        assert handle.duplicates.tolist() == duplicates
        assert handle.addrs.tolist() == [self.where[key] for key in keys]
        for key, addr in zip(keys[present:], addrs[present:], strict=True):
            assert self.where[key] == addr
            self.stamp_of[key] = self.active.pop(addr)
        if free_duplicates:
            for addr in duplicates:
                del self.active[addr]
            self.stale += duplicates
            self.counters["freed_blocks"] += len(duplicates)
        self.counters["inserted_blocks"] += len(pages) - present
        self.counters["duplicate_blocks"] += len(duplicates)
        return keys

    @rule(seed=seeds, namespace=namespaces, pages=prompts, free_duplicates=st.booleans(), keep=st.booleans())
    def insert(self, seed: int, namespace: str, pages: tuple[int, ...], free_duplicates: bool, keep: bool) -> None:
        dice = random.Random(seed)
        pages, addrs = self.addresses_for(dice, namespace, pages)
        present, filled = self.present(namespace, pages), dice.random() < 0.8
        handle = self.pool.insert(
            tokens_of(pages), addrs, namespace=namespace, free_duplicates=free_duplicates, filled=filled
        )
        stored, removed, moved = self.apply_events()
        assert (stored, removed, moved) == (Key(namespace, pages).up_to()[present:], [], {})
        keys = self.inserted(handle, namespace, pages, addrs, present, free_duplicates)
        self.hold(handle, keys[-1:], [self.stamp_of[key] for key in keys], keep)
        if not filled and keys[present:]:
            stamps = [self.stamp_of[key] for key in keys[present:]]
            self.hold(Fill(self.pool, addrs[present:]), keys[-1:], stamps, keep=True)

    @rule(seed=seeds, namespace=namespaces, first=prompts, second=prompts, keep=st.booleans())
    def insert_batch(self, seed: int, namespace: str, first: Any, second: Any, keep: bool) -> None:
        dice = random.Random(seed)
        self.alloc(dice.randint(0, 6), dice.choice((HBM, DRAM, MIXED)), True)
        own = sorted(self.active)
        dice.shuffle(own)
        first = first[: len(own)]
        second = second[: len(own) - len(first)]
        given = [own[: len(first)], own[len(first) : len(first) + len(second)]]
        shared = next(
            (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
        )
        present = [self.present(namespace, first), max(self.present(namespace, second), shared)]
        batch = [(tokens_of(pages), addrs) for pages, addrs in zip((first, second), given, strict=True)]
        handles = self.pool.batch.insert(batch, namespace=namespace)
        stored, removed, moved = self.apply_events()
        assert (removed, moved) == ([], {})
        wanted = [Key(namespace, pages).up_to()[at:] for pages, at in zip((first, second), present, strict=True)]
        assert stored == wanted[0] + wanted[1]
        for handle, pages, addrs, at in zip(handles, (first, second), given, present, strict=True):
            keys = self.inserted(handle, namespace, pages, addrs, at, False)
            self.hold(handle, keys[-1:], [self.stamp_of[key] for key in keys], keep)

    @rule(seed=seeds, namespace=namespaces, pages=prompts)
    def insert_in_a_wrong_place(self, seed: int, namespace: str, pages: tuple[int, ...]) -> None:
        if not self.where:
            return
        key = random.Random(seed).choice(sorted(self.where))
        keys = Key(namespace, (*pages, 0)).up_to()
        if key == keys[-1]:
            return
        addrs = [self.where.get(k, 0) for k in keys[:-1]]
        if self.present(namespace, pages) < len(pages) or self.where[key] in addrs:
            keys, addrs = keys[:1], []
            if key == keys[0]:
                return
        tokens = tokens_of(keys[-1].pages)
        with refused(self.pool, kvpool.StateError, address=self.where[key], position=len(addrs)):
            self.pool.insert(tokens, [*addrs, self.where[key]], namespace=namespace)
        assert self.apply_events() == ([], [], {})

    def matched(self, hit: Any, namespace: str, tokens: list[int], pages: tuple[int, ...], keep: bool) -> None:
        present = self.present(namespace, pages)
        keys = Key(namespace, pages[:present]).up_to()
        assert hit.tokens == present * BLOCK
        assert hit.addrs.tolist() == [self.where[key] for key in keys]
        assert hit.partial_tokens == self.partial(namespace, tokens, present)
        self.counters["match_calls"] += 1
        self.counters["requested_tokens"] += len(tokens)
        self.counters["matched_tokens"] += present * BLOCK
        self.hold(hit, keys[-1:], [self.stamp_of[key] for key in keys], keep)

    @rule(namespace=namespaces, pages=prompts, extra=st.sampled_from([[], [0], [1]]), keep=st.booleans())
    def match(self, namespace: str, pages: tuple[int, ...], extra: list[int], keep: bool) -> None:
        tokens = tokens_of(pages) + extra
        self.matched(self.pool.match(tokens, namespace=namespace), namespace, tokens, pages, keep)
        assert self.apply_events() == ([], [], {})

    @rule(namespace=namespaces, batch=st.lists(prompts, max_size=3), keep=st.booleans())
    def match_batch(self, namespace: str, batch: list[tuple[int, ...]], keep: bool) -> None:
        hits = self.pool.batch.match([tokens_of(pages) for pages in batch], namespace=namespace)
        for hit, pages in zip(hits, batch, strict=True):
            self.matched(hit, namespace, tokens_of(pages), pages, keep)

    @rule(namespace=namespaces, pages=prompts)
    def explain(self, namespace: str, pages: tuple[int, ...]) -> None:
        report = self.pool.explain_match(tokens_of(pages), namespace=namespace)
        present = self.present(namespace, pages)
        assert report.matched_tokens == present * BLOCK
        assert report.addrs.tolist() == [self.where[key] for key in Key(namespace, pages[:present]).up_to()]
        assert report.partial_tokens == self.partial(namespace, tokens_of(pages), present)
        more = {name: self.present(name, pages) for name in ("", "a")}
        assert report.elsewhere == {name: held * BLOCK for name, held in more.items() if held > present}
        if present == len(pages) and (not namespace or any(key.namespace == namespace for key in self.where)):
            assert report.reason == "complete"

    @rule(seed=seeds)
    def close(self, seed: int) -> None:
        if not self.holders:
            return
        holder = self.holders.pop(seed % len(self.holders))
        holder.handle.close()
        for left_behind in (self.limbo, self.forgotten):
            for addr, readers in list(left_behind.items()):
                readers.discard(holder)
                if not readers:
                    del left_behind[addr]
                    self.stale.append(addr)

    @rule(seed=seeds)
    def forget(self, seed: int) -> None:
        dice = random.Random(seed)
        named = dice.sample(sorted(self.where), dice.randint(0, min(3, len(self.where))))
        gone = {page for key in named for page in self.below(key)}
        addrs = [self.where[key] for key in named]
        addrs += [dice.choice(gone_already) for gone_already in (self.stale, list(self.forgotten)) if gone_already]
        dice.shuffle(addrs)
        readers = {self.where[key]: {holder for holder in self.holders if key in holder.pinned} for key in gone}
        for holder in self.holders:
            holder.pinned -= gone
        assert self.pool.forget(addrs) == len(gone)
        stored, removed, moved = self.apply_events()
        assert (stored, sorted(removed), moved) == ([], sorted(gone), {})
        self.counters["evicted_blocks"] -= len(gone)  # forgotten, not evicted
        for addr, pinning in readers.items():
            if pinning:
                self.stale.remove(addr)
                self.forgotten[addr] = pinning

    @rule(namespace=namespaces, pages=prompts, descendants=st.booleans())
    def delete(self, namespace: str, pages: tuple[int, ...], descendants: bool) -> None:
        tokens = tokens_of(pages)
        gone: list[Key] = []
        top = self.present(namespace, pages)
        whole = top == len(pages)
        if top and ((descendants and whole) or len(self.below(Key(namespace, pages[:top]))) == 1):

            def children(depth: int) -> int:
                return sum(len(key.pages) == depth + 1 for key in self.below(Key(namespace, pages[:depth])))

            while top > 1 and children(top - 1) == 1:
                top -= 1
            gone = self.below(Key(namespace, pages[:top]))
        pinned = self.pinned() & set(gone)
        if pinned:
            with refused(self.pool, kvpool.StateError, pinned=len(pinned)):
                self.pool.delete(tokens, namespace=namespace, descendants=descendants)
            gone = []
        else:
            assert self.pool.delete(tokens, namespace=namespace, descendants=descendants) == len(gone)
        stored, removed, moved = self.apply_events()
        assert (stored, sorted(removed), moved) == ([], sorted(gone), {})
        self.counters["evicted_blocks"] -= len(gone)  # deleted, not evicted
