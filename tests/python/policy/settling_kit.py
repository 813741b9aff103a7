"""Members that settle debts by what each says in a directory that is made up: records are late, doubled and left out.

The memory of all members is checked at every step: nobody has less than no free block, no debt grows, and a block comes
home only for a call that its coordinator has made, while the freeze of the debtor counts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from kvpool import DRAM
from kvpool.policy import lending

LEAST, CHUNK, LEAF = 4, 3, 2
FREEZE_S, PAUSE_S = 60.0, 15.0
BLOCKS = 400


@dataclass
class Party:
    """A member: its memory, what it has read, and its part in settlements."""

    town: Town
    number: int
    free: int
    term: int = 1
    is_up: bool = True
    takes_turns: bool = True
    offset: float = 0.0
    version: int = 0
    agreed_at: dict[tuple[int, int, int], float] = field(default_factory=dict)  # to calls, on its clock

    def begin(self):
        self.ledger = lending.Ledger()
        self.settler = lending.Settler(
            self.number,
            self.ledger,
            lending.SettlementRules(LEAST, CHUNK, LEAF, FREEZE_S, PAUSE_S),
            seed=self.town.dice.randrange(1 << 30),
        )
        self.published = None
        self.settler.news = True

    @property
    def now(self):
        """Its own clock: no two members' are compared."""
        return self.town.now + self.offset

    @property
    def debts(self):
        return {creditor: n for (debtor, creditor), n in self.town.owed.items() if debtor == self.number and n}

    @property
    def lent(self):
        return sum(n for (_, creditor), n in self.town.owed.items() if creditor == self.number)

    def row(self, version):
        free = {DRAM: self.free}
        return lending.Row(self.number, self.term, version, "a", BLOCKS, free, BLOCKS, self.lent, self.debts)

    def publish(self):
        row = self.row(self.version + 1)
        if self.settler.news or lending.worth_publishing(self.published, row):
            self.version += 1
            self.published = row
            self.settler.news = False
            self.ledger.take(row)
            self.town.show(self.number, row, self.settler.said)

    def read(self, member, record):
        if record is None:
            self.ledger.leave(member)
            self.settler.hear(member, None)
        elif self.ledger.take(record[0]):
            self.settler.hear(member, record[1])

    def turn(self):
        due = self.settler.turn(self.now, lambda creditor: self.debts.get(creditor, 0), lambda: self.free)
        call = self.settler.said.call
        if call is not None:
            self.town.calls[(self.number, *call.key)] = call
        for coordinator, answer in self.settler.said.answers.items():
            self.agreed_at.setdefault((coordinator, *answer.key), self.now)
        for note in self.settler.notes():
            self.town.note(self, note)
        if due is not None:
            self.bring(due)
        self.publish()

    def bring(self, due):
        """Brings home what has room, at times in two parts."""
        for _ in range(2):
            blocks = min(due.portion(self.free), self.town.owed[self.number, due.creditor])
            if self.town.dice.random() < 0.5:
                blocks = min(blocks, due.unit)
            if not blocks:
                return
            self.town.move(self, due, blocks)
            self.settler.brought(due, blocks)
            due = self.settler.due(self.now)
            if due is None:
                return


