"""One request arrives: its destination's thread, from room for all of its blocks until its source has let it go."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from kvpool._core import Match, Transfer
from kvpool.control.migration.engine import Arrived, MigratingEngine
from kvpool.control.migration.evidence import Evidence
from kvpool.control.migration.talking import Dialogue, Timing
from kvpool.errors import ClosedError, Error, OutOfBlocks, StaleAddress, StateError
from kvpool.policy import migration as policy
from kvpool.policy.migration.messages import Addresses
from kvpool.pool import Pool
from kvpool.types import HBM, Medium
from kvpool.waiting.handles import carry_out

__all__ = ["Arriving", "Budget", "Room", "make_room"]

_log = logging.getLogger("kvpool.migration")

_PIECE_BYTES: Final = 16 << 20  # a foreground transfer, or the stop, waits for no more than one piece
_PIECE_S: Final = 0.05


@dataclass
class Room:
    """The blocks of a request that arrives: a pinned prefix, and behind it blocks that were allocated for it.

    Attributes:
        pool: Where they are.
        medium: Of them.
        prefix: The pin.
        own: Allocated for it.
    """

    pool: Pool
    medium: Medium
    prefix: Match
    own: Addresses

    @property
    def blocks(self) -> Addresses:
        """All, in order."""
        return np.concatenate([self.prefix.addrs, self.own])

    def grow(self, blocks: int) -> None:
        """Makes room for so many blocks in all. Raises OutOfBlocks, and changes nothing then."""
        missing = blocks - len(self.prefix.addrs) - len(self.own)
        if missing > 0:
            self.own = np.concatenate([self.own, self.pool.alloc(missing, int(self.medium))])

    def give_up(self) -> bool:
        """Unpins the prefix, and frees what can be freed. Whether that is all.

        The blocks of a fetch that has failed are quarantined while the source may still write to them, and ours or free
        afterwards: call it again then.
        """
        self.prefix.close()
        self.own = _free(self.pool, self.own)
        return not len(self.own)


def _free(pool: Pool, addrs: Addresses) -> Addresses:
    """Frees blocks, and returns those that are quarantined. After a quarantine some may be free already."""
    if not len(addrs):
        return addrs
    try:
        pool.free(addrs)
    except ClosedError:
        pass
    except (StateError, StaleAddress) as error:  # of some: then none was freed
        if len(addrs) == 1:
            return addrs if isinstance(error, StateError) else addrs[:0]
        half = len(addrs) // 2
        return np.concatenate([_free(pool, addrs[:half]), _free(pool, addrs[half:])])
    return addrs[:0]


def make_room(pool: Pool, medium: Medium, offer: policy.SourceSays) -> Room:
    """Pins what is cached of a request, and allocates for the rest: all or nothing. Raises OutOfBlocks."""
    size = pool.kv_layout.block_tokens
    full = offer.whole // size * size
    prefix = pool.match(offer.tokens[:full], offer.namespace, into=HBM if medium == HBM else None)
    try:
        missing = -(-max(offer.room, len(offer.tokens)) // size) - len(prefix.addrs)
        own = pool.alloc(missing, int(medium)) if missing > 0 else np.empty(0, np.uint64)
    except BaseException:
        prefix.close()
        raise
    return Room(pool, medium, prefix, own)


class Budget:
    """What fetches of rounds may take of the links to this pool: shared by all requests that arrive. Thread-safe.

    Attributes:
        piece_bytes: So much is fetched at a time.

    Args:
        bytes_per_s: Of all rounds together; None: no bound.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._pace = policy.Pace(bytes_per_s)
        self._lock = threading.Lock()
        self.piece_bytes = _PIECE_BYTES if bytes_per_s is None else min(_PIECE_BYTES, int(_PIECE_S * bytes_per_s))

    def take(self, n_bytes: int) -> float:
        """Takes so many bytes of the budget; seconds to wait before they are moved."""
        with self._lock:
            return self._pace.wait_s(n_bytes, time.monotonic())


