"""One request leaves: its source's thread, from the offer until the destination decodes, or until it stays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvpool.control.migration.engine import MigratingEngine, RequestProgress, Stopped
from kvpool.control.migration.evidence import Evidence
from kvpool.control.migration.handle import Migrated, Migration
from kvpool.control.migration.talking import Dialogue, Timing
from kvpool.errors import Cancelled, DeadlineExceeded, OutOfBlocks, PeerLost, StateError
from kvpool.policy import migration as policy

__all__ = ["Leaving"]

_log = logging.getLogger("kvpool.migration")


class Leaving:
    """One request that leaves. `run` is its thread's work.

    Args:
        source: The protocol.
        handle: Is told how it goes.
        engine: Has the request.
        dialogue: With the destination.
        evidence: Of the destination's end.
        timing: Of the protocol.
        deadline: When the request is to be there, by `time.monotonic`.
        block_bytes: Of one block.
        ended: Called at the end.
    """

    def __init__(
        self,
        source: policy.Source,
        handle: Migration,
        engine: MigratingEngine,
        dialogue: Dialogue[policy.DestinationSays],
        evidence: Evidence,
        timing: Timing,
        deadline: float,
        block_bytes: int,
        ended: Callable[[Leaving, Migrated | Exception], None],
    ) -> None:
        self.source = source
        self.handle = handle
        self.dialogue = dialogue
        self._engine = engine
        self._evidence = evidence
        self._timing = timing
        self._deadline = deadline
        self._block_bytes = block_bytes
        self._ended = ended
        self._began = time.monotonic()
        self._stopped: Stopped | None = None
        self._may_have_stopped = False  # also by a `stop` that has raised
        self._stopped_at = 0.0
        self._torn: Exception | None = None
        self._failure: Exception | None = None  # why it stays, if the protocol does not know
        self._met = ""  # the error that was logged last

    def tear_off(self, why: Exception) -> None:
        """Ends the thread, and the handle with this error. A request that was handed over stays in doubt here."""
        self._torn = why
        self.dialogue.wake()

    def run(self) -> None:
        """Until it has ended here."""
        source = self.source
        news = True
        try:
            while not source.ended and self._torn is None:
                try:
                    news = self._turn(news=news)
                except Exception as error:  # once it is handed over, only the destination's word or a proof ends it
                    self._keep(error)
                    if self._evidence.closed:
                        return
                    if not source.ended:
                        self._log_once(error)
                        time.sleep(self._timing.repeat_s)
                    news = True
            if self._torn is not None:
                self._keep(self._torn)
        finally:
            self._finish()

    def _log_once(self, error: Exception) -> None:
        """An error that lasts is met again and again."""
        if (met := repr(error)) != self._met:
            self._met = met
            _log.exception("request %r has met an error", self.source.request, extra={"peer": self.dialogue.peer})

    def _turn(self, *, news: bool) -> bool:
        """Says what is due, waits for something to do, and does it. Whether there is news for the destination."""
        if self._may_speak():
            self.dialogue.speak(news=news)  # raises if it fits into no message
        self.dialogue.pause(self._next_s())
        before = self.source.state
        self._hear()
        return self._advance() or self.source.state != before

    def _hear(self) -> None:
        source, peer = self.source, self.dialogue.peer
        heard = self.dialogue.read()
        if self._is_torn():
            return
        if (proof := self._evidence.of(peer, source.id.destination)) is not None:
            # What it said has died with it, also if it was that it decodes: the request is here.
            source.gone(f"{peer} is gone: {proof}", ended=proof == "ended")
            self._failure = PeerLost(f"{peer} was lost while request {source.request!r} went there", peer=peer)
        for said in heard:
            source.hear(said)
        self._was_cancelled()
        if (late := self._late()) is not None:
            self._keep(late)
            if not source.ended:
                self.handle._end(late)  # who has it is known later: `state` says so
        elif source.state == "handed" and time.monotonic() >= self._stopped_at + self._timing.stop_s:
            self._keep(StateError(f"{peer} did not go on with request {source.request!r} in time"))

    def _is_torn(self) -> bool:
        """Whether this thread is to end: also because this instance has lost a rank, and no peer hears it any more."""
        if self._torn is None and (lost := self._evidence.lost()) is not None:
            self.tear_off(lost)
        return self._torn is not None

    def _late(self) -> DeadlineExceeded | None:
        if time.monotonic() < self._deadline:
            return None
        return DeadlineExceeded(f"request {self.source.request!r} did not reach {self.dialogue.peer} in time")

    def _was_cancelled(self) -> bool:
        """Whether it was; then the request stays here, or is asked for."""
        if self.handle._cancelled:
            self._keep(self._cancelled())
        return self.handle._cancelled

    def _cancelled(self) -> Cancelled:
        return Cancelled(f"the migration of request {self.source.request!r} was cancelled")

    def _keep(self, why: Exception) -> None:
        """Keeps the request here, or asks for it."""
        if not self.source.ended:
            self._failure = self._failure or why
            if not self.source.cancel(str(why)) and self._may_ask():
                self.source.withdraw()

    def _may_speak(self) -> bool:
        """Whether to say what is due: also that the request was handed over, but not that it is asked for in vain."""
        return self.source.state != "withdrawn" or self._may_ask()

    def _may_ask(self) -> bool:
        """Whether this instance could go on with the request. Its links may outlive its memory, and be heard."""
        try:
            return self._evidence.lost() is None
        except Exception:  # not known: what was handed over is in no danger where it is
            return False

    def _advance(self) -> bool:
        """Begins the next round, or stops the request and hands it over. Whether there is news for the destination."""
        source = self.source
        if not source.round_over():
            return False
        try:
            found = self._engine.progress(source.request)
            if found is None:
                self._keep(StateError(f"request {source.request!r} has ended here"))
            elif source.advance(_progress(found)) and not self._was_cancelled():
                self._stop()
        except Exception as error:  # whatever the engine raises: the request stays
            _log.exception("request %r cannot leave", source.request, extra={"peer": self.dialogue.peer})
            self._keep(error)
        return True

    def _stop(self) -> None:
        source = self.source
        self._may_have_stopped = True
        stopped = self._engine.stop(source.request)
        self._stopped_at = time.monotonic()
        if stopped is None:
            self._may_have_stopped = False
            self._keep(StateError(f"request {source.request!r} has ended here"))
            return
        self._stopped = stopped
        if (late := self._late()) is not None:
            self._keep(late)
        if late is not None or self._was_cancelled() or self._is_torn():
            return
        source.hand_over(_progress(stopped), stopped.state)
        self.handle._note("handed over")

    def _next_s(self) -> float:
        """Until something is to be done without a word of the destination."""
        now = time.monotonic()
        until = self._deadline if self.source.may_cancel else self._stopped_at + self._timing.stop_s
        return max(until - now, 0.0) if until > now else self._timing.repeat_s

    def _finish(self) -> None:
        """The engine frees the request, or goes on with it; then the destination is told. Those who wait hear it."""
        outcome: Migrated | Exception = StateError(f"the migration of request {self.source.request!r} has failed")
        try:
            outcome = self._conclude()
            if self._may_speak():
                self.dialogue.finish()
        except Exception as error:
            _log.warning("%s was not told the end of a migration: %s", self.dialogue.peer, error)
        finally:
            try:
                self._ended(self, outcome)
            finally:
                self.handle._end(outcome)

    def _conclude(self) -> Migrated | Exception:
        source, handle = self.source, self.handle
        now = time.monotonic()
        if source.state == "released":
            handle._note("there")
            self._tell_engine(lambda: self._engine.release(source.request))
            return self._result(now)
        if source.state == "back":  # else torn off: only the destination knows
            handle._note("here")
            if self._may_have_stopped:
                self._tell_engine(lambda: self._engine.resume(source.request, source.term))
        return self._failure_of()

    def _tell_engine(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            _log.exception("the engine failed at the end of the migration of %r", self.source.request)

    def _result(self, now: float) -> Migrated:
        heard, stopped = self.source.heard, self._stopped
        assert heard is not None
        assert stopped is not None
        return Migrated(
            "tokens" if heard.way == "tokens" else "kv",
            len(stopped.tokens),
            heard.sent,
            heard.cached,
            heard.sent * self._block_bytes,
            self.source.rounds + 1,
            now - self._stopped_at,
            now - self._began,
        )

    def _has_ended(self) -> bool:
        try:
            return self._engine.progress(self.source.request) is None
        except Exception:
            _log.exception("the engine failed at the end of the migration of %r", self.source.request)
            return False

    def _failure_of(self) -> Exception:
        source, heard = self.source, self.source.heard
        if self._failure is not None:
            return self._failure
        if self.handle._cancelled:  # and the destination gave up before it was asked
            return self._cancelled()
        if heard is not None and heard.full:
            return OutOfBlocks(f"{self.dialogue.peer} has no room for request {source.request!r}: {source.why}")
        if self._stopped is None and self._has_ended():  # its blocks were freed under the destination's fetch
            return StateError(f"request {source.request!r} has ended here")
        return StateError(f"request {source.request!r} stays here: {source.why}")


def _progress(found: RequestProgress | Stopped) -> policy.Progress:
    return policy.Progress(found.tokens, found.whole, found.blocks)
