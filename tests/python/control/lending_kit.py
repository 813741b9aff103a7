"""Pools and a cluster that are made up, so that tests of lending decide who has room, who refuses, and what is late."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from kvpool import DRAM, Busy, Member, MemberEvent, OutOfBlocks, PeerLost, StateError
from kvpool.control.lending import Lending

BLOCK_TOKENS = 256  # four blocks are a leaf


def address(instance, block, medium=DRAM):
    return (instance << 50) | (int(medium) << 47) | (1 << 24) | block


class Town:
    """Members, and what each of them publishes. Events arrive at once, or when `deliver` is called."""

    def __init__(self):
        self.members: dict[int, Member] = {}
        self.watchers: list[Watch] = []
        self.pools: dict[str, FakePool] = {}
        self.published = 0

    def show(self, member, kind="changed"):
        self.members[member.instance] = member
        self.tell(MemberEvent(kind, member))

    def remove(self, name):
        """It dies: its blocks are gone."""
        pool = self.pools[name]
        pool.closed = True
        member = self.members.pop(pool.instance)
        self.tell(MemberEvent("lost", member))

    def tell(self, event):
        for watch in list(self.watchers):
            watch.callback(event)


class Watch:
    def __init__(self, town, callback):
        self.town, self.callback = town, callback
        town.watchers.append(self)

    def close(self):
        if self in self.town.watchers:
            self.town.watchers.remove(self)


class FakeRegistration:
    def __init__(self, town, member):
        self.town, self.instance = town, member.instance
        self.failure = None

    @property
    def record(self):
        return self.town.members[self.instance]

    def publish(self, *, lending):
        if self.failure is not None:
            raise self.failure
        self.town.published += 1
        member = self.record
        self.town.show(replace(member, lending=lending))


class FakeCluster:
    heartbeat_s = 3600.0  # nothing happens by itself

    def __init__(self, town, registration):
        self.town, self.registration = town, registration

    def on_change(self, callback):
        watch = Watch(self.town, callback)
        for member in self.town.members.values():
            callback(MemberEvent("joined", member))
        return watch


class FakeHandle:
    def __init__(self, failure=None):
        self.failure = failure

    def exception(self, timeout=None):
        return self.failure

    def cancel(self):
        return False


class FakePeers:
    def __init__(self, pool):
        self.pool = pool
        self.lend_max = None

    def __iter__(self):
        counts: dict[int, int] = {}
        for addr in self.pool.borrowed:
            counts[addr >> 50] = counts.get(addr >> 50, 0) + 1
        return iter([SimpleNamespace(instance=owner, borrowed_blocks=count) for owner, count in counts.items()])


class FakePool:
    """Content is a number for each block, so that a block that was not copied is seen."""

    settings = SimpleNamespace(timeout_s=5.0)
    kv_layout = SimpleNamespace(block_tokens=BLOCK_TOKENS)
    _pieces = 1

    def __init__(self, town, name, instance, blocks):
        self.town, self.name, self.instance = town, name, instance
        self.blocks = blocks
        self.free_blocks = list(range(blocks))[::-1]
        self.lent: dict[int, str] = {}  # by address: to whom
        self.content: dict[int, int] = {}
        self.borrowed: set[int] = set()
        self.refusal = None  # of what it is asked for by peers
        self.moving_failure = None  # of its transfers
        self.asked: list[str] = []
        self.peers = FakePeers(self)
        self.closed = False
        town.pools[name] = self

    def stats(self):
        tier = SimpleNamespace(capacity=self.blocks, free=len(self.free_blocks), lent=len(self.lent))
        return SimpleNamespace(hbm=SimpleNamespace(lent=0), dram=tier)

    def alloc(self, n, medium=1, evict=True, *, instance=None, timeout=None):
        assert medium == DRAM
        assert not evict or instance is None  # a creditor's cached prompts are not its debtors' to evict
        owner = self
        if instance is not None:
            self.asked.append(instance)
            owner = self.town.pools[instance]
            if owner.closed:
                raise PeerLost("it is gone")
            if owner.refusal is not None:
                raise owner.refusal
            limit = owner.peers.lend_max
            if limit is not None and len(owner.lent) + n > limit:
                raise Busy("so much it does not lend", free=max(0, limit - len(owner.lent)))
        if len(owner.free_blocks) < n:
            error = OutOfBlocks("no room")
            error.free = len(owner.free_blocks)
            raise error
        addrs = [address(owner.instance, owner.free_blocks.pop()) for _ in range(n)]
        if owner is not self:
            owner.lent.update(dict.fromkeys(addrs, self.name))
            self.borrowed.update(addrs)
        return np.array(addrs, np.uint64)

    def free(self, addrs):
        for addr in np.asarray(addrs).tolist():
            owner = self.owner(addr)
            if owner is not self:
                self.borrowed.remove(addr)
                assert owner.lent.pop(addr) == self.name
            owner.free_blocks.append(addr & 0xFFFFFF)
            assert len(set(owner.free_blocks)) == len(owner.free_blocks)

    def owner(self, addr):
        return next(pool for pool in self.town.pools.values() if pool.instance == addr >> 50)

    def transfer(self, peer, blocks, *, to, timeout=None):
        assert {self.owner(addr).name for addr in to.tolist()} == {peer}
        return self.copy(blocks, to)

    def fetch(self, peer, blocks, *, to, timeout=None):
        assert len({addr >> 50 for addr in blocks.tolist()}) == 1
        return self.copy(blocks, to)

    def copy(self, blocks, to):
        if self.moving_failure is not None:
            return FakeHandle(self.moving_failure)
        if any(self.owner(addr).closed for addr in (*blocks.tolist(), *to.tolist())):
            return FakeHandle(PeerLost("it is gone"))
        for old, new in zip(blocks.tolist(), to.tolist(), strict=True):
            self.owner(new).content[new] = self.owner(old).content[old]
        return FakeHandle()


class FakeSequence:
    def __init__(self, pool, blocks):
        self.pool = pool
        self.closed = False
        self.addrs = pool.alloc(blocks, DRAM)
        self.tokens = blocks * BLOCK_TOKENS
        self.meanwhile = None  # runs before the next switch
        self.fails_at = None  # the switch of this block fails
        self._set_backs = 0
        for number, addr in enumerate(self.addrs.tolist()):
            pool.content[addr] = number

    def _switch(self, blocks, old, new, copied_at, timeout):
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        if self.fails_at in blocks:
            self.fails_at = None
            raise PeerLost("gone at the switch")
        if self._set_backs != copied_at or not np.array_equal(self.addrs[blocks], old):
            raise StateError("it has changed")
        self.addrs = self.addrs.copy()
        self.addrs[blocks] = new

    def replace(self, first_block, addrs, *, timeout=None):
        was = self.addrs[first_block : first_block + len(addrs)].copy()
        self.addrs = self.addrs.copy()
        self.addrs[first_block : first_block + len(addrs)] = addrs
        return was

    @property
    def owners(self):
        return [int(addr) >> 50 for addr in self.addrs]

    def check(self):
        """Each block has its content, wherever it lies, and belongs to nobody else."""
        for number, addr in enumerate(self.addrs.tolist()):
            owner = self.pool.owner(addr)
            assert owner.content[addr] == number
            assert owner is self.pool or owner.lent[addr] == self.pool.name
            assert addr & 0xFFFFFF not in owner.free_blocks


def town_of(*sizes, **options):
    """A pool of each size, numbered from 1; each takes part in lending. Names are "m1", "m2"."""
    town = Town()
    made = []
    for instance, blocks in enumerate(sizes, start=1):
        made.append(enter(town, instance, blocks, **options))
    return town, made


def enter(town, instance, blocks, **options):
    member = Member(f"m{instance}", instance, 1000 + instance, "both")
    town.show(member, "joined")
    pool = FakePool(town, member.name, instance, blocks)
    registration = FakeRegistration(town, member)
    return pool, Lending(pool, FakeCluster(town, registration), **options)


def lend(lending, seq, first, blocks, creditor):
    """As an engine does that chooses the creditor by itself."""
    lent = lending._pool.alloc(blocks, DRAM, False, instance=creditor)
    old = seq.addrs[first : first + blocks]
    for block, new in zip(old.tolist(), lent.tolist(), strict=True):
        seq.pool.owner(new).content[new] = seq.pool.content[block]
    seq.pool.free(seq.replace(first, lent))
    lending.watch(seq)


class Ring:
    """Each member owes the next so many blocks, and all memory but a few blocks of the first is used.

    Freezes end by `now`; nothing else takes time.
    """

    def __init__(self, members=3, blocks=8, free=2, takes_part=None, settle_min=1, **options):
        self.now = 0.0
        self.town, self.made = town_of(*[3 * blocks] * members, settle_min=settle_min, **options)
        for _, lending in self.made:
            lending._settling._clock = lambda: self.now
        self.sequences = [FakeSequence(pool, 2 * blocks) for pool, _ in self.made]
        for number, (_, lending) in enumerate(self.made):
            lend(lending, self.sequences[number], 0, blocks, f"m{(number + 1) % members + 1}")
        self.fillers = [
            FakeSequence(pool, len(pool.free_blocks) - (0 if pool is not self.pool(1) else free))
            for pool, _ in self.made
        ]
        for _, lending in self.made:
            lending.publish()
        self.turns(takes_part)  # now all know who takes part
        self.now += 1e6  # and look for cycles

    def pool(self, number):
        return self.made[number - 1][0]

    def lending(self, number):
        return self.made[number - 1][1]

    def turns(self, members=None, times=1):
        """Members take turns, all by default; how many blocks have come home."""
        numbers = members or range(1, len(self.made) + 1)
        lendings = [self.lending(number) for number in numbers]
        return sum(lending.settle() for _ in range(times) for lending in lendings if not lending.closed)

    def begin(self):
        """All agree, and each brings home two of its blocks in a first round."""
        assert self.turns() == 0
        assert self.turns() == 6
        assert self.owed == [6, 6, 6]
        assert self.frozen == [6, 6, 6]

    @property
    def owed(self):
        return [len(pool.borrowed) for pool, _ in self.made]

    @property
    def frozen(self):
        ends = [*range(2, len(self.made) + 1), 1]
        return [
            lending._settling._settler.frozen(end, self.now) for end, (_, lending) in zip(ends, self.made, strict=True)
        ]

    @property
    def calls(self):
        return [lending._settling._settler.said.call for _, lending in self.made]

    def make_room(self, number, blocks):
        """A sequence of the engine ends, as far as so many blocks."""
        pool, filler = self.pool(number), self.fillers[number - 1]
        pool.free(filler.addrs[-blocks:])
        filler.addrs = filler.addrs[:-blocks]

    def check(self):
        for seq in (*self.sequences, *self.fillers):
            seq.check()
