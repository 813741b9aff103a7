"""The requests that come to an engine: accepted or refused, carried out, and remembered while that is needed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from kvpool.control.migration.arriving import Arriving
from kvpool.control.migration.background import Chores, Threads
from kvpool.control.migration.engine import MigratingEngine
from kvpool.control.migration.evidence import Evidence
from kvpool.control.migration.mailbox import Mailbox
from kvpool.control.migration.room import Budget, make_room
from kvpool.control.migration.talking import Dialogue, Timing
from kvpool.control.migration.totals import Tally
from kvpool.errors import Busy, OutOfBlocks
from kvpool.policy import migration as policy
from kvpool.pool import Pool
from kvpool.types import Medium

__all__ = ["Incoming"]

_log = logging.getLogger("kvpool.migration")
_RETRY_US: Final = 100_000


class Incoming:
    """The requests that come to a pool. Thread-safe.

    Args:
        pool: Where they come to.
        engine: Is to decode them.
        mailbox: Sends.
        evidence: Of their sources' ends.
        timing: Of the protocol.
        threads: Carry them out.
        tally: Counts them.
        medium: Where they get their blocks.
        costs: Of both ways, if they were measured.
        bytes_per_s: The budget of all rounds; None: no bound.
        moving_max: So many may be on their way at once.
    """

    def __init__(
        self,
        pool: Pool,
        engine: MigratingEngine,
        mailbox: Mailbox,
        evidence: Evidence,
        timing: Timing,
        threads: Threads,
        tally: Tally,
        medium: Medium,
        costs: policy.WayCosts | None,
        bytes_per_s: float | None,
        moving_max: int,
    ) -> None:
        self._pool = pool
        self._engine = engine
        self._mailbox = mailbox
        self._evidence = evidence
        self._timing = timing
        self._threads = threads
        self._tally = tally
        self._medium = medium
        self._costs = costs
        self._budget = Budget(bytes_per_s)
        self._moving_max = moving_max
        self._chores = Chores(pool, timing.repeat_s)
        self._lock = threading.Lock()  # of what follows; held briefly
        self._arrivals = policy.Arrivals(pool._incarnation())
        self._arriving: dict[policy.MigrationId, Arriving] = {}  # each has a thread
        self._offered: set[policy.MigrationId] = set()  # that a thread looks at
        self._over: set[policy.MigrationId] = set()  # of what is kept: ended here, and the source is fenced
        self._dropping: set[policy.MigrationId] = set()  # of what is kept: a thread tells the engine to drop it
        self._closed = False

    def names(self) -> tuple[str, ...]:
        """Of the requests that come, and of those that came and whose source is not known to know it.

        Not of those that have ended here, and whose source is fenced: nobody waits for it any more.
        """
        with self._lock:
            under_way = [each.destination.request for each in self._arriving.values()]
            return (*under_way, *(each.request for each in self._arrivals.kept if each.id not in self._over))

    def check_may_leave(self, request: str) -> None:
        """Raises Busy if a request has come whose source may still ask for it."""
        with self._lock:
            if self._arrivals.holds_back(request):
                raise Busy(
                    f"request {request!r} has just come, and its source may ask for it", retry_after_us=_RETRY_US
                )

    def give_up(self) -> None:
        """Takes in no more, and ends what is not decoded here yet."""
        with self._lock:
            self._closed = True
            for each in self._arriving.values():
                each.give_up()

    def tear_off(self) -> None:
        """Ends the threads. What has come is ours; sources are told so when they ask."""
        with self._lock:
            for each in self._arriving.values():
                each.tear_off()

    # ---- messages

    def hear(self, peer: str, said: policy.SourceSays) -> None:
        """Takes what a source says. Quick."""
        with self._lock:
            answer = self._hear(peer, said)
        if answer is not None:
            self._mailbox.answer(peer, answer, self._timing.silence_s)

    def _hear(self, peer: str, said: policy.SourceSays) -> policy.DestinationSays | None:
        arriving = self._arriving.get(said.id)
        if arriving is not None:
            arriving.dialogue.post(said)
        elif said.id in self._offered:
            pass
        elif (kept := self._arrivals.find(said.id)) is not None:
            kept.hear(said)
            is_over = self._end_kept(kept)  # of one that is dropped the source hears: then it can forget it
            return None if is_over and kept.state == "released" else kept.says(self._arrivals.next_number())
        elif not self._arrivals.is_new(said):
            return self._arrivals.answer(said)
        elif self._closed or self._moving() >= self._moving_max:
            return self._arrivals.refuse(said, "too many requests are on their way here")
        else:
            self._offered.add(said.id)
            try:
                self._threads.start(lambda: self._accept(peer, said))
            except RuntimeError as error:
                self._offered.discard(said.id)
                return self._arrivals.refuse(said, str(error))
        return None

    def _moving(self) -> int:
        """How many are on their way. What is decoded here does not count, however long its source says nothing."""
        return len(self._offered) + sum(each.destination.state == "moving" for each in self._arriving.values())

    def _next_number(self) -> int:
        with self._lock:
            return self._arrivals.next_number()

    # ---- a request that comes

    def _accept(self, peer: str, offer: policy.SourceSays) -> None:
        """The thread of a request that comes: makes room for all of it, or refuses it before anything has moved."""
        made: Arriving | policy.DestinationSays | None = None
        try:
            made = self._arriving_of(peer, offer)
        finally:
            with self._lock:
                self._offered.discard(offer.id)
                if isinstance(made, Arriving):
                    self._arriving[offer.id] = made
                    if self._closed:
                        made.give_up()
        if isinstance(made, Arriving):
            made.run()
        elif made is not None:
            self._tally.arrived(offer.way, "failed")
            self._mailbox.answer(peer, made, self._timing.silence_s)

    def _arriving_of(self, peer: str, offer: policy.SourceSays) -> Arriving | policy.DestinationSays:
        room = None
        try:
            if not self._engine.admit(offer.request, len(offer.tokens)):
                return self._refuse(offer, "the engine does not admit it")
            room = make_room(self._pool, self._medium, offer)
            cached = len(room.prefix.addrs)
            way = self._way(peer, offer, cached)
            size = self._pool.kv_layout.block_tokens
            with self._lock:
                destination = self._arrivals.begin(offer, lambda offer: policy.Destination(offer, way, cached, size))
        except Exception as error:  # of the engine, too
            if room is not None:
                room.give_up()  # nothing was fetched into it
            if isinstance(error, OutOfBlocks):
                return self._refuse(offer, str(error), full=True)
            _log.exception("request %r was refused", offer.request, extra={"peer": peer})
            return self._refuse(offer, f"{type(error).__name__}: {error}")
        dialogue: Dialogue[policy.SourceSays] = Dialogue(
            self._mailbox, peer, self._timing, lambda: destination.says(self._next_number())
        )
        return Arriving(
            destination,
            room,
            self._engine,
            dialogue,
            self._evidence,
            self._timing,
            self._budget,
            self._chores,
            self._ended,
        )

    def _refuse(self, offer: policy.SourceSays, why: str, *, full: bool = False) -> policy.DestinationSays:
        with self._lock:
            return self._arrivals.refuse(offer, why, full=full)

    def _way(self, peer: str, offer: policy.SourceSays, cached: int) -> policy.Way:
        if offer.way != "auto":
            return offer.way
        if self._costs is None:
            return "kv"
        missing = max(0, len(offer.tokens) - cached * self._pool.kv_layout.block_tokens)
        return self._costs.choose(peer, missing, self._engine.batch()).way

    # ---- ends

    def _ended(self, arriving: Arriving) -> None:
        """Its thread ends. If its source was not heard to let it go, it is kept, and the source is asked again."""
        found = arriving.destination
        with self._lock:
            self._arriving.pop(found.id, None)
            self._forget(found)
            is_kept = self._arrivals.find(found.id) is not None
        if is_kept:
            self._chores.add(self._asking(found, arriving.dialogue))

    def _asking(self, found: policy.Destination, dialogue: Dialogue[policy.SourceSays]) -> Callable[[], bool]:
        """Asks the source of a request that is kept, more and more rarely while it is fenced. Whether that is over."""
        repeat_s, longest_s = self._timing.repeat_s, max(self._timing.repeat_s, self._timing.silence_s)
        due_at, wait_s = 0.0, repeat_s

        def ask() -> bool:
            nonlocal due_at, wait_s
            if time.monotonic() < due_at:
                with self._lock:
                    return self._closed or self._arrivals.find(found.id) is None
            is_over = self._ask(found, dialogue)
            wait_s = min(2 * wait_s, longest_s) if found.by_proof else repeat_s
            due_at = time.monotonic() + wait_s if found.by_proof else 0.0
            return is_over

        return ask

    def _ask(self, found: policy.Destination, dialogue: Dialogue[policy.SourceSays]) -> bool:
        """Asks the source of a request that is kept once more. Whether that is over: also if no peer can hear it."""
        if self._evidence.lost() is not None:
            return True
        proof = self._evidence.of(dialogue.peer, found.id.source)
        is_over = proof == "fenced" and self._engine.progress(found.request) is None
        with self._lock:
            if self._closed or self._arrivals.find(found.id) is None:
                return True
            if is_over:
                self._over.add(found.id)
            if proof is not None:
                found.gone(f"{dialogue.peer} is gone: {proof}", ended=proof == "ended")
            if self._end_kept(found):
                return True
        dialogue.speak(news=True)
        return False

    def _end_kept(self, kept: policy.Destination) -> bool:
        """Forgets one that is kept, if it is known who has it. The caller holds the lock."""
        if not kept.settled:
            return False
        if kept.state != "revoked":
            self._forget(kept)
        elif kept.id not in self._dropping:  # else its source has said so again before that is done
            self._threads.start(lambda: self._drop(kept))  # waits for the lock before it ends
            self._dropping.add(kept.id)
        return True

    def _drop(self, kept: policy.Destination) -> None:
        try:
            self._engine.drop(kept.request, kept.term)
        except Exception:
            _log.exception("the engine failed to drop request %r", kept.request)
        with self._lock:
            self._dropping.discard(kept.id)
            self._forget(kept)

    def _forget(self, found: policy.Destination) -> None:
        """Counts it once, when it is forgotten. The caller holds the lock."""
        if self._arrivals.find(found.id) is found:
            self._arrivals.end(found)
            if self._arrivals.find(found.id) is None:
                self._over.discard(found.id)
                self._tally.arrived(found.way, "ok" if found.state == "released" else found.state)
