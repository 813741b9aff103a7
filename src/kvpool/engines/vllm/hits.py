"""What the cache has of the prompts of waiting requests, pinned: a match for each group of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool import _core
from kvpool.engines.vllm.beginnings import Beginnings
from kvpool.engines.vllm.groups import Groups
from kvpool.engines.vllm.requests import Digests

__all__ = ["Hit", "Hits"]

_TRIED_MAX: Final = 8  # tails of a prompt, for each group
_STATES_TRIED_MAX: Final = 32  # which were saved, and may have been evicted
_Match: TypeAlias = "Callable[[npt.NDArray[np.int32], str], _core.Match]"


@dataclass(frozen=True)
class Hit:
    """What is cached of a prompt for one group.

    Attributes:
        match: Pins it.
        first: The block of the prompt at which it begins: 0, unless it is a tail.
        state: It is a state, of which no other block is needed.
    """

    match: _core.Match
    first: int = 0
    state: bool = False

    def addrs(self, first: int, count: int) -> npt.NDArray[np.uint64] | None:
        """Of `count` blocks of the prompt from `first` on. None: it does not have all of them, or is one state."""
        begin = first - self.first
        found = self.match.addrs
        if self.state and count != 1:  # nothing else can stand for all tokens before
            return None
        if not count:
            return found[:0]
        return found[begin : begin + count] if begin >= 0 and begin + count <= len(found) else None

    def close(self) -> None:
        """Ends the pin."""
        self.match.close()


class Hits:
    """Matches by request and group. Not thread-safe.

    A tail ends where its prompt ended, or later, if it was saved on. Nothing in its name says where. So those that were
    found are remembered by where they begin. So are states that were saved, since a look-up of each boundary of a long
    prompt would take too long.
    """

    def __init__(self) -> None:
        self._of: dict[str, dict[int, Hit]] = {}
        self._beginnings = Beginnings()

    def find(
        self,
        request_id: str,
        tokens: npt.NDArray[np.int32],
        namespace: str,
        groups: Groups,
        match: _Match,
        ends: Sequence[int] = (),
        digests: Digests | None = None,
    ) -> int:
        """Matches a prompt for every group. Returns the tokens that all of them have, and keeps nothing if that is 0.

        What `match` raises is raised, and nothing is kept then. REQUIRES: the request has no matches.

        Args:
            request_id: Of the request.
            tokens: Of the prompt.
            namespace: Of the request.
            groups: Of the model.
            match: Looks up.
            ends: Lengths in tokens at which tails may end that were not found yet, besides the length of what groups
                without a window have.
            digests: As for `Groups.part`. A request that waits is looked up again and again.
        """
        best = _Search(tokens, namespace, groups, match, digests, self._beginnings)
        for end in sorted({min(end, len(tokens)) for end in ends if groups.tails}, reverse=True):
            if end <= best.found:
                break
            try:
                other = _Search(tokens[:end], namespace, groups, match, digests, self._beginnings)
            except BaseException:
                best.close()
                raise
            best, worse = (other, best) if other.found > best.found else (best, other)
            worse.close()
        if best.found:
            self._of[request_id] = best.hits
            for group, first in self.tails(request_id).items():
                name = groups.part(group, namespace, tokens, first, digests).namespace
                self._beginnings.add(name, tokens, first * groups.block_tokens)
            for group, hit in best.hits.items():
                if hit.state:
                    name = groups.part(group, namespace, tokens, hit.first, digests).namespace
                    self.note_state(name, tokens, hit.first * groups.block_tokens)
        return best.found

    def note_state(self, name: str, tokens: npt.NDArray[np.int32], begin: int) -> None:
        """A state is cached, or will be: the look-up tries it.

        Args:
            name: Its namespace.
            tokens: Of a prompt that has it.
            begin: At which token its block begins. The first block of a prompt is tried in any case.
        """
        if begin:
            self._beginnings.add(name, tokens, begin)

    def tails(self, request_id: str) -> dict[int, int]:
        """At which block the tails begin that the request has: by group, of those that lack the blocks before it."""
        hits = self._of.get(request_id, {}).items()
        return {group: hit.first for group, hit in hits if hit.first and not hit.state}

    def take(self, request_id: str, group: int) -> Hit | None:
        """The match of one group, which the caller closes."""
        hits = self._of.get(request_id, {})
        hit = hits.pop(group, None)
        if not hits:
            self._of.pop(request_id, None)
        return hit

    def __len__(self) -> int:
        """How many requests have some."""
        return len(self._of)

    def close(self, request_id: str) -> None:
        """Closes those of a request that were not taken."""
        for hit in self._of.pop(request_id, {}).values():
            hit.close()

    def close_all(self) -> None:
        """Closes all."""
        for request_id in list(self._of):
            self.close(request_id)


class _Search:
    """A look-up of a prompt for every group: `found` tokens, and the `hits`, which are closed if that is 0."""

    def __init__(
        self,
        tokens: npt.NDArray[np.int32],
        namespace: str,
        groups: Groups,
        match: _Match,
        digests: Digests | None,
        beginnings: Beginnings,
    ) -> None:
        self._tokens, self._namespace, self._groups, self._match = tokens, namespace, groups, match
        self._digests, self._beginnings = digests, beginnings
        self.hits: dict[int, Hit] = {}
        self.found = len(tokens) // groups.block_tokens * groups.block_tokens
        settled = -1
        try:
            while self.found and settled != self.found:  # a tail may be of no use for a shorter prefix
                settled = self.found
                for group in groups.order:
                    self.found = self._look(group, self.found)
        except BaseException:
            self.close()
            raise
        if not self.found:
            self.close()

    def close(self) -> None:
        for hit in self.hits.values():
            hit.close()
        self.hits.clear()

    def _look(self, group: int, end: int) -> int:
        """How many of `end` tokens a group has."""
        if not end:
            return 0
        known = self.hits.get(group)
        if known is not None:
            if self._serves(group, known.first, end):  # it has had more than these tokens
                return end
            del self.hits[group]
            known.close()
        if self._groups.has_states(group):
            return self._look_for_state(group, end)
        whole = self._match(*self._part(group, end, 0))
        self.hits[group] = Hit(whole)
        found = whole.tokens
        if not self._groups.tails:
            return found
        for first in self._tails(group, end):
            if found >= end:
                break
            tail = self._match(*self._part(group, end, first))
            reached = first * self._groups.block_tokens + tail.tokens
            if reached > found and tail.tokens and self._serves(group, first, reached):
                self.hits[group].close()
                self.hits[group], found = Hit(tail, first), reached
            else:
                tail.close()
        return found

    def _look_for_state(self, group: int, end: int) -> int:
        """The last boundary up to `end` tokens whose state is cached, as far as such states are remembered."""
        block_tokens = self._groups.block_tokens
        for first in chain(self._remembered(group, end, end - block_tokens, _STATES_TRIED_MAX), (0,)):
            boundary = (first + 1) * block_tokens
            state = self._match(*self._part(group, boundary, first))
            if state.tokens == block_tokens:
                self.hits[group] = Hit(state, first, state=True)
                return boundary
            state.close()
        return 0

    def _serves(self, group: int, first: int, end: int) -> bool:
        """Whether a group needs no block before `first` of a prefix."""
        return first <= self._groups.first_needed(group, end // self._groups.block_tokens)

    def _tails(self, group: int, end: int) -> Iterator[int]:
        """Where tails may begin that are of use for a prefix up to here."""
        block_tokens = self._groups.block_tokens
        first = self._groups.first_needed(group, end // block_tokens)
        if first:
            yield first
        yield from self._remembered(group, end, (first - 1) * block_tokens, _TRIED_MAX)

    def _remembered(self, group: int, end: int, last: int, most: int) -> Iterator[int]:
        """Blocks at which tails or states of this prompt begin, from the token `last` back."""
        tried = 0
        for begin in self._beginnings.likely(self._tokens, last):
            first = begin // self._groups.block_tokens
            if self._part(group, end, first)[1] in self._beginnings:
                tried += 1
                yield first
            if tried == most:
                break

    def _part(self, group: int, end: int, first: int) -> tuple[npt.NDArray[np.int32], str]:
        part = self._groups.part(group, self._namespace, self._tokens[:end], first, self._digests)
        return part.tokens, part.namespace