class Town:
    """All members, their true debts, and the directory."""

    def __init__(self, seed, owed, free, is_rough=True):
        self.dice = Random(seed)
        self.now = 0.0
        self.owed = Counter(owed)
        self.is_rough = is_rough
        self.records: dict[int, tuple[lending.Row, lending.Said]] = {}
        self.under_way: list[tuple[float, int, int, object]] = []  # when, to whom, of whom, what
        self.calls: dict[tuple[int, int, int], lending.Call] = {}
        self.moved: Counter = Counter()  # by call and member
        self.published = self.completed = 0
        self.stops: list[str] = []
        self.parties = {number: Party(self, number, blocks) for number, blocks in free.items()}
        for party in self.parties.values():
            party.offset = self.dice.uniform(0, 1e6)
            party.begin()
        for party in self.parties.values():
            party.publish()

    @property
    def up(self):
        return [party for party in self.parties.values() if party.is_up]

    def show(self, member, row, said):
        self.published += 1
        self.records[member] = (row, said)
        self.send(member, (row, said))

    def send(self, member, record):
        for watcher in self.parties:
            if watcher == member:
                continue
            if self.is_rough and record is not None and self.dice.random() < 0.1:
                continue  # it reads a later one
            for _ in range(1 + (self.is_rough and self.dice.random() < 0.15)):
                delay = self.dice.choice([0.5, 1, 1, 3, 9]) if self.is_rough else 1
                self.under_way.append((self.now + delay, watcher, member, record))

    def tick(self):
        self.now += 1
        if self.dice.random() < 0.1:  # a watcher reads all anew
            for member, record in self.records.items():
                self.under_way += [(self.now, each, member, record) for each in self.parties if each != member]
        self.dice.shuffle(self.under_way)
        arrived = [each for each in self.under_way if each[0] <= self.now]
        self.under_way = [each for each in self.under_way if each[0] > self.now]
        for _, watcher, member, record in arrived:
            if self.parties[watcher].is_up:
                self.parties[watcher].read(member, record)
        order = self.up
        self.dice.shuffle(order)
        for party in order:
            if party.is_up and party.takes_turns and (not self.is_rough or self.dice.random() < 0.8):
                party.turn()
        self.check()

    def move(self, party, due, blocks):
        """Blocks come home: each step is held against what it must not do."""
        key = (due.coordinator, *due.key)
        call = self.calls[key]
        assert (party.number, due.creditor) in call.settlement.debts
        assert party.now < party.agreed_at[key] + FREEZE_S, "its freeze is over"
        terms = dict(zip(call.settlement.members, call.terms, strict=True))
        assert terms[party.number] == party.term
        for member in call.settlement.members:  # as far as this member has read
            row = party.ledger.get(member)
            assert row is not None, "a member has left"
            assert row.term == terms[member], "a member is in another term"
        self.moved[key, party.number] += blocks
        assert self.moved[key, party.number] <= call.due
        party.free -= blocks
        self.parties[due.creditor].free += blocks
        self.owed[party.number, due.creditor] -= blocks
        self.check()

    def note(self, party, note):
        if "is complete" in note:
            self.completed += 1
            keys = [key for key in self.calls if key[0] == party.number]
            call = self.calls[max(keys)]
            home = {self.moved[max(keys), member] for member in call.settlement.members}
            assert home == {call.due}, "everybody has brought home as many: no net debt has changed"
        elif "stops" in note:
            self.stops.append(note)

    def check(self):
        for party in self.parties.values():
            assert party.free >= 0
        assert all(blocks >= 0 for blocks in self.owed.values())

    def borrow(self, debtor, creditor, blocks):
        """More debts, also ones that are frozen: the creditor has room again, since a sequence of it has ended."""
        if creditor != debtor and self.parties[creditor].is_up and self.parties[debtor].is_up:
            if self.parties[creditor].lent < BLOCKS // 2:
                self.owed[debtor, creditor] += blocks
            self.parties[debtor].publish()

    # ---- what goes wrong

    def kill(self, number):
        """It dies: what it has lent is lost, and what it owes is free at once at its creditors."""
        party = self.parties[number]
        if not party.is_up:
            return
        party.is_up = False
        self.void(party)
        self.records.pop(number, None)
        self.send(number, None)

    def void(self, party):
        for (debtor, creditor), blocks in list(self.owed.items()):
            if debtor == party.number:
                self.parties[creditor].free += blocks
            if party.number in (debtor, creditor):
                del self.owed[debtor, creditor]

    def come_back(self, number):
        """In a new term, without debts: late records of its old term are still under way."""
        party = self.parties[number]
        self.void(party)
        party.is_up, party.term = True, party.term + 1
        party.version += 1
        party.begin()
        for member, record in self.records.items():
            party.read(member, record)
        party.publish()

    def calm(self, ticks):
        """Nothing goes wrong any more, and everybody reads everything."""
        self.is_rough = False
        for party in self.up:
            party.takes_turns = True
        for tick in range(ticks):
            for party in self.up:
                party.settler.news |= tick % 50 == 0  # its row is exact
            for member, record in self.records.items():
                for party in self.up:
                    if party.number != member:
                        party.read(member, record)
            self.tick()

    def is_even(self):
        """Whether each settlement, complete or not, has brought home as many blocks of each of its members."""
        return all(
            len({self.moved[key, member] for member in call.settlement.members}) == 1
            for key, call in self.calls.items()
        )

    def left(self):
        """Settlements that are left to do among the members that are up."""
        up = {party.number for party in self.up}
        debts = {pair: blocks for pair, blocks in self.owed.items() if blocks and set(pair) <= up}
        return [each for settlements in lending.settle(debts, LEAST) for each in settlements]


def ring(seed, blocks=20, members=3, free=2):
    """Each owes the next, and one has free blocks. Nothing is late."""
    pairs = {(number, number % members + 1): blocks for number in range(1, members + 1)}
    return Town(seed, pairs, {number: free if number == members else 0 for number in range(1, members + 1)}, False)
