"""One side of a migration talks to the other: what it heard and has not read, and when to repeat itself."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kvpool._core import Transfer
from kvpool.control.amounts import above_zero
from kvpool.control.migration.mailbox import Mailbox
from kvpool.errors import ArgumentError, Error
from kvpool.policy import migration as policy

__all__ = ["Dialogue", "Timing"]

_Heard = TypeVar("_Heard", policy.SourceSays, policy.DestinationSays)
_UNSENT_S: Final = 0.005  # until a message is tried again that could not be sent


@dataclass(frozen=True)
class Timing:
    """The times of the protocol, in seconds.

    Attributes:
        repeat_s: Each side repeats itself so often.
        silence_s: A destination that does not decode yet gives up when the source was silent for so long; and a fetch,
            or a message, may take so long.
        stop_s: A source asks for a request back that was handed over so long ago.
    """

    repeat_s: float = 0.2
    silence_s: float = 5.0
    stop_s: float = 2.0

    def __post_init__(self) -> None:
        """Raises ArgumentError for a time that is not above 0, or not finite."""
        for name in ("repeat_s", "silence_s", "stop_s"):
            object.__setattr__(self, name, above_zero(getattr(self, name), name))


class Dialogue(Generic[_Heard]):
    """What one migration hears and says. Any thread may `post` and `wake`; the rest is for that of the migration.

    Args:
        mailbox: Sends.
        peer: The other side.
        timing: Of the protocol.
        says: Makes the message that is due, all that this side says now.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        peer: str,
        timing: Timing,
        says: Callable[[], policy.SourceSays | policy.DestinationSays],
    ) -> None:
        self.peer = peer
        self._mailbox = mailbox
        self._timing = timing
        self._says = says
        self._changed = threading.Condition()
        self._heard: deque[_Heard] = deque()
        self._woken = False
        self._sending: Transfer | None = None
        self._due_at = 0.0
        self.heard_at = time.monotonic()

    def post(self, said: _Heard) -> None:
        """The other side has said this."""
        with self._changed:
            self._heard.append(said)
            self._changed.notify()

    def wake(self) -> None:
        """Something else has happened."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def read(self) -> list[_Heard]:
        """What was heard since."""
        with self._changed:
            found = list(self._heard)
            self._heard.clear()
            self._woken = False
        if found:
            self.heard_at = time.monotonic()
        return found

    def has_news(self) -> bool:
        """Whether something was heard, or has happened, that was not read."""
        return bool(self._heard) or self._woken

    def speak(self, *, news: bool) -> None:
        """Sends what is due: because there is news, or because it is time to repeat it. Does not wait.

        Raises ArgumentError if it does not fit into a message.
        """
        now = time.monotonic()
        if news:
            self._due_at = now
        if now < self._due_at:
            return
        if self._sending is not None and not self._sending.done():
            return
        self._due_at = now + self._timing.repeat_s
        try:
            self._sending = self._mailbox.begin(self.peer, policy.encode(self._says()), self._timing.silence_s)
        except ArgumentError:
            raise
        except Error:
            self._sending = None  # not connected, or it has too much to read: it is said again

    def finish(self) -> None:
        """Says the last word, as far as it can be said soon; the other side asks again if it has missed it."""
        until = time.monotonic() + self._timing.repeat_s
        while self._sending is not None and not self._sending.done() and time.monotonic() < until:
            time.sleep(_UNSENT_S)
        self.speak(news=True)

    def pause(self, at_most_s: float | None = None) -> None:
        """Waits until something is heard or has happened, a message is due, or the time is over."""
        now = time.monotonic()
        wait_s = max(_UNSENT_S, self._due_at - now)
        if at_most_s is not None:
            wait_s = min(wait_s, at_most_s)
        with self._changed:
            self._changed.wait_for(self.has_news, wait_s)
