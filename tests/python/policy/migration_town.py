"""All instances of migration_kit.py and the network between them, one step after another."""

from __future__ import annotations

import itertools
from random import Random

from policy.migration_kit import BLOCK, Incarnation, reference

from kvpool.policy import migration as policy


class Town:
    """All instances.

    `faults`: how often something goes wrong, from 0. `false_proofs`: a stopped one counts as gone. `evicting`: all are
    full of cached prompts.
    """

    def __init__(
        self, seed, faults, false_proofs=False, instances=3, requests=3, capacity=60, length=40, evicting=False
    ):
        self.dice = Random(seed)
        self.faults, self.false_proofs, self.length = faults, false_proofs, length
        self.addresses, self.numbers, self.others = itertools.count(1), itertools.count(1), itertools.count(1)
        self.evicting = evicting
        self.incarnations: dict[int, Incarnation] = {}
        self.at: dict[str, Incarnation] = {}
        self.flight: list[tuple[int, bytes]] = []
        self.decoded_by: dict[tuple[str, policy.Term], int] = {}
        self.gate = policy.OutputGate()
        self.lost: set[str] = set()
        self.prompts = {
            f"r{each}": [self.dice.randrange(900) for _ in range(self.dice.randint(2, 14))] for each in range(requests)
        }
        self.expected = {request: reference(prompt, length) for request, prompt in self.prompts.items()}
        for each in range(instances):
            self.start(f"i{each}", capacity)
        for request, prompt in self.prompts.items():
            self.dice.choice(list(self.at.values())).serve(request, prompt)
        for one in self.at.values():
            for request, prompt in self.prompts.items():
                if self.dice.random() < 0.3:
                    self.cache(one, request, prompt)

    def cache(self, one, request, prompt):
        blocks = one.alloc((len(prompt) - 1) // BLOCK)
        one.cached[request] = blocks
        for at in range(len(blocks) * BLOCK):
            one.write(blocks, at, prompt[at])

    def start(self, name, capacity):
        one = Incarnation(self, name, next(self.numbers), capacity)
        one.evicts = self.evicting
        self.incarnations[one.number] = self.at[name] = one

    def is_proved_gone(self, number):
        return self.has_ended(number) or (self.false_proofs and self.incarnations[number].is_stopped)

    def has_ended(self, number):
        return not self.incarnations[number].is_up

    def send(self, to, said):
        self.flight.append((to, policy.encode(said)))

    def note_decoding(self, request, term, one):
        """Not more than one place decodes a request in a term."""
        assert self.decoded_by.setdefault((request, term), one.number) == one.number, f"{request} runs twice in {term}"

    def put_out(self, request, term, position, token):
        if self.gate.accept(request, term, position):
            at = len(self.prompts[request]) + position
            assert token == self.expected[request][at], f"token {position} of {request} is wrong"

    def kill(self, one):
        one.is_up, one.memory = False, {}
        for request in self.prompts:
            if not any(other.holds(request) for other in self.at.values() if other.is_up):
                self.lost.add(request)

    def mischief(self):
        dice = self.dice
        if dice.random() < 0.002 * self.faults:
            one = dice.choice(list(self.at.values()))
            self.kill(one)
            self.start(one.name, one.capacity)
        if dice.random() < 0.03 * self.faults:
            one = dice.choice(list(self.at.values()))
            one.is_stopped = not one.is_stopped
        if self.flight and dice.random() < 0.2 * self.faults:
            self.flight.pop(dice.randrange(len(self.flight)))
        if self.flight and dice.random() < 0.2 * self.faults:
            self.flight.append(dice.choice(self.flight))

    def deliver(self, in_order=False):
        if not self.flight:
            return
        to, message = self.flight.pop(0 if in_order else self.dice.randrange(len(self.flight)))
        one = self.incarnations[to]
        if one.is_up and not one.is_stopped:
            one.hear(message)
        elif one.is_up and not in_order:
            self.flight.append((to, message))  # until it wakes

    def begin(self):
        for one in self.at.values():
            for request, hosted in one.hosted.items():
                if hosted.decodes and not one.is_stopped and not one.is_moving(request) and self.dice.random() < 0.1:
                    others = [other for other in self.at.values() if other is not one]
                    one.migrate(request, self.dice.choice(others), self.dice.choice(["kv", "tokens", "auto"]))

    def tick(self):
        self.mischief()
        for one in self.at.values():
            if not one.is_stopped:
                one.turn()
        for _ in range(self.dice.randint(0, 6)):
            self.deliver()
        for one in self.at.values():
            one.check()

    def run(self, ticks):
        for _ in range(ticks):
            self.begin()
            self.tick()
        self.quiet()

    def quiet(self):
        """No more faults: everything must come to its end."""
        self.faults = 0
        for one in self.at.values():
            one.is_stopped = False
        for _ in range(400):
            self.tick()
            while self.flight:
                self.deliver(in_order=True)
            if not any(one.sources or list(one.arrivals) for one in self.at.values()):
                break
        else:
            raise AssertionError("a migration does not end")

    def check_ends(self):
        """Each request is in exactly one place, or was lost with the only one; and none is lost without faults."""
        for request in self.prompts:
            places = [one.name for one in self.at.values() if request in one.hosted]
            decoding = [one.name for one in self.at.values() if request in one.hosted and one.hosted[request].decodes]
            assert places == decoding
            assert len(decoding) == 1 or (request in self.lost and not decoding), (request, decoding)
        for one in self.at.values():
            assert not one.arriving
