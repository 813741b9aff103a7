"""One request arrives: its destination's thread, from room for all of its blocks until its source has let it go."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from kvpool._core import Transfer
from kvpool.control.migration.background import Chores
from kvpool.control.migration.engine import Arrived, MigratingEngine
from kvpool.control.migration.evidence import Evidence, Proof
from kvpool.control.migration.room import Budget, Room
from kvpool.control.migration.talking import Dialogue, Timing
from kvpool.errors import Busy, OutOfBlocks
from kvpool.policy import migration as policy
from kvpool.waiting.handles import carry_out

__all__ = ["Arriving"]

_log = logging.getLogger("kvpool.migration")

_NO_ROOM: Final = (OutOfBlocks, Busy)  # of the pool or of the engine: there may be room later


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
        chores: Get blocks that cannot be freed yet.
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
        chores: Chores,
        ended: Callable[[Arriving], None],
    ) -> None:
        self.destination = destination
        self.dialogue = dialogue
        self._room = room
        self._engine = engine
        self._evidence = evidence
        self._timing = timing
        self._budget = budget
        self._chores = chores
        self._ended = ended
        self._adopted = False
        self._unwanted = False
        self._torn = False
        self._waits_for_room = False
        self._fetch_at = 0.0  # not earlier, by the budget
        self._planned = 0  # blocks of the piece that waits for that; 0: none does
        self._met = ""  # the error that was logged last

    def give_up(self) -> None:
        """Ends it if it is not decoded here yet."""
        self._unwanted = True
        self.dialogue.wake()

    def tear_off(self) -> None:
        """Ends the thread: what came is ours, and its source is not told any more."""
        self._torn = True
        self.dialogue.wake()

    def run(self) -> None:
        """Until it has ended here, or its source says nothing about what is decoded here."""
        found = self.destination
        news = True
        try:
            while not self._is_over():
                try:
                    news = self._turn(news=news)
                except Exception as error:
                    if not found.handed:  # else its source may be gone, unnoticed for this very error
                        found.fail(f"{type(error).__name__}: {error}")
                    if self._room.pool.closed:
                        return
                    self._log_once(error)
                    self._hear_without_proof()
                    if not found.ended:
                        time.sleep(self._timing.repeat_s)
        finally:
            self._finish()

    def _log_once(self, error: Exception) -> None:
        """An error that lasts is met again and again."""
        if (met := repr(error)) != self._met:
            self._met = met
            _log.exception("request %r has met an error", self.destination.request, extra={"peer": self.dialogue.peer})

    def _is_over(self) -> bool:
        found = self.destination
        return self._torn or found.ended or (found.state == "decoding" and self._is_quiet())

    def _is_quiet(self) -> bool:
        return time.monotonic() > self.dialogue.heard_at + self._timing.silence_s

    def _turn(self, *, news: bool) -> bool:
        """Says what is due, waits for something to do, and does it. Whether there is news for the source."""
        found = self.destination
        self.dialogue.speak(news=news)
        work = found.work()
        if not found.ready and (work is None or not self._may_fetch(work)):
            self.dialogue.pause(None if work is None else max(0.0, self._fetch_at - time.monotonic()))
        before = found.state
        self._hear()
        return self._advance() or found.state != before

    def _hear(self) -> None:
        found = self.destination
        if (lost := self._evidence.lost()) is not None:
            found.fail(str(lost))  # the source cannot hear it: this instance has to end
            self.tear_off()
        self._read(gone=self._proof() is not None)
        self._look_for_source()
        if found.state == "moving" and not found.handed and self._is_quiet():
            found.fail(f"{self.dialogue.peer} was silent for {self._timing.silence_s} s")

    def _hear_without_proof(self) -> None:
        """Reads also while an error lasts, which may be that of the look for a proof.

        A source that asks for the request gets it if it is connected: one that has died since may have no proof yet.
        """
        self._read(gone=not self._is_connected())

    def _read(self, *, gone: bool) -> None:
        """Reads what was said. `gone` is found out before: the source may ask for the request, and die."""
        found = self.destination
        for said in self.dialogue.read():
            found.hear(said, gone=gone)
        if self._unwanted:  # also what waits for room, and nobody else has
            found.fail("the destination takes in no more requests")

    def _is_connected(self) -> bool:
        """Whether the source is, in the incarnation that began this."""
        try:
            return self._evidence.incarnation(self.dialogue.peer) == self.destination.id.source
        except Exception:
            return False

    def _look_for_source(self) -> None:
        """Notes whether there is proof that it is gone."""
        if (proof := self._proof()) is not None:
            self.destination.gone(f"{self.dialogue.peer} is gone: {proof}", ended=proof == "ended")

    def _proof(self) -> Proof | None:
        return self._evidence.of(self.dialogue.peer, self.destination.id.source)

    def _advance(self) -> bool:
        """Brings a piece here, or begins to decode. Whether there is news for the source."""
        found = self.destination
        work = found.work()
        if work is not None and self._may_fetch(work):
            try:
                self._bring(work)
            except _NO_ROOM as error:
                self._has_no_room(error)
            except Exception as error:  # of the engine, too
                level = logging.ERROR if found.alone else logging.INFO  # nobody else has it: it is lost
                _log.log(
                    level, "request %r does not arrive: %s", found.request, error, extra={"peer": self.dialogue.peer}
                )
                found.fail(f"{type(error).__name__}: {error}")
            return found.work() is None and not found.ready
        if found.ready:
            self._adopt()
        return False

    def _has_no_room(self, error: Exception) -> None:
        """Gives the request back to its source. If that is gone nobody else has it: it waits until there is room."""
        self._look_for_source()  # it may have died since
        if self.destination.alone:
            if not self._waits_for_room:
                self._waits_for_room = True
                why = f"{type(error).__name__}: {error}"
                _log.warning("request %r has no source any more, and waits for room: %s", self.destination.request, why)
            time.sleep(self._timing.repeat_s)
        else:
            self.destination.fail(f"{type(error).__name__}: {error}", full=isinstance(error, OutOfBlocks))

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
        try:
            carry_out(self._fetches(first, last, urgent=work.urgent))
        except Exception as error:
            if not found.compute_rest():
                raise
            _log.info("request %r: the rest is computed: %s", found.request, error, extra={"peer": self.dialogue.peer})
            self._room.set_aside(first, last)
            self._chores.add(self._room.free_aside)
            return
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
        except _NO_ROOM as error:
            self._has_no_room(error)
            return
        except Exception as error:
            _log.exception("the engine does not go on with request %r", found.request)
            found.fail(f"the engine does not go on with it: {type(error).__name__}: {error}")
            return
        found.decode()
        self._adopted = True

    def _finish(self) -> None:
        """Frees what is not the engine's, or tells it that the source has taken the request back."""
        found = self.destination
        found.fail("it has ended at the destination")  # a thread that is torn off, or whose pool is closed
        is_free = self._adopted
        try:
            if not self._adopted:
                is_free = self._room.give_up()
            elif found.state == "revoked":
                self._engine.drop(found.request, found.term)
        except Exception:
            _log.exception("the end of the migration of request %r has failed", found.request)
        try:
            self.dialogue.finish()
        except Exception as error:
            _log.warning("%s was not told the end of a migration: %s", self.dialogue.peer, error)
        finally:
            self._ended(self)
            if not is_free:
                self._chores.add(self._room.give_up)
