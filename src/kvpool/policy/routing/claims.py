"""What a tree takes for held because a request was sent there: it stays only if some request computes it.

A request that is learnt at its dispatch claims the blocks of its prompt that its instance was not known to hold. A
claim ends when a prompt is computed that has the same blocks, its own or another's; what is left of it when its request
fails is forgotten, but not the blocks that another request has claimed meanwhile as its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpool.policy.routing.tokens import Tokens
from kvpool.policy.routing.tree import PromptTree

__all__ = ["Claims"]


@dataclass(slots=True)
class _Claim:
    tokens: Tokens
    namespace: str
    first: int  # the first block that no computed prompt is known to have


class Claims:
    """The claims of the requests under way. Not thread-safe."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._at: dict[int, dict[int, _Claim]] = {}  # by the instance's incarnation and the ticket

    def __len__(self) -> int:
        """Requests that have claims."""
        return sum(len(claims) for claims in self._at.values())

    def add(
        self, tree: PromptTree, tokens: Tokens, namespace: str, instance: int, incarnation: int, ticket: int
    ) -> None:
        """The request is sent to the instance: notes in the tree that it will hold the prompt."""
        added = tree.insert(tokens, instance, namespace)
        claim = _Claim(tokens, namespace, len(tokens) // self._block_tokens - added)
        self._at.setdefault(incarnation, {})[ticket] = claim

    def computed(self, incarnation: int, ticket: int) -> None:
        """The request's prompt is computed. Does nothing for a request without a claim."""
        claim = self._taken(incarnation, ticket)
        if claim is None:
            return
        for other in self._at.get(incarnation, {}).values():
            # Else no more is shared than is known to be computed.
            if self._same_at(claim.tokens, other.tokens, other.first):
                other.first = max(other.first, self._shared(claim, other))

    def withdraw(self, tree: PromptTree | None, instance: int, incarnation: int, ticket: int) -> None:
        """The request has failed: forgets what only it claimed, or nothing if there is no tree to forget it."""
        claim = self._taken(incarnation, ticket)
        if claim is None or claim.first == len(claim.tokens) // self._block_tokens:
            return
        if tree is not None:
            tree.remove(claim.tokens, instance, claim.first, claim.namespace)
        for other in self._at.get(incarnation, {}).values():
            if self._same_at(claim.tokens, other.tokens, claim.first) and self._shared(claim, other) > claim.first:
                if tree is not None:
                    tree.insert(other.tokens, instance, other.namespace)
                other.first = min(other.first, claim.first)

    def computed_tokens(self, incarnation: int, tokens: Tokens, namespace: str, held: int) -> int:
        """How many of the first `held` tokens of a prompt an instance holds now, and does not only have to compute."""
        for claim in self._at.get(incarnation, {}).values():
            begin = claim.first * self._block_tokens
            if begin >= min(held, len(claim.tokens)) or claim.tokens[begin] != tokens[begin]:  # quick, of most
                continue
            if claim.namespace != namespace or not self._same_at(claim.tokens, tokens, claim.first):
                continue
            if np.array_equal(claim.tokens[:begin], tokens[:begin]):
                held = begin
        return held

    # ----

    def _taken(self, incarnation: int, ticket: int) -> _Claim | None:
        claims = self._at.get(incarnation, {})
        claim = claims.pop(ticket, None)
        if claim is not None and not claims:
            del self._at[incarnation]
        return claim

    def _same_at(self, one: Tokens, other: Tokens, block: int) -> bool:
        """Whether both have this block and it is the same: of prompts that differ later, most differ there."""
        begin, end = block * self._block_tokens, (block + 1) * self._block_tokens
        return end <= min(len(one), len(other)) and np.array_equal(one[begin:end], other[begin:end])

    def _shared(self, one: _Claim, other: _Claim) -> int:
        """With how many equal blocks the prompts begin."""
        if one.namespace != other.namespace:
            return 0
        size = self._block_tokens
        end = min(len(one.tokens), len(other.tokens)) // size * size
        different = np.flatnonzero(one.tokens[:end] != other.tokens[:end])
        return int(different[0] if len(different) else end) // size
