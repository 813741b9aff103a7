"""What a migration asks of an engine, at both ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvpool._core import Match
from kvpool.policy.migration import FIRST, Term
from kvpool.policy.migration.messages import Addresses, Tokens

__all__ = ["Arrived", "MigratingEngine", "RequestProgress", "Stopped"]


@dataclass(frozen=True, eq=False)
class RequestProgress:
    """How far a request is at its source.

    Attributes:
        tokens: All that are known, int32: the prompt, and what was put out.
        whole: So many of them have keys and values in the blocks, and no write to these is under way: on a GPU the
            steps that wrote them have ended. As a rule one less than there are tokens.
        blocks: Where its blocks lie, in order, the shared prefix included; at least those of `whole` tokens.
        namespace: Of its prompt.
        term: What `resume` or `adopt` gave last; FIRST for a request that never migrated.
        room: How many tokens the destination is to have room for, at least. 0: the tokens, and two blocks more.
        pools: How many pools have a part of each of its blocks. Of several ranks they are one logical instance, whose
            scheduler's pool counts as one. More are ranks that nothing holds together, which `migrate` refuses.
    """

    tokens: Tokens
    whole: int
    blocks: Addresses
    namespace: str = ""
    term: Term = FIRST
    room: int = 0
    pools: int = 1


@dataclass(frozen=True, eq=False)
class Stopped:
    """A request that was stopped between two steps: all writes to its blocks have ended.

    Attributes:
        tokens: As in RequestProgress.
        whole: All of them, or all but the last.
        blocks: As in RequestProgress.
        state: The engine's own, for the engine at the destination: sampling parameters, seeds, who waits for it.
    """

    tokens: Tokens
    whole: int
    blocks: Addresses
    state: bytes = b""


@dataclass(frozen=True, eq=False)
class Arrived:
    """A request that is the engine's from now on.

    Attributes:
        request: Its name.
        term: Everything that is put out for it carries this.
        way: How it came.
        tokens: All that are known.
        whole: So many of them have keys and values in the blocks.
        blocks: Its blocks, in order, those of the cached prefix first.
        own: Of these, the ones to free when it ends.
        spare: More blocks that were allocated for its growth: to be used or freed.
        prefix: The pin of the cached prefix: to be closed when it ends.
        namespace: Of its prompt.
        state: What `Stopped` had.
    """

    request: str
    term: Term
    way: Literal["kv", "tokens"]
    tokens: Tokens
    whole: int
    blocks: Addresses
    own: Addresses
    spare: Addresses
    prefix: Match
    namespace: str = ""
    state: bytes = field(default=b"", repr=False)


class MigratingEngine(Protocol):
    """An engine whose requests migrate. Calls come from threads of `Migrations`: for one request one at a time.

    No call may wait for a `Migration`. What a call raises ends the migration, and the request stays at its source.
    """

    def progress(self, request: str) -> RequestProgress | None:
        """How far a request is; it goes on. None: it is not here, or has ended."""

    def stop(self, request: str) -> Stopped | None:
        """Stops a request between two steps, and waits for the end of all writes to its blocks. None: it has ended.

        Its blocks stay as they are until `resume` or `release`. It returns only when the reader has all that the
        request has put out here: what the destination puts out follows on that. If it raises, `resume` is called.
        """

    def resume(self, request: str, term: Term) -> None:
        """A request that was stopped goes on here, in this term. Changes nothing if it was not stopped.

        Where decoding is random, what its reader has been given since counts: see `kvpool.policy.migration.OutputGate`.
        """

    def release(self, request: str) -> None:
        """Another engine decodes it: its blocks can be freed, and its prefix unpinned."""

    def batch(self) -> int:
        """How many requests are decoded here: says how much can be prefilled beside them."""

    def admit(self, request: str, tokens: int) -> bool:
        """Whether a request of so many tokens may come. Its room in blocks is seen to."""

    def prefill(self, request: str, tokens: Tokens, begin: int, blocks: Addresses) -> None:
        """Computes keys and values of tokens[begin:] into its blocks; those before are there. Waits until it is done.

        The decode steps of other requests go on between its parts.
        """

    def adopt(self, arrived: Arrived) -> None:
        """Decodes a request from now on. If this raises it does not, and keeps none of its blocks.

        OutOfBlocks and Busy say that it has no room: the request goes back to its source, or, if that is gone, this is
        called again and again until there is.
        """

    def drop(self, request: str, term: Term) -> None:
        """Ends a request that it has in this term, and frees its blocks: its source has taken it back by proof."""
