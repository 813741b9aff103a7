"""How far a request is, and when its source stops it."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.errors import ArgumentError
from kvpool.policy.fields import count_of
from kvpool.policy.migration.messages import Addresses, Tokens

__all__ = ["Progress", "Rounds", "StopRules"]


@dataclass(frozen=True, eq=False)
class Progress:
    """How far a request is at its source.

    Attributes:
        tokens: All that are known: the prompt, and what was put out.
        whole: So many of them have keys and values in the blocks, and no write to these is under way. As a rule one
            less than there are tokens: the last one was not an input yet.
        blocks: Where its blocks lie, in order; at least those of `whole` tokens.
    """

    tokens: Tokens
    whole: int
    blocks: Addresses

    def check(self, block_tokens: int) -> Progress:
        """Itself. Raises ArgumentError if an engine cannot be here."""
        if not 0 <= self.whole <= len(self.tokens):
            raise ArgumentError(f"{self.whole} of {len(self.tokens)} tokens are whole")
        if len(self.blocks) * block_tokens < self.whole:
            raise ArgumentError(f"{len(self.blocks)} blocks of {block_tokens} tokens do not hold {self.whole}")
        return self


@dataclass(frozen=True)
class StopRules:
    """When rounds end.

    Attributes:
        left_tokens: By tokens the source stops when so many or fewer are not prefilled yet; by KV when no full block
            is left.
        rounds_max: And after so many rounds, whatever is left.
    """

    left_tokens: int = 4
    rounds_max: int = 16

    def __post_init__(self) -> None:
        """Raises ArgumentError for a number that is out of range."""
        count_of(self.left_tokens, "the tokens that may be left", 1)
        count_of(self.rounds_max, "the number of rounds", 1)


class Rounds:
    """Counts the rounds of a migration, and says when another one does not pay.

    Attributes:
        count: Rounds that have begun.
    """

    def __init__(self, rules: StopRules) -> None:
        self._rules = rules
        self._before: int | None = None
        self.count = 0

    def enough(self, left: int, enough_left: int) -> bool:
        """Whether to stop the request now: a round is over, and so many tokens have come since that could move.

        Otherwise the next round begins.

        Args:
            left: Tokens that could be moved now.
            enough_left: So few of them that they are not worth a round.
        """
        shrinks = self._before is None or left < self._before
        if left <= enough_left or not shrinks or self.count >= self._rules.rounds_max:
            return True
        self._before = left
        self.count += 1
        return False
