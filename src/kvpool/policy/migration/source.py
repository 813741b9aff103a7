"""The source's part of one migration: what it says, when it stops the request, and when it may free its blocks.

    offered ──> moving ──> handed ──> released        the destination has it
       │          │          ├──> withdrawn ──> released
       │          │          └──────────┴─────> back     "failed", or proof: it goes on here
       └──────────┴──────────────────────────> back     cancelled, refused, failed, gone: it never stopped

S1  It may decode here in `offered`, `moving` and `back`, and nowhere else.
S2  Its blocks may be freed, or written by a later request, in `released` and `back` alone.
S3  From `handed` on nothing but the destination's word, or proof that its incarnation is gone, ends the migration.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import numpy as np

from kvpool.errors import ArgumentError
from kvpool.policy.migration.messages import DestinationSays, MigrationId, SourcePhase, SourceSays, Way
from kvpool.policy.migration.progress import Progress, Rounds, StopRules
from kvpool.policy.migration.terms import Term

__all__ = ["Source", "SourceState"]

SourceState: TypeAlias = Literal["offered", "moving", "handed", "withdrawn", "released", "back"]

_ENDED: Final = ("released", "back")


class Source:
    """One request that leaves. Not thread-safe.

    Attributes:
        state: See above.
        heard: What the destination said last; None before its first word.
        why: In `back`, why it stays here.
        by_proof: In `back`: the destination may have decoded it, and its incarnation is fenced: it may wake up and ask.

    Args:
        id: Of the migration.
        request: Its name.
        namespace: Of its prompt.
        way: How it goes.
        term: Under which it decodes here.
        room: How many tokens the destination is to have room for.
        progress: How far it is.
        block_tokens: Tokens of a block.
        rules: When rounds end.
    """

    def __init__(
        self,
        id: MigrationId,
        request: str,
        namespace: str,
        way: Way,
        term: Term,
        room: int,
        progress: Progress,
        block_tokens: int,
        rules: StopRules,
    ) -> None:
        self.id = id
        self.request = request
        self.state: SourceState = "offered"
        self.heard: DestinationSays | None = None
        self.why = ""
        self.by_proof = False
        self._namespace = namespace
        self._way = way
        self._term = term
        self._room = room
        self._block_tokens = block_tokens
        self._rules = rules
        self._rounds = Rounds(rules)
        self._progress = progress.check(block_tokens)
        self._state_bytes = b""
        self._number = 0

    @property
    def term(self) -> Term:
        """Of the request: granted to the destination from `handed` on; under which it decodes here otherwise."""
        return self._term

    @property
    def rounds(self) -> int:
        """How many rounds have begun."""
        return self._rounds.count

    @property
    def way(self) -> Way:
        """How it goes, as far as that is known."""
        return self._way if self.heard is None else self.heard.way

    @property
    def ended(self) -> bool:
        """Whether nothing more is to be done here."""
        return self.state in _ENDED

    @property
    def may_cancel(self) -> bool:
        """Whether it can be kept here without asking the destination."""
        return self.state in ("offered", "moving")

    def hear(self, said: DestinationSays) -> None:
        """Takes what the destination says; what is older than it has said before is dropped."""
        if self.ended or (self.heard is not None and said.number <= self.heard.number):
            return
        self.heard = said
        if said.phase == "failed":
            self._go_on(said.why or "the destination has given up")
        elif said.phase == "decoding":
            if not self.may_cancel:  # else it is a word that no destination gives
                self.state = "released"
        elif self.state == "offered":
            self.state = "moving"

    def round_over(self) -> bool:
        """Whether the destination has all that it was told of, so that it is time for a round or for the stop."""
        heard = self.heard
        return self.state == "moving" and heard is not None and heard.whole >= self._movable(self._progress)

    def advance(self, progress: Progress) -> bool:
        """Tells the destination how far the request is now. Whether it is time to stop the request instead.

        Call it when a round is over.
        """
        self._keep(progress)
        left = self._movable(progress) - (0 if self.heard is None else self.heard.whole)
        enough_left = self._rules.left_tokens if self.way == "tokens" else 0
        return self._rounds.enough(left, enough_left)

    def hand_over(self, progress: Progress, state: bytes) -> None:
        """The request was stopped: from now on it is not decoded here.

        Args:
            progress: How far it is, all writes done.
            state: The engine's own.

        Raises:
            ArgumentError: The engine is not where it said it was, or not every token but the last is whole.
        """
        if self.state != "moving":
            raise ArgumentError(f"a request that is {self.state} cannot be handed over")
        if progress.whole + 1 < len(progress.tokens):
            raise ArgumentError(f"{progress.whole} of {len(progress.tokens)} tokens are whole in a stopped request")
        self._keep(progress)
        self._state_bytes = state
        self._term = self._term.next(self.id.source)
        self.state = "handed"

    def cancel(self, why: str) -> bool:
        """Keeps the request here. False: it was handed over, and only the destination can say who has it."""
        if self.may_cancel:
            self._go_on(why)
        return self.state == "back"

    def withdraw(self) -> None:
        """Asks for a request that was handed over: the destination gives it back if it does not decode yet."""
        if self.state == "handed":
            self.state = "withdrawn"

    def gone(self, why: str, *, ended: bool) -> None:
        """There is proof that the destination's incarnation is gone.

        Args:
            why: What is the proof.
            ended: Its process has ended; otherwise it is only fenced, and may wake up and ask.
        """
        if not self.ended:
            self.by_proof = not (self.may_cancel or ended)
            self._go_on(why)

    def says(self) -> SourceSays:
        """What to tell the destination now."""
        self._number += 1
        phase: SourcePhase = "cancelled" if self.state == "back" else self.state
        if self.state in ("withdrawn", *_ENDED):
            return SourceSays(self.id, self._number, phase, self.request)
        at = 0 if self.heard is None else self.heard.tokens
        first = 0 if self.heard is None else self.heard.blocks
        progress = self._progress
        blocks = -(-progress.whole // self._block_tokens) if self.state == "handed" else self._full(progress)
        return SourceSays(
            self.id,
            self._number,
            phase,
            self.request,
            self._namespace,
            self._way,
            self._term,
            self._room,
            at,
            progress.tokens[at:],
            first,
            progress.blocks[first:blocks],
            progress.whole if self.state == "handed" else self._movable(progress),
            self._state_bytes,
        )

    def _go_on(self, why: str) -> None:
        if not self.may_cancel:  # the term of the hand-over may be in use elsewhere
            self._term = self._term.next(self.id.source)
        self.why = why
        self.state = "back"

    def _keep(self, progress: Progress) -> None:
        """Full blocks never change, and tokens are only added."""
        old = self._progress
        full = self._full(old)
        if len(progress.tokens) < len(old.tokens) or progress.whole < old.whole:
            raise ArgumentError(f"request {self.request!r} has fewer tokens than before")
        if not np.array_equal(progress.tokens[: len(old.tokens)], old.tokens):
            raise ArgumentError(f"tokens of request {self.request!r} are others than before")
        if not np.array_equal(progress.blocks[:full], old.blocks[:full]):
            raise ArgumentError(f"full blocks of request {self.request!r} lie elsewhere than before")
        self._progress = progress.check(self._block_tokens)

    def _full(self, progress: Progress) -> int:
        return progress.whole // self._block_tokens

    def _movable(self, progress: Progress) -> int:
        """Tokens that can be moved while it decodes: those of full blocks, which nothing writes to any more."""
        return progress.whole if self.way == "tokens" else self._full(progress) * self._block_tokens
