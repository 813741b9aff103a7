"""The global scheduler: where a request goes (MemServe §6, Fig 6).

For each request it matches the prompt against the trees, asks the policy, lists the instances that hold more of the
prompt, and decides by eq. 2 whether to fetch from one. The caller then reports the request's progress (first_token,
finished, failed), and the trees learn from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

import numpy as np

from kvpool.errors import ArgumentError, StateError
from kvpool.index import MovedEvent, RemovedEvent, StoredEvent
from kvpool.policy.cost import CostModel, KVTransfer
from kvpool.policy.routing.balance import Balance
from kvpool.policy.routing.candidates import Candidates
from kvpool.policy.routing.choosing import choose
from kvpool.policy.routing.claims import Claims
from kvpool.policy.routing.fetching import TransferModel, best_fetch
from kvpool.policy.routing.keeping import KeepHits
from kvpool.policy.routing.load import LoadTable
from kvpool.policy.routing.policies import Asked, LongestPrefix, Policy, Ranking
from kvpool.policy.routing.predictions import Models, Times
from kvpool.policy.routing.tokens import Tokens, as_array, checked
from kvpool.policy.routing.tree import BLOCKS_MAX, PromptTree
from kvpool.policy.routing.types import Decision, Holder, Kind, Request
from kvpool.types import TokenVector

__all__ = ["GlobalScheduler"]


class _Instance(NamedTuple):
    kind: Kind
    by_events: bool
    incarnation: int  # no other one has it, not one of the same id either that was here before


@dataclass(slots=True)
class _InFlight:
    """A request between route and its end."""

    tokens: Tokens
    namespace: str
    instance: int
    incarnation: int  # of the instance
    work: int | None  # in the load table of prefill; None when it is done there
    decode: int | None
    decode_incarnation: int | None
    decode_work: int | None


class GlobalScheduler:
    """Routes requests. Not thread-safe: one thread or event loop owns it. Any thread may feed `tree(kind)` events.

    Args:
        model: Predicts prefills; `add_instance` may name another one for an instance.
        clock: Seconds from any start: time.monotonic, or the simulator's.
        policy: Chooses the instance that computes the prompt; `KeepHits()` by default.
        decode_policy: Chooses the instance that decodes after a prefill-only instance; the longest prefix by default.
            Not the same object as `policy` if that remembers what was sent where, as `SessionId` does; and no
            `KeepHits`, which weighs times of prompts.
        transfer: The cost of moving KV between instances; None if they cannot, and then nothing is fetched.
        ttl_s: How long the trees keep a prefix that they did not learn from events; None: forever.
        balance: Load cap and newcomers.
        learn_at: When the trees learn that an instance holds a prompt: at its "dispatch", so that the same prompt a
            moment later follows it into the same queue, or at its "response", as in §6. At dispatch, an instance that
            reports by events is believed to hold a prompt from then on, too, until an event says otherwise. Nothing is
            fetched of a prompt before its `first_token`.
        holders_max: How many instances that hold more a decision lists.
        blocks_max: Blocks in the prompt tree of each kind of instance; the least recently used are forgotten. None for
            no bound.
    """

    def __init__(
        self,
        model: CostModel,
        clock: Callable[[], float],
        *,
        policy: Policy | None = None,
        decode_policy: Policy | None = None,
        transfer: TransferModel | None = None,
        ttl_s: float | None = 300.0,
        balance: Balance | None = None,
        learn_at: Literal["response", "dispatch"] = "dispatch",
        holders_max: int = 8,
        blocks_max: int | None = BLOCKS_MAX,
    ) -> None:
        if learn_at not in ("response", "dispatch"):
            raise ArgumentError(f"learn_at is {learn_at!r}; it must be 'dispatch' or 'response'")
        if holders_max < 0:
            raise ArgumentError(f"holders_max is {holders_max}; it must be at least 0")
        if policy is not None and policy is decode_policy and _remembers(policy):
            raise ArgumentError(f"policy and decode_policy are one {type(policy).__name__}, which is for one of them")
        if isinstance(decode_policy, KeepHits):
            raise ArgumentError("KeepHits is no decode_policy: it weighs times of prompts, and decoding computes none")
        self._clock = clock
        self._policy = policy or KeepHits()
        self._decode_policy = decode_policy or LongestPrefix()
        self._transfer = transfer
        self._transfer_s = transfer.time_s if isinstance(transfer, KVTransfer) and holders_max else None
        self._learn_at_dispatch = learn_at == "dispatch"
        self._holders_max = holders_max
        self._models = Models(model)
        self._block_tokens = model.block_tokens
        self._trees = {kind: PromptTree(model.block_tokens, clock, ttl_s, blocks_max) for kind in Kind}
        self._prefill = LoadTable(balance or Balance(), drains=True)
        self._decode = LoadTable(balance or Balance(), drains=False)
        self._instances: dict[int, _Instance] = {}
        self._kinds = dict.fromkeys(Kind, 0)  # how many there are
        self._in_flight: dict[int, _InFlight] = {}
        self._claims = Claims(model.block_tokens)
        self._tickets = count(1)
        self._incarnations = count(1)

    # ---- instances

    def add_instance(
        self,
        instance: int,
        kind: Kind = Kind.COLOCATED,
        *,
        by_events: bool = False,
        capacity: float = 1.0,
        model: CostModel | None = None,
    ) -> None:
        """An instance joins; it gets less than its share at first (Balance).

        Args:
            instance: Its id, 0 to 16383.
            kind: What it does.
            by_events: Whether its KV events are applied; then responses teach nothing that lasts.
            capacity: Relative to the others, for their shares of the load; 1e-100 to 1e100.
            model: Predicts its prefills, if they differ from the others'.

        Raises:
            ArgumentError: It is there already, or a value is out of range.
            ArgumentTypeError: The capacity is no number.
        """
        if instance in self._instances:
            raise ArgumentError(f"instance {instance} is there already")
        own = self._models.checked(model)
        self._table(kind).add(instance, self._clock(), capacity, self._models.number(own))
        self._models.take(own)
        self._instances[instance] = _Instance(kind, by_events, next(self._incarnations))
        self._kinds[kind] += 1

    def remove_instance(self, instance: int) -> None:
        """Removes an instance and what it held. Its requests end by `failed`, as the router notices.

        How they end says nothing of an instance that joins under the same id.
        """
        kind = self._known(instance).kind
        table = self._table(kind)
        number = table.model_of(table.slot(instance))
        table.remove(instance)
        self._trees[kind].forget(instance)
        del self._instances[instance]
        self._kinds[kind] -= 1
        moved = self._models.give_back(number)
        if moved is not None:
            for each in (self._prefill, self._decode):
                each.renumber_model(moved, number)

    def set_by_events(self, instance: int, by_events: bool) -> None:
        """Whether the instance's KV events are applied from now on. Raises ArgumentError if it is not there."""
        self._instances[instance] = self._known(instance)._replace(by_events=by_events)

    def drain(self, instance: int) -> None:
        """The instance gets no new requests, but others may fetch from it. `resume` ends it."""
        self._table(self._known(instance).kind).set_open(instance, False, self._clock())

    def resume(self, instance: int) -> None:
        """The instance gets new requests again."""
        self._table(self._known(instance).kind).set_open(instance, True, self._clock())

    # ---- trees

    def tree(self, kind: Kind) -> PromptTree:
        """The prompt tree of a kind of instance."""
        return self._trees[kind]

    def apply(self, instance: int, event: StoredEvent | RemovedEvent | MovedEvent) -> None:
        """Applies an event of the instance's pool."""
        self._trees[self._known(instance).kind].apply(instance, event)

    def lost_events(self, instance: int) -> None:
        """Forgets what the instance holds, because its events have a gap."""
        self._trees[self._known(instance).kind].forget(instance)

    def expire(self, nodes: int | None = None) -> int:
        """Gives back memory of what is older than ttl_s; no decision considers it any more. Returns the blocks.

        Args:
            nodes: As in PromptTree.expire, for each tree.
        """
        return sum(tree.expire(nodes) for tree in self._trees.values())

    @property
    def blocks_evicted(self) -> int:
        """Blocks that the trees have forgotten because they had too many."""
        return sum(tree.evicted for tree in self._trees.values())

    # ---- requests

    def route(self, request: Request, *, whole: bool = False, again: bool = False) -> Decision:
        """Decides where a request goes, and counts it as that instance's work from now on.

        Args:
            request: The prompt.
            whole: One instance does all of it: one that prefills for others then decodes, too.
            again: It was routed before, and came to nothing there: a policy that counts requests does not count it.

        Raises:
            ArgumentError: The prompt is empty, or a token does not fit in int32.
            ArgumentTypeError: The tokens are no ints.
            StateError: No instance takes prompts, or none decodes for those that only prefill.
        """
        tokens = as_array(request.tokens)
        if tokens.size == 0:
            raise ArgumentError("a prompt of no tokens")
        now = self._clock()
        table = self._prefill
        if table.closed == len(table):
            raise StateError(f"none of {len(table)} instances takes prompts")
        decoders_open = len(self._decode) > self._decode.closed
        if not (whole or decoders_open or self._kinds[Kind.COLOCATED]):  # before the policy learns of the request
            raise StateError(f"none of {len(self._decode)} instances decodes what others prefill")
        found = self._find(table, tokens, request.namespace, Kind.COLOCATED, Kind.PREFILL)
        # The time of a prompt depends on the instance's model and on how much it holds: few of either.
        times = [Times(model, len(tokens), found.lengths) for model in self._models]
        held, fleets = found.lengths[0], times[0]
        takers = len(table) - table.closed
        asked = Asked(tokens, request.namespace, self._block_tokens, held, fleets.of, takers, self._transfer_s, again)
        slot = choose(self._policy, table, found, times, now, request.session, asked)
        instance, cached = table.id_of(slot), found.lengths[found.at(slot)]
        own = times[table.model_of(slot)]
        exec_s, model = own.of(cached), own.model

        room = self._holders_max
        holders = found.holders(table, now, cached, room)
        decode, decode_cached = None, 0
        apart = self._instances[instance].kind is Kind.PREFILL and not whole
        if self._kinds[Kind.DECODE]:
            decoders = self._find(self._decode, tokens, request.namespace, Kind.DECODE)
            if apart:
                decode, decode_cached = self._choose_decode(decoders, len(tokens), now, request.session)
            if len(decoders.lengths) > 1:
                holders += decoders.holders(self._decode, now, cached, room)
                holders = sorted(holders, key=lambda holder: -holder.stop)[:room]
        elif apart:
            raise StateError(f"none of {len(self._decode)} instances decodes what others prefill")
        fetch = None
        if holders and self._transfer is not None:

            def computed(holder: Holder) -> int:
                incarnation = self._instances[holder.instance].incarnation
                return self._claims.computed_tokens(incarnation, tokens, request.namespace, holder.stop)

            fetch = best_fetch(instance, holders, computed, own.of, self._transfer)
        queue_s = table.backlog_of(slot, now)
        spent_s = exec_s - (fetch.saved_s - fetch.transfer_s if fetch else 0.0)
        occupied_s = spent_s if model.parallel.pp == 1 else model.stage_s(len(tokens), cached)

        # From here on the request is under way.
        decode_work = None if decode is None else self._decode.assign(self._decode.slot(decode), len(tokens), now)
        work = table.assign(slot, occupied_s, now)
        if isinstance(self._policy, Ranking):
            self._policy.placed(asked)
        ticket, known = next(self._tickets), self._instances[instance]
        if self._learn_at_dispatch:
            tree = self._trees[known.kind]
            self._claims.add(tree, tokens, request.namespace, instance, known.incarnation, ticket)
        self._in_flight[ticket] = _InFlight(
            tokens,
            request.namespace,
            instance,
            known.incarnation,
            work,
            decode,
            None if decode is None else self._instances[decode].incarnation,
            decode_work,
        )
        return Decision(ticket, instance, cached, tuple(holders), fetch, queue_s, spent_s, decode, decode_cached)

    def first_token(self, ticket: int) -> None:
        """Reports that the prompt is computed, which shortens the instance's queue. A second call does nothing."""
        flight = self._flight(ticket)
        if flight.work is not None:
            self._prefill.finish(flight.instance, flight.work, self._clock())
            self._claims.computed(flight.incarnation, ticket)
            flight.work = None

    def finished(self, ticket: int, output: TokenVector = ()) -> None:
        """Reports the end of the response: the trees learn that its instances hold the prompt and the output.

        Args:
            ticket: The decision's.
            output: Tokens that were generated.

        Raises:
            ArgumentError: The ticket names no request that is under way, or a token does not fit in int32.
            ArgumentTypeError: The tokens are no ints.
        """
        generated = checked(as_array(output))
        self.first_token(ticket)
        flight = self._flight(ticket)
        tokens = np.concatenate([flight.tokens, generated]) if len(generated) else flight.tokens
        if flight.decode is None:
            self._learn_response(tokens, flight.namespace, flight.instance, flight.incarnation)
        else:
            self._learn_response(flight.tokens, flight.namespace, flight.instance, flight.incarnation)
            self._learn_response(tokens, flight.namespace, flight.decode, flight.decode_incarnation)
        self._end(ticket, done=True)

    def failed(self, ticket: int) -> None:
        """Reports that the request will not be served. Unless its prompt was computed, the trees forget it.

        They keep what another prompt that was sent to the same instance has in common with it. Of an instance whose
        events are applied they forget nothing: an event may have told meanwhile that it holds the prompt, and no other
        event would tell it again. What none tells is forgotten after `ttl_s`.
        """
        flight = self._flight(ticket)
        if flight.work is not None:
            self._prefill.finish(flight.instance, flight.work, self._clock(), done=False)
            known = self._still_there(flight.instance, flight.incarnation)
            tree = None if known is None or known.by_events else self._trees[known.kind]
            self._claims.withdraw(tree, flight.instance, flight.incarnation, ticket)
        self._end(ticket, done=False)

    @property
    def in_flight(self) -> int:
        """Requests between route and their end."""
        return len(self._in_flight)

    def backlog_s(self, instance: int) -> float:
        """Predicted seconds until an instance that prefills is free."""
        return float(self._prefill.backlog(self._clock())[self._prefill.slot(instance)])

    # ---- inside

    def _table(self, kind: Kind) -> LoadTable:
        return self._decode if kind is Kind.DECODE else self._prefill

    def _known(self, instance: int) -> _Instance:
        if instance not in self._instances:
            raise ArgumentError(f"instance {instance} is not there")
        return self._instances[instance]

    def _flight(self, ticket: int) -> _InFlight:
        if ticket not in self._in_flight:
            raise ArgumentError(f"ticket {ticket} names no request that is under way")
        return self._in_flight[ticket]

    def _find(self, table: LoadTable, tokens: Tokens, namespace: str, *kinds: Kind) -> Candidates:
        return Candidates.find([self._trees[kind] for kind in kinds if self._kinds[kind]], table, tokens, namespace)

    def _choose_decode(self, found: Candidates, tokens: int, now: float, session: str | None) -> tuple[int, int]:
        table = self._decode
        if table.closed == len(table):
            raise StateError(f"none of {len(table)} instances decodes what others prefill")
        missing = [float(tokens - held) for held in found.lengths]
        slot = choose(self._decode_policy, table, found, [missing], now, session)
        return table.id_of(slot), found.lengths[found.at(slot)]

    def _still_there(self, instance: int, incarnation: int | None) -> _Instance | None:
        """None if it has left, though another one may have come under its id: that one holds nothing of it."""
        known = self._instances.get(instance)
        return None if known is None or known.incarnation != incarnation else known

    def _learn_response(self, tokens: Tokens, namespace: str, instance: int, incarnation: int | None) -> None:
        """Notes that the instance holds these, unless its events are followed."""
        known = self._still_there(instance, incarnation)
        if known is not None and not known.by_events:
            self._trees[known.kind].insert(tokens, instance, namespace)

    def _end(self, ticket: int, done: bool) -> None:
        flight = self._in_flight.pop(ticket)
        if flight.decode is not None and flight.decode_work is not None:
            self._decode.finish(flight.decode, flight.decode_work, self._clock(), done)


def _remembers(policy: Policy) -> bool:
    """Whether the policy learns from requests and may route the next ones accordingly."""
    return isinstance(policy, Ranking) and (policy.remembers or type(policy).sent is not Ranking.sent)
