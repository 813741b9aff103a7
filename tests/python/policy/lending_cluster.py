"""A cluster that is made up: members that lend, borrow, settle and pay back by the policies, and check each other.

What members say to each other is a call; only rows are late, doubled or lost. Each change of memory is checked at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from kvpool import HBM
from kvpool.policy import lending

LEAF = 4
CHUNK = 3
LEAST = 4


@dataclass
class Sequence:
    """Where each block lies: None at home, else the creditor."""

    name: int
    length: int  # that it will have
    places: list[int | None] = field(default_factory=list)
    since: dict[int, int] = field(default_factory=dict)  # of loans, by creditor

    def held(self):
        places, home, first = self.places, [], None
        for number, place in enumerate([*places, -1]):
            if place is None and first is None:
                first = number
            elif place is not None and first is not None:
                home.append((first, number))
                first = None
        return lending.Held(self.name, len(places), home, sorted({place for place in places if place is not None}))

    def loans(self):
        """Runs of blocks with one creditor."""
        first = 0
        for number in range(1, len(self.places) + 1):
            if number == len(self.places) or self.places[number] != self.places[first]:
                if (creditor := self.places[first]) is not None:
                    yield lending.Loan(self.name, creditor, first, number - first, self.since[creditor])
                first = number


class Member:
    """A member with its memory, its own ledger and its freezes."""

    def __init__(self, cluster, number, blocks, lend_max):
        self.cluster, self.number, self.blocks, self.lend_max = cluster, number, blocks, lend_max
        self.ledger, self.freezes = lending.Ledger(), lending.Freezes(number)
        self.sequences: dict[int, Sequence] = {}
        self.lent: dict[int, int] = {}
        self.published: lending.Row | None = None
        self.versions = self.searches = 0

    @property
    def free(self):
        home = sum(place is None for each in self.sequences.values() for place in each.places)
        return self.blocks - home - sum(self.lent.values())

    @property
    def debts(self):
        owed: dict[int, int] = {}
        for each in self.sequences.values():
            for place in each.places:
                if place is not None:
                    owed[place] = owed.get(place, 0) + 1
        return owed

    def row(self):
        lent = sum(self.lent.values())
        host = f"host-{self.number % 3}"
        return lending.Row(
            self.number, 1, self.versions, host, self.blocks, {HBM: self.free}, self.lend_max, lent, self.debts
        )

    def check(self):
        assert self.free >= 0
        assert sum(self.lent.values()) <= self.lend_max
        for creditor, blocks in self.debts.items():
            assert self.cluster.members[creditor].lent[self.number] == blocks
        for debtor, blocks in self.lent.items():
            assert self.cluster.members[debtor].debts.get(self.number, 0) == blocks

    def publish(self):
        self.versions += 1
        row = self.row()
        if lending.worth_publishing(self.published, row):
            self.published = row
            self.cluster.send(row)

    def ask(self, borrower, blocks):
        """What a creditor answers: whether it lends, and how much it could."""
        lendable = self.row().can_lend
        if lendable < blocks:
            self.cluster.refusals += 1
            return False, lendable
        self.cluster.loans += 1
        return True, lendable

    def returned(self, debtor, blocks):
        """A debtor needs so many of the lent blocks no more."""
        self.lent[debtor] -= blocks
        assert self.lent[debtor] >= 0
        if not self.lent[debtor]:
            del self.lent[debtor]

    def write(self, sequence):
        """One more block; False without room for it."""
        if self.free < 1:
            self.make_room(2 * LEAF)
        if self.free < 1:
            return False
        sequence.places.append(None)
        return True

    def make_room(self, need):
        self.searches += 1
        search = lending.Search(self.number, need, seed=self.searches)
        others = [number for number in self.cluster.members if number != self.number]
        is_blind = self.cluster.dice.random() < 0.4  # asks one by a row that is very old: so debts meet
        while proposed := [self.cluster.dice.choice(others)] if is_blind else search.propose(self.ledger):
            is_blind = False
            for creditor in proposed:
                lender = self.cluster.members[creditor]
                granted, lendable = lender.ask(self.number, need)
                if granted:
                    held = [each.held() for each in self.sequences.values() if each.places]
                    plan = lending.plan_offload(held, need - LEAF + 1, {creditor: need}, LEAF, tail=1)
                    for move in plan.moves:
                        self.move(move, None, creditor)
                    return
                search.refuse(self.ledger, creditor, lendable)

    def move(self, part, source, target):
        """Blocks of a sequence go from or to a creditor."""
        sequence = self.sequences[part.sequence]
        for number in range(part.first, part.first + part.blocks):
            assert sequence.places[number] == source
            sequence.places[number] = target
        if source is not None:
            self.cluster.members[source].returned(self.number, part.blocks)
        if target is not None:
            lender = self.cluster.members[target]
            lender.lent[self.number] = lender.lent.get(self.number, 0) + part.blocks
            lender.check()
            self.cluster.clock += 1
            sequence.since.setdefault(target, self.cluster.clock)
        self.check()

    def pay_back(self, reserve):
        loans = [loan for each in self.sequences.values() for loan in each.loans()]
        now = self.cluster.now
        free_to_pay = [loan for loan in loans if not self.freezes.frozen(self.number, loan.creditor, self.ledger, now)]
        wanted = {loan.creditor: 1 for loan in free_to_pay if self.cluster.members[loan.creditor].free == 0}
        for part in lending.plan_payback(free_to_pay, max(0, self.free - reserve), wanted, LEAF):
            self.move(part, part.creditor, None)

    def bring_home(self, creditor, blocks):
        """Blocks of a frozen debt, by the order of the coordinator."""
        for loan in [loan for each in self.sequences.values() for loan in each.loans() if loan.creditor == creditor]:
            part = min(blocks, loan.blocks)
            if part:
                self.move(lending.Payback(loan.sequence, creditor, loan.first, part), creditor, None)
            blocks -= part
        assert not blocks

    def end(self, name):
        """A sequence ends: what it has at creditors is freed there. Not while a debt of it is frozen."""
        sequence = self.sequences[name]
        now = self.cluster.now
        if any(self.freezes.frozen(self.number, place, self.ledger, now) for place in {*sequence.places} - {None}):
            return
        del self.sequences[name]
        for loan in sequence.loans():
            self.cluster.members[loan.creditor].returned(self.number, loan.blocks)
        self.check()

    def coordinate(self):
        """Settles the cycles that this member coordinates, by what its ledger says; its orders may be lost halfway."""
        dice, members = self.cluster.dice, self.cluster.members
        for settlements in lending.settle(self.ledger.debts(), LEAST if self.cluster.is_busy else 1):
            for settlement in settlements:
                if settlement.coordinator != self.number:
                    continue
                self.cluster.clock += 1
                freeze = lending.freeze_of(settlement, self.ledger, self.cluster.clock, self.cluster.now + 3)
                ring = [members[number] for number in settlement.members]
                agreed = all(each.freezes.agree(freeze, each.ledger, self.cluster.now) for each in ring)
                free = {each.number: each.free for each in ring}
                if not agreed or not any(free.values()):
                    continue
                for step in lending.steps(settlement, free, CHUNK):
                    if members[step.debtor].debts.get(step.creditor, 0) < step.blocks:
                        break  # the row was old
                    if self.cluster.is_busy and dice.random() < 0.05:
                        return  # the coordinator is gone: nobody lifts the freezes, their time ends them
                    members[step.debtor].bring_home(step.creditor, step.blocks)
                    self.cluster.settled += step.blocks
                for each in ring:
                    each.freezes.lift(self.number, self.cluster.clock)


class Cluster:
    """All members, the rows under way, and a clock of ticks."""

    def __init__(self, seed, members=8):
        self.dice = Random(seed)
        self.now = self.clock = self.refusals = self.loans = self.settled = self.names = 0
        self.is_busy = True
        self.under_way: list[tuple[float, int, lending.Row]] = []
        self.members = {
            number: Member(self, number, self.dice.randint(40, 80), self.dice.choice([15, 25, 40]))
            for number in range(1, members + 1)
        }

    def send(self, row):
        for number in self.members:
            if self.is_busy and self.dice.random() < 0.05:
                continue  # lost; a later one comes
            for _ in range(1 + (self.dice.random() < 0.1)):
                delay = self.dice.choice([0, 2, 10, 30]) if self.is_busy else 0
                self.under_way.append((self.now + delay, number, row))

    def tick(self):
        self.now += 1
        self.dice.shuffle(self.under_way)
        arrived = [each for each in self.under_way if each[0] <= self.now]
        self.under_way = [each for each in self.under_way if each[0] > self.now]
        for _, number, row in arrived:
            self.members[number].ledger.take(row)
        for member in self.members.values():
            if self.is_busy:
                self.work(member)
            if not self.is_busy or self.dice.random() < 0.1:  # pay-back is rare, so that debts meet
                member.pay_back(reserve=6 if self.is_busy else 0)
            member.publish()
            if self.dice.random() < 0.3:
                member.coordinate()
            for each in self.members.values():
                each.check()

    def work(self, member):
        """Sequences come, grow and end; a burst now and then makes lenders of yesterday borrow."""
        dice = self.dice
        burst = (self.now // 25 + member.number) % 4 == 0
        if dice.random() < (0.6 if burst else 0.02):
            self.names += 1
            member.sequences[self.names] = Sequence(self.names, dice.randint(4, 40))
        for sequence in list(member.sequences.values()):
            grows = len(sequence.places) < sequence.length and member.write(sequence)
            if not grows and dice.random() < 0.08:
                member.end(sequence.name)

    def drain(self, ticks):
        """Nothing grows any more, and what is more than a member can hold ends: then all debts must come home."""
        self.is_busy = False
        self.now += 10  # freezes end
        for member in self.members.values():
            while sum(len(each.places) for each in member.sequences.values()) > member.blocks - 1:
                member.end(next(reversed(member.sequences)))
            member.versions += 1
            self.send(member.row())
        for _ in range(ticks):
            self.tick()
            for member in self.members.values():
                self.send(member.row())
            if not any(member.debts for member in self.members.values()):
                return True
        return False
