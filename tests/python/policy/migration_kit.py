"""Instances that migrate requests to each other over a network that loses, repeats, delays and reorders messages.

Instances are killed, restarted and stopped at any message, and may be full of cached prompts that they evict. A
request's next token is a function of all cells that it reads, so a block that is missing, stale or half written changes
what it puts out. At every step: no two places decode one request in one term, no block has two owners, none is lost,
and the reader gets the tokens of a run without any migration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvpool.policy import migration as policy

if TYPE_CHECKING:
    from policy.migration_town import Town

BLOCK = 4


def next_token(cells):
    """What a model puts out that reads these cells."""
    value = 7
    for cell in cells:
        value = (value * 31 + cell) % 1009
    return value


def reference(prompt, length):
    """The tokens of a run without migration."""
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(next_token([token * 1000 + at for at, token in enumerate(tokens)]))
    return tokens


@dataclass
class Hosted:
    """A request at an instance."""

    prompt: int
    tokens: list[int]
    whole: int
    blocks: list[int]
    own: set[int]
    term: policy.Term
    decodes: bool = True


@dataclass
class Incarnation:
    """One run of an instance: its memory, and its part in migrations."""

    town: Town
    name: str
    number: int
    capacity: int
    is_up: bool = True
    is_stopped: bool = False
    evicts: bool = False
    memory: dict[int, list[int]] = field(default_factory=dict)
    cached: dict[str, list[int]] = field(default_factory=dict)
    hosted: dict[str, Hosted] = field(default_factory=dict)
    arriving: dict[policy.MigrationId, tuple[list[int], set[int]]] = field(default_factory=dict)

    def __post_init__(self):
        self.departures = policy.Departures(self.number)
        self.arrivals = policy.Arrivals(self.number)
        self.sources: list[policy.Source] = []

    def alloc(self, n):
        """n blocks, or None."""
        while len(self.memory) + n > self.capacity and self.evict():
            pass
        if len(self.memory) + n > self.capacity:
            return None
        made = [next(self.town.addresses) for _ in range(n)]
        self.memory.update((addr, [0] * BLOCK) for addr in made)
        return made

    def free(self, addrs):
        for addr in addrs:
            del self.memory[addr]  # a block that is freed twice fails here

    def evict(self):
        """The oldest cached prompt that nothing uses. Whether there was one."""
        used = {addr for one in self.hosted.values() for addr in one.blocks}
        used |= {addr for blocks, _ in self.arriving.values() for addr in blocks}
        for name, blocks in self.cached.items():
            if self.evicts and used.isdisjoint(blocks):
                self.free(self.cached.pop(name))
                return True
        return False

    def cache_more(self):
        """Prompts come and go: every room that a request gets is another prompt's."""
        blocks = self.alloc(self.town.dice.randint(1, 4))
        if blocks is not None:
            self.cached[f"prompt {next(self.town.others)}"] = blocks

    def read(self, blocks, n):
        return [self.memory[blocks[at // BLOCK]][at % BLOCK] for at in range(n)]

    def write(self, blocks, at, token):
        self.memory[blocks[at // BLOCK]][at % BLOCK] = token * 1000 + at

    # ---- the engine

    def serve(self, request, prompt):
        blocks = self.alloc(-(-len(prompt) // BLOCK))
        self.hosted[request] = one = Hosted(len(prompt), list(prompt), 0, blocks, set(blocks), policy.FIRST)
        for at in range(len(prompt) - 1):
            self.write(blocks, at, prompt[at])
        one.whole = len(prompt) - 1

    def step(self, request):
        one = self.hosted[request]
        if not one.decodes or len(one.tokens) >= self.town.length:
            return
        if one.whole == len(one.blocks) * BLOCK:
            more = self.alloc(1)
            if more is None:
                return
            one.blocks += more
            one.own |= set(more)
        self.town.note_decoding(request, one.term, self)
        self.write(one.blocks, one.whole, one.tokens[one.whole])
        one.whole += 1
        token = next_token(self.read(one.blocks, one.whole))
        self.town.put_out(request, one.term, len(one.tokens) - one.prompt, token)
        one.tokens.append(token)

    def progress(self, request):
        one = self.hosted[request]
        tokens, blocks = np.array(one.tokens, np.int32), np.array(one.blocks, np.uint64)
        return policy.Progress(tokens, one.whole, blocks)

    # ---- the source

    def migrate(self, request, to, way):
        one = self.hosted[request]
        source = policy.Source(
            self.departures.next_id(to.number), request, "", way, one.term, len(one.tokens) + 3 * BLOCK,
            self.progress(request), BLOCK, policy.StopRules(left_tokens=1, rounds_max=self.town.dice.randint(1, 5)),
        )  # fmt: skip
        self.departures.begin(source)
        self.sources.append(source)

    def leave(self, source):
        dice, one = self.town.dice, self.hosted[source.request]
        if self.town.is_proved_gone(source.id.destination):
            source.gone("gone", ended=self.town.has_ended(source.id.destination))
        if dice.random() < self.town.faults * 0.1:
            source.cancel("cancelled")
        if dice.random() < self.town.faults * 0.1:
            source.withdraw()
        if source.round_over() and source.advance(self.progress(source.request)):
            one.decodes = False
            source.hand_over(self.progress(source.request), b"state of " + source.request.encode())
        if source.ended:
            self.sources.remove(source)
            self.departures.end(source)
            if source.state == "released":
                del self.hosted[source.request]
                self.free(one.own)
            else:
                one.term, one.decodes = source.term, True
        self.town.send(source.id.destination, source.says())

    def holds(self, request):
        """Whether it has a request that it has not given away, or that was handed over to it."""
        given = any(source.request == request and source.state == "released" for source in self.sources)
        coming = any(
            found.request == request and found.state == "moving" and found.handed
            # If it was, its term is too low for readers.
            and found.id not in self.town.incarnations[found.id.source].departures._taken_back
            for found in self.arrivals
        )  # fmt: skip
        return coming or (request in self.hosted and not given)

    def is_moving(self, request):
        return self.arrivals.holds_back(request) or any(source.request == request for source in self.sources)

    # ---- the destination

    def arrive(self, found):
        blocks, own = self.arriving.get(found.id, ([], set()))
        if self.town.is_proved_gone(found.id.source):
            found.gone("gone", ended=self.town.has_ended(found.id.source))
        work = found.work()
        if work is not None:
            self.bring(found, work, blocks, own)
        if found.ready:
            assert found.engine_state == b"state of " + found.request.encode()
            whole = found._handed.whole
            used = -(-whole // BLOCK)
            tokens = found.tokens.tolist()
            spare = set(blocks[used:])
            self.free(spare)
            prompt = len(self.town.prompts[found.request])
            self.hosted[found.request] = Hosted(
                prompt, tokens, whole, blocks[:used], own - spare, found.term
            )  # fmt: skip
            del self.arriving[found.id]
            found.decode()
        self.town.send(found.id.source, found.says(self.arrivals.next_number()))
        if found.ended:
            self.finish(found)
        elif found.state == "decoding" and self.town.dice.random() < self.town.faults * 0.05:
            self.arrivals.end(found)  # its thread has failed, or was torn off

    def bring(self, found, work, blocks, own):
        dice = self.town.dice
        end = work.end if dice.random() < 0.5 else min(work.end, work.begin + BLOCK)
        missing = -(-end // BLOCK) - len(blocks)
        if missing > 0:
            more = self.alloc(missing)
            if more is None:
                if not found.alone:
                    found.fail("full", full=True)
                return
            blocks += more
            own |= set(more)
        if found.way == "tokens":
            for at in range(work.begin, end):
                self.write(blocks, at, int(found.tokens[at]))
            found.brought(end, 0)
            return
        source = self.town.incarnations[found.id.source]
        if not source.is_up:
            return
        if dice.random() < self.town.faults * 0.02:  # the link is lost
            if not found.compute_rest():
                found.fail("lost")
            return
        at = work.begin // BLOCK
        for block in range(at, -(-end // BLOCK)):
            there = int(found.blocks[block])
            if there not in source.memory:
                found.fail("stale")
                return
            self.memory[blocks[block]][:] = source.memory[there]
        found.brought(end, -(-end // BLOCK) - at)

    def finish(self, found):
        self.arrivals.end(found)
        if found.id in self.arriving:
            self.free(self.arriving.pop(found.id)[1])
        if found.state == "revoked":
            one = self.hosted.get(found.request)
            if one is not None and one.term == found.term:
                self.free(self.hosted.pop(found.request).own)

    def take_offer(self, offer):
        cached = self.cached.get(offer.request, [])[: offer.whole // BLOCK]
        self.arriving[offer.id] = (cached, set())  # pinned
        own = self.alloc(-(-offer.room // BLOCK) - len(cached))
        if own is None:
            del self.arriving[offer.id]
            self.town.send(offer.id.source, self.arrivals.refuse(offer, "full", full=True))
            return
        self.arriving[offer.id] = ([*cached, *own], set(own))
        way = self.town.dice.choice(["kv", "tokens"]) if offer.way == "auto" else offer.way
        self.arrivals.begin(offer, lambda offer: policy.Destination(offer, way, len(cached), BLOCK))

    # ---- messages

    def hear(self, message):
        said = policy.decode(message)
        if isinstance(said, policy.DestinationSays):
            source = self.departures.find(said.id)
            if source is not None:
                if self.town.is_proved_gone(said.id.destination):
                    ended = self.town.has_ended(said.id.destination)
                    source.gone("gone", ended=ended)  # what it said has died with it: the request is here
                source.hear(said)
            elif (answer := self.departures.answer(said)) is not None:
                self.town.send(said.id.destination, answer)
            return
        found = self.arrivals.find(said.id)
        if found is not None:
            was_kept = found in self.arrivals.kept
            found.hear(said, gone=self.town.is_proved_gone(said.id.source))
            if was_kept and found.settled:
                self.finish(found)
            if was_kept and found.state != "released":
                self.town.send(said.id.source, found.says(self.arrivals.next_number()))
        elif self.arrivals.is_new(said):
            self.take_offer(said)
        elif (answer := self.arrivals.answer(said)) is not None:
            self.town.send(said.id.source, answer)

    def turn(self):
        if self.evicts:
            self.cache_more()
        for request in list(self.hosted):
            if self.town.dice.random() < 0.4:
                self.step(request)
        for source in list(self.sources):
            if self.town.dice.random() < 0.6:
                self.leave(source)
        for found in list(self.arrivals):
            if self.town.dice.random() < 0.6:
                self.arrive(found)
        for found in self.arrivals.kept:
            if self.town.has_ended(found.id.source):
                found.gone("ended", ended=True)
                self.arrivals.end(found)
            elif not self.town.is_proved_gone(found.id.source):
                self.town.send(found.id.source, found.says(self.arrivals.next_number()))

    def check(self):
        """Each block has one owner, and none is lost."""
        owned = [addr for one in self.hosted.values() for addr in one.own]
        owned += [addr for _, own in self.arriving.values() for addr in own]
        owned += [addr for blocks in self.cached.values() for addr in blocks]
        assert sorted(owned) == sorted(self.memory), (self.name, sorted(owned), sorted(self.memory))


# ---- a source and a destination, without instances

ID = policy.MigrationId(1, 2, 1)


def progress(tokens, whole=None):
    blocks = np.arange(1, -(-tokens // BLOCK) + 1, dtype=np.uint64)
    return policy.Progress(np.arange(tokens, dtype=np.int32), tokens - 1 if whole is None else whole, blocks)


def pair(tokens=10, way="kv", cached=0, **rules):
    source = policy.Source(
        ID, "r", "", way, policy.FIRST, tokens + 8, progress(tokens), BLOCK, policy.StopRules(**rules)
    )
    return source, policy.Destination(source.says(), "kv" if way == "auto" else way, cached, BLOCK)


def exchange(source, destination, number):
    source.hear(destination.says(number))
    destination.hear(source.says())


def fetch(destination):
    work = destination.work()
    destination.brought(work.end, -(-(work.end - work.begin) // BLOCK))
