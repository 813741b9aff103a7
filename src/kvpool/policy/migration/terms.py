"""Terms: which of two places a reader of a request's output listens to."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from kvpool.errors import ArgumentError

__all__ = ["FIRST", "OutputGate", "Term"]


class Term(NamedTuple):
    """A right to decode a request. Of two, the higher one counts; no two incarnations grant the same.

    Attributes:
        number: Grows with each hand-over, and with each time that a source takes a request back by proof.
        by: The incarnation that granted it.
    """

    number: int
    by: int

    def next(self, by: int) -> Term:
        """The term that an incarnation grants after this one."""
        return Term(self.number + 1, by)


FIRST = Term(0, 0)  # of a request that was never migrated


class OutputGate:
    """What the reader of the output of requests lets through: each position once, and never of an old term.

    A place that takes a request back goes on from an older position; what it puts out again is dropped here. So it must
    put out the same tokens again: where decoding is random, it takes what `delivered` says as given.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._terms: dict[Hashable, Term] = {}
        self._delivered: dict[Hashable, int] = {}

    def accept(self, request: Hashable, term: Term, position: int) -> bool:
        """Whether a token is news; then it counts as delivered.

        Args:
            request: Its name.
            term: Under which the token was put out.
            position: Of the token in the request's output, from 0.

        Raises:
            ArgumentError: Tokens before this one were not delivered. Nothing has changed: it is to be put out again.
        """
        if term < self._terms.get(request, term):
            return False
        done = self._delivered.get(request, 0)
        if position > done:  # and what is missing may come in the old term
            raise ArgumentError(f"token {position} of request {request!r} comes after {done} delivered ones")
        self._terms[request] = term
        self._delivered[request] = max(done, position + 1)
        return position == done

    def delivered(self, request: Hashable) -> int:
        """How many tokens of a request's output the reader has."""
        return self._delivered.get(request, 0)

    def forget(self, request: Hashable) -> None:
        """A request is complete, and its places know that."""
        self._terms.pop(request, None)
        self._delivered.pop(request, None)
