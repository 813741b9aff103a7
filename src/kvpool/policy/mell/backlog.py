"""The moves that wait from one epoch to the next (§V: "deferred" moves) until they are made.

    backlog = mell.Backlog()
    plan = scheduler.batch(...)
    division = backlog.divide(plan.moves, boundaries, batches, sizes, free)     # once an epoch, also without moves
    division.made, division.parts, division.stopped, division.deferred

The scheduler assumes that its moves are made. A backlog keeps those that the instances have not made yet, in an order
in which each move has room when those before it are done. So the first always has room, as long as nothing else takes
it (`held`), and a later move may overtake it only if it leaves that room.

No move waits forever. The oldest moves get the boundaries first; a move that is too large for an epoch is carried in
parts over several; and if a move finds no room for `patience` epochs, because requests grew at their source, its
requests are stopped, which makes room, and prefilled at their destination. A move that no link and no computation can
carry waits until one can, or until its requests have ended.

While nothing can carry what waits, plans go on, and a request that has not gone to one GPU is to go on to another. So
a backlog has a bound: `chain_max` moves for each request that runs. Beyond it each request gets one move, from where it
is to where the latest plan wants it. Such moves may wait for each other's room in a circle, which patience ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvpool.errors import ArgumentError
from kvpool.policy.mell.boundaries import Boundaries
from kvpool.policy.mell.budgets import Budgets
from kvpool.policy.mell.migration import Division, Fit, Part, Way, way_of
from kvpool.policy.mell.plan import Move, RequestId

__all__ = ["Backlog"]


@dataclass(eq=False)
class _Waiting:
    """A move that is not made yet.

    Attributes:
        move: With the tokens that its requests have now.
        number: Its place in the order of the plans.
        epochs: How many epochs it has waited.
        stuck: For how many of the latest epochs it had no prospect of room.
        way: Set once a part was carried, or when it is stopped.
        parts: Tokens of each request that are at the destination; parts carry the requests in their order.
        stopped: Its requests do not run, and take no room.
    """

    move: Move
    number: int
    epochs: int = 0
    stuck: int = 0
    way: Way | None = None
    parts: dict[RequestId, int] = field(default_factory=dict)
    stopped: bool = False

    @property
    def carried(self) -> int:
        """Tokens that are at the destination."""
        return sum(self.parts.values())

    def bring(self, tokens: int, sizes: Mapping[RequestId, int]) -> None:
        """A part is at the destination."""
        for request in self.move.requests:
            before = self.parts.get(request, 0)
            more = min(tokens, sizes[request] - before)
            if more > 0:
                self.parts[request] = before + more
                tokens -= more

    @property
    def left(self) -> int:
        """Tokens that are not at the destination yet."""
        return self.move.tokens - self.carried


class Backlog:
    """Moves that wait. Deterministic: equal inputs give equal results.

    The time of an epoch is proportional to the number of waiting moves; it is longer only if moves make room for each
    other against the order of the plans.

    Not thread-safe.
    """

    def __init__(self, patience: int = 8, chain_max: int = 8) -> None:
        """Nothing waits.

        Args:
            patience: The requests of a move are stopped after this many epochs in which it had no room, and nothing
                arrived at or left its destination, or waited there only for a boundary.
            chain_max: So many moves wait for each request that runs; of more, each request gets one instead.

        Raises:
            ArgumentError: One of them is below 1.
        """
        if min(patience, chain_max) < 1:
            raise ArgumentError(f"a patience of {patience} epochs, {chain_max} moves a request: 1 or more of both")
        self._patience = patience
        self._chain_max = chain_max
        self._waiting: list[_Waiting] = []  # in the order of the plans
        self._numbers = count()

    def __len__(self) -> int:
        """How many moves wait."""
        return len(self._waiting)

    @property
    def oldest(self) -> int:
        """Epochs that the oldest move has waited; 0 if no move waits."""
        return max((each.epochs for each in self._waiting), default=0)

    @property
    def held(self) -> dict[int, int]:
        """Tokens of room on each GPU for the waiting moves: growth and new requests must leave it free."""
        found: dict[int, int] = {}
        for each in self._waiting:
            found[each.move.destination] = found.get(each.move.destination, 0) + each.move.tokens
        return found

    @property
    def carried(self) -> dict[int, int]:
        """Tokens on each GPU that parts have brought, of requests that still run elsewhere; `held` includes them."""
        found: dict[int, int] = {}
        for each in self._waiting:
            if each.carried:
                found[each.move.destination] = found.get(each.move.destination, 0) + each.carried
        return found

    @property
    def occupied(self) -> set[int]:
        """GPUs that a move has still to leave or to reach: do not terminate them yet, whatever the plan says."""
        leaving = {each.move.source for each in self._waiting if not each.stopped}
        return leaving | {each.move.destination for each in self._waiting}

    def divide(
        self,
        moves: Sequence[Move],
        boundaries: Boundaries,
        batches: Mapping[int, int],
        sizes: Mapping[RequestId, int],
        free: Mapping[int, int],
        fit: Fit = Fit.FIRST,
    ) -> Division:
        """One epoch: divides waiting and new moves, without exceeding any boundary.

        Drops moves of ended requests. If a waiting request is to move on from its destination to another GPU, it goes
        there directly, unless another move counts on its leaving first; if it is to go back, it stays. Otherwise keeps
        the order of the plans.

        Args:
            moves: Of the scheduler's plan of this epoch, which assumes that waiting moves are made.
            boundaries: The capacity for migration in this epoch.
            batches: Requests that run on each GPU; 0 for a GPU that is not named.
            sizes: Tokens that each request has now. A request that is not named has ended.
            free: Tokens free on each GPU now, without parts that were carried there, which are held.
            fit: The way of a move that fits under both boundaries.

        Raises:
            ArgumentError: A move of a request that has ended, or from another GPU than where it is or is to go; nothing
                has changed then.
        """
        self._check(moves, sizes)
        self._refresh(sizes)
        self._add_all(moves, sizes)
        if len(self._waiting) > self._chain_max * len(sizes):
            self._waiting = self._netted(sizes)
        epoch = _Epoch(self._waiting, sizes, Budgets(boundaries, batches), free, fit)
        stuck = epoch.stuck(epoch.make_all())
        self._waiting = epoch.waiting
        for each in self._waiting:
            each.epochs += 1
            each.stuck = each.stuck + 1 if each in stuck else 0
            if each.stuck >= self._patience and not each.stopped:
                epoch.stop(each)
        epoch.found.deferred = [each.move for each in self._waiting]
        return epoch.found

    def _check(self, moves: Sequence[Move], sizes: Mapping[RequestId, int]) -> None:
        where = {request: each.move.destination for each in self._waiting for request in each.move.requests}
        for move in moves:
            for request in move.requests:
                if request not in sizes or where.get(request, move.source) != move.source:
                    raise ArgumentError(f"{move}: request {request!r} has ended, or was not to be there")
                where[request] = move.destination

    def _refresh(self, sizes: Mapping[RequestId, int]) -> None:
        """Moves are of the requests that run, with the tokens that these have."""
        for each in self._waiting:
            each.move = _of(each.move, (request for request in each.move.requests if request in sizes), sizes)
            each.parts = {name: min(part, sizes[name]) for name, part in each.parts.items() if name in sizes}
        self._waiting = [each for each in self._waiting if each.move.requests]

    def _add_all(self, moves: Sequence[Move], sizes: Mapping[RequestId, int]) -> None:
        """Adds moves; each replaces a waiting one of the same requests, unless a move needs the room that it leaves."""
        waiting = {each.number: each for each in self._waiting}
        begun = {each.move.requests: each for each in self._waiting if each.parts}
        last_of = {request: each for each in self._waiting for request in each.move.requests}
        last_to = {each.move.destination: each.number for each in self._waiting}
        for move in moves:
            new = _Waiting(_of(move, move.requests, sizes), next(self._numbers))
            before = last_of.get(move.requests[0])
            same = before is not None and before.move.requests == move.requests
            if before is not None and same and last_to.get(before.move.source, -1) <= before.number:
                del waiting[before.number]
                for request in move.requests:
                    del last_of[request]
                new.move = Move(move.requests, before.move.source, move.destination, new.move.tokens)
                new.epochs, new.stopped = before.epochs, before.stopped
                new.way = Way.TOKENS if new.stopped else None
                if new.move.source == new.move.destination and not new.stopped:
                    continue  # it stays
                carrying = begun.get(move.requests)
                if (
                    carrying is not None
                    and carrying.number not in waiting  # else its parts are still of its move
                    and carrying.move.destination == move.destination
                ):  # the plan led back
                    new.way, new.parts = carrying.way, dict(carrying.parts)
                    begun[move.requests] = new
            waiting[new.number] = new
            last_of.update(dict.fromkeys(move.requests, new))
            last_to[new.move.destination] = new.number
        self._waiting = list(waiting.values())

    def _netted(self, sizes: Mapping[RequestId, int]) -> list[_Waiting]:
        """One move for requests that wait for the same moves: from the source of the first to where the last leads.

        Parts that the first has brought there stay; only the first of a chain has any.
        """
        chains: dict[RequestId, list[_Waiting]] = {}
        for each in self._waiting:
            for request in each.move.requests:
                chains.setdefault(request, []).append(each)
        together: dict[tuple[int, ...], list[RequestId]] = {}
        for request, chain in chains.items():
            together.setdefault(tuple(each.number for each in chain), []).append(request)
        found = []
        for requests in together.values():
            chain = chains[requests[0]]
            first, to = chain[0], chain[-1].move.destination
            if first.move.source == to and not first.stopped:
                continue  # it stays
            move = _of(Move(tuple(requests), first.move.source, to, 0), requests, sizes)
            new = _Waiting(move, next(self._numbers), first.epochs, first.stuck, stopped=first.stopped)
            if to == first.move.destination:
                new.parts = {name: first.parts[name] for name in requests if name in first.parts}
            if new.parts or new.stopped:
                new.way = first.way
            found.append(new)
        return found


class _Epoch:
    """One epoch of a backlog: what is left of boundaries and room, and what was found so far."""

    def __init__(
        self,
        waiting: list[_Waiting],
        sizes: Mapping[RequestId, int],
        budgets: Budgets,
        free: Mapping[int, int],
        fit: Fit,
    ) -> None:
        self.waiting = waiting
        self._sizes = sizes
        self.found = Division(link_use=budgets.link_use, compute_use=budgets.compute_use)
        self._budgets = budgets
        self._fit = fit
        self._room = dict(free)
        self._touched: set[int] = set()  # GPUs to or from which something was carried
        for each in waiting:
            self._take(each, each.carried)

    def make_all(self) -> set[_Waiting]:
        """Makes what fits, again and again while that makes room for more; returns what had no room."""
        while True:
            counted = self._counted_on()
            made: set[_Waiting] = set()
            without_room: set[_Waiting] = set()
            for each in sorted(self.waiting, key=lambda each: -each.epochs):
                before = counted[each]
                if before is None or self._room.get(each.move.destination, 0) - before < each.left:
                    without_room.add(each)
                elif self._carry(each):
                    made.add(each)
                    if not each.stopped:
                        self._room[each.move.source] = self._room.get(each.move.source, 0) + each.move.tokens
            self.waiting = [each for each in self.waiting if each not in made]
            if not made or not without_room:
                return without_room

    def stuck(self, without_room: set[_Waiting]) -> set[_Waiting]:
        """What has no room, and no prospect of it: where it is to go nothing comes or goes, nor is about to.

        A move does not count if it waits for an earlier move of the same requests: they are not at its source yet.
        """
        alive = set(self._touched)
        for each in self.waiting:
            if each not in without_room:  # it waits for a boundary, which is offered to it sooner or later
                alive.update((each.move.source, each.move.destination))
        counted = self._counted_on()
        return {each for each in without_room if counted[each] is not None and each.move.destination not in alive}

    def stop(self, each: _Waiting) -> None:
        """Its requests leave their source, where something can prefill them at the destination one day."""
        if self._budgets.compute_left(each.move.destination, whole=True) > 0:
            each.stopped, each.way, each.parts = True, Way.TOKENS, {}
            self.found.stopped.append(each.move)

    def _counted_on(self) -> dict[_Waiting, int | None]:
        """The room at its destination that those before each count on; None where one of them has to bring it first."""
        counted: dict[int, int] = {}
        seen: set[RequestId] = set()
        found: dict[_Waiting, int | None] = {}
        for each in self.waiting:
            to = each.move.destination
            found[each] = counted.get(to, 0) if seen.isdisjoint(each.move.requests) else None
            counted[to] = counted.get(to, 0) + each.left
            seen.update(each.move.requests)
        return found

    def _carry(self, each: _Waiting) -> bool:
        """Makes a move that has room, or carries a part of one that is too large for an epoch; whether it is made."""
        if each.way is not None and not each.stopped and self._budget(each, each.way, whole=True) <= 0:
            self._take(each, -each.carried)  # that way is closed: it begins again
            each.way, each.parts = None, {}
        fitting = each.way or way_of(each.move, each.left, self._budgets, self._fit)
        if fitting is not None and self._budget(each, fitting) >= each.left:
            if each.carried:
                self.found.parts.append(Part(each.move, fitting, each.left))
            self._use(each, fitting, each.left)
            self.found.make(each.move, fitting)
            return True
        way = each.way or max(Way, key=lambda way: self._budget(each, way, whole=True))
        if each.carried or self._budget(each, way, whole=True) < each.left:
            part = int(max(0, min(each.left, self._budget(each, way))))
            if part:
                self._use(each, way, part)
                each.way = way
                each.bring(part, self._sizes)
                self.found.parts.append(Part(each.move, way, part))
        return False

    def _budget(self, each: _Waiting, way: Way, whole: bool = False) -> float:
        if way is Way.KV:
            return self._budgets.kv_left(each.move.source, each.move.destination, whole)
        return self._budgets.compute_left(each.move.destination, whole)

    def _use(self, each: _Waiting, way: Way, tokens: int) -> None:
        self._take(each, tokens)
        self._touched.update((each.move.source, each.move.destination))
        if way is Way.KV:
            self._budgets.use_kv(each.move.source, each.move.destination, tokens)
        else:
            self._budgets.use_compute(each.move.destination, tokens)

    def _take(self, each: _Waiting, tokens: int) -> None:
        self._room[each.move.destination] = self._room.get(each.move.destination, 0) - tokens


def _of(move: Move, requests: Iterable[RequestId], sizes: Mapping[RequestId, int]) -> Move:
    """The same move, of these requests, with the tokens that they have."""
    left = tuple(requests)
    return Move(left, move.source, move.destination, sum(sizes[request] for request in left))
