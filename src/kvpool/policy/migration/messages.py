"""What the two sides of a migration tell each other: each message is all that its sender says now.

So a message that is lost, repeated, late or overtaken does no harm: the reader takes the one with the highest
`number`, and what grows (tokens, blocks) begins where the reader has said that its knowledge ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.policy.migration.terms import FIRST, Term

__all__ = [
    "Addresses",
    "DestinationPhase",
    "DestinationSays",
    "MigrationId",
    "SourcePhase",
    "SourceSays",
    "Tokens",
    "Way",
]

Tokens: TypeAlias = "npt.NDArray[np.int32]"
Addresses: TypeAlias = "npt.NDArray[np.uint64]"
Way: TypeAlias = Literal["kv", "tokens", "auto"]

# "offered", "moving": the request decodes there. "handed", "withdrawn": it does not; "withdrawn" asks for it back.
# "cancelled": it stays there. "released": it is the destination's. "revoked": the source has taken it back.
SourcePhase: TypeAlias = Literal["offered", "moving", "handed", "withdrawn", "cancelled", "released", "revoked"]

# "failed": it does not decode under this id, and never will.
DestinationPhase: TypeAlias = Literal["moving", "decoding", "failed"]

_NO_TOKENS: Final = np.empty(0, np.int32)
_NO_BLOCKS: Final = np.empty(0, np.uint64)


class MigrationId(NamedTuple):
    """Names one migration, for ever.

    Attributes:
        source: The incarnation that the request leaves.
        destination: The incarnation that it goes to.
        number: Counts the migrations of the source.
    """

    source: int
    destination: int
    number: int


@dataclass(frozen=True, eq=False)
class SourceSays:
    """What the source says.

    Attributes:
        id: Of the migration.
        number: Of this message; grows.
        phase: Where the source is.
        request: Its name, the same at both ends.
        namespace: Of its prompt.
        way: How it goes; "auto": the destination chooses.
        term: Of the hand-over; before that, the one under which the source decodes.
        room: How many tokens the destination is to have room for.
        at: The token that `tokens` begins with.
        tokens: The request's tokens from there on.
        first: The block that `blocks` begins with.
        blocks: Where its blocks lie at the source: full ones; with "handed" all that are written.
        whole: So many tokens have keys and values in the blocks of this message and of earlier ones.
        state: The engine's own, with "handed".
    """

    id: MigrationId
    number: int
    phase: SourcePhase
    request: str = ""
    namespace: str = ""
    way: Way = "kv"
    term: Term = FIRST
    room: int = 0
    at: int = 0
    tokens: Tokens = field(default_factory=lambda: _NO_TOKENS)
    first: int = 0
    blocks: Addresses = field(default_factory=lambda: _NO_BLOCKS)
    whole: int = 0
    state: bytes = b""


@dataclass(frozen=True)
class DestinationSays:
    """What the destination says.

    Attributes:
        id: Of the migration.
        number: Of this message; grows over all migrations of the destination.
        phase: Where it is.
        way: How the request goes: never "auto".
        tokens: It knows so many tokens of the request.
        blocks: And so many of its blocks at the source.
        whole: So many tokens have keys and values here.
        cached: So many blocks it had cached, and did not get.
        sent: So many blocks it has fetched.
        full: It failed because it has no room.
        why: It failed because of this.
    """

    id: MigrationId
    number: int
    phase: DestinationPhase
    way: Way = "kv"
    tokens: int = 0
    blocks: int = 0
    whole: int = 0
    cached: int = 0
    sent: int = 0
    full: bool = False
    why: str = ""