class Arriving:
    """One request that arrives. `run` is its thread's work.

    Args:
        destination: The protocol.
        room: Its blocks.
        engine: Is to decode it.
        dialogue: With the source.
        evidence: Of the source's end.
        timing: Of the protocol.
        budget: Of rounds.
        ended: Called at the end.
    """

    def __init__(
        self,
        destination: policy.Destination,
        room: Room,
        engine: MigratingEngine,
        dialogue: Dialogue[policy.SourceSays],
        evidence: Evidence,
        timing: Timing,
        budget: Budget,
        ended: Callable[[Arriving], None],
    ) -> None:
        self.destination = destination
        self.dialogue = dialogue
        self._room = room
        self._engine = engine
        self._evidence = evidence
        self._timing = timing
        self._budget = budget
        self._ended = ended
        self._adopted = False
        self._unwanted = False
        self._torn = False
        self._fetch_at = 0.0  # not earlier, by the budget
        self._planned = 0  # blocks of the piece that waits for that; 0: none does

    def give_up(self) -> None:
        """Ends it if it is not decoded here yet."""
        self._unwanted = True
        self.dialogue.wake()

    def tear_off(self) -> None:
        """Ends the thread: what came is ours, and its source is not told any more."""
        self._torn = True
        self.dialogue.wake()

    def run(self) -> None:
        """Until it has ended here."""
        found = self.destination
        news = True
        try:
            while not self._torn and (not found.ended or found.by_proof):
                self.dialogue.speak(news=news)
                work = found.work()
                if not found.ready and (work is None or not self._may_fetch(work)):
                    now = time.monotonic()
                    self.dialogue.pause(None if work is None else max(0.0, self._fetch_at - now))
                before = found.state
                self._hear()
                news = self._advance() or found.state != before
        except Exception as error:
            _log.exception("request %r does not arrive", found.request, extra={"peer": self.dialogue.peer})
            found.fail(f"{type(error).__name__}: {error}")
        finally:
            self._finish()

    def _hear(self) -> None:
        found, peer = self.destination, self.dialogue.peer
        for said in self.dialogue.read():
            found.hear(said)
        if (proof := self._evidence.of(peer, found.id.source)) is not None:
            found.gone(f"{peer} is gone: {proof}", ended=proof == "ended")
        elif self._unwanted:
            found.fail("the destination takes in no more requests")
        elif found.state == "moving" and time.monotonic() > self.dialogue.heard_at + self._timing.silence_s:
            found.fail(f"{peer} was silent for {self._timing.silence_s} s")

    def _advance(self) -> bool:
        """Brings a piece here, or begins to decode. Whether there is news for the source."""
        found = self.destination
        work = found.work()
        if work is not None and self._may_fetch(work):
            try:
                self._bring(work)
            except OutOfBlocks as error:
                found.fail(str(error), full=True)
            except Exception as error:  # of the engine, too
                _log.info("request %r does not arrive: %s", found.request, error, extra={"peer": self.dialogue.peer})
                found.fail(f"{type(error).__name__}: {error}")
            return found.work() is None and not found.ready
        if found.ready:
            self._adopt()
        return False

    def _may_fetch(self, work: policy.Work) -> bool:
        """Whether the budget lets the next piece come now."""
        found = self.destination
        if work.urgent or found.way == "tokens":
            return True
        if not self._planned:
            block_bytes = self._room.pool.kv_layout.block_bytes
            size = self._room.pool.kv_layout.block_tokens
            self._planned = min(-(-(work.end - work.begin) // size), max(1, self._budget.piece_bytes // block_bytes))
            self._fetch_at = time.monotonic() + self._budget.take(self._planned * block_bytes)
        return time.monotonic() >= self._fetch_at

    def _bring(self, work: policy.Work) -> None:
        """Fetches or computes the next tokens into our blocks."""
        found, size = self.destination, self._room.pool.kv_layout.block_tokens
        if found.way == "tokens":
            self._room.grow(-(-work.end // size))
            self._engine.prefill(found.request, found.tokens[: work.end], work.begin, self._room.blocks)
            found.brought(work.end, 0)
            return
        first, last = work.begin // size, -(-work.end // size)
        if not work.urgent:
            last = min(last, first + self._planned)
            self._planned = 0
        self._room.grow(last)
        carry_out(self._fetches(first, last, urgent=work.urgent))
        found.brought(min(work.end, last * size), last - first)

    def _fetches(self, first: int, last: int, *, urgent: bool) -> list[Callable[[], Transfer]]:
        """The transfers that bring these blocks, all of which must be done. One: a scheduler's pool knows its ranks."""
        found, pool = self.destination, self._room.pool
        return [
            partial(
                pool.fetch,
                self.dialogue.peer,
                found.blocks[first:last],
                to=self._room.blocks[first:last],
                priority="decode" if urgent else "background",
                timeout=self._timing.silence_s,
            )
        ]

    def _adopt(self) -> None:
        found, room = self.destination, self._room
        size = room.pool.kv_layout.block_tokens
        whole = found.whole
        used = -(-whole // size)
        blocks = room.blocks
        cached = len(room.prefix.addrs)
        arrived = Arrived(
            found.request,
            found.term,
            "tokens" if found.way == "tokens" else "kv",
            found.tokens,
            whole,
            blocks[:used],
            blocks[cached:used],
            blocks[max(used, cached) :],
            room.prefix,
            found.namespace,
            found.engine_state,
        )
        try:
            self._engine.adopt(arrived)
        except Exception as error:
            _log.exception("the engine does not go on with request %r", found.request)
            found.fail(f"the engine does not go on with it: {type(error).__name__}: {error}")
            return
        found.decode()
        self._adopted = True

    def _finish(self) -> None:
        """Frees what is not the engine's, or tells it that the source has taken the request back."""
        found = self.destination
        is_free = True
        try:
            if not self._adopted:
                is_free = self._room.give_up()
            elif found.state == "revoked":
                self._engine.drop(found.request, found.term)
        except Exception:
            _log.exception("the end of the migration of request %r has failed", found.request)
        try:
            self.dialogue.finish()
        except Error as error:
            _log.warning("%s was not told the end of a migration: %s", self.dialogue.peer, error)
        self._ended(self)
        while not is_free and not self._torn:
            time.sleep(self._timing.repeat_s)
            is_free = self._room.give_up()
