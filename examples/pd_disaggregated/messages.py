"""The messages of the dispatcher and an instance, over the pipe between them. KV never takes that way.

A request is named by its number, and an attempt at it by a second one: when an instance is lost the dispatcher tries
again, and what is still said about the attempt before is ignored. That an instance is there is told by the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import kvpool
from pd_disaggregated.records import Tokens

# ---- to an instance


@dataclass(frozen=True, eq=False)
class Serve:
    """Prefill a prompt; let the instance `decode` generate the rest. "" when this one does."""

    request: int
    attempt: int
    prompt: Tokens
    new_tokens: int
    decode: str


@dataclass(frozen=True)
class Cancel:
    """Nobody wants the answer to this attempt any more. Unknown ones are ignored."""

    request: int
    attempt: int


@dataclass(frozen=True)
class Audit:
    """Let go of everything, audit the pool, say `Audited`."""


@dataclass(frozen=True)
class Stop:
    """The run is over. An instance also ends when the pipe does."""


ToInstance: TypeAlias = Serve | Cancel | Audit | Stop

# ---- from an instance


@dataclass(frozen=True)
class Token:
    """A token of an answer. The first one comes twice: from prefill, and from decode when it has taken over."""

    request: int
    attempt: int
    position: int  # in the answer, from 0
    token: int


@dataclass(frozen=True)
class Prefilled:
    """The prompt is computed, and its KV is where it will be decoded."""

    request: int
    attempt: int
    cached_tokens: int  # found in the cache here
    sent_bytes: int
    skipped_tokens: int  # the decode instance had them
    kvpool_s: float


@dataclass(frozen=True)
class Answered:
    """The last token is out, and what is kept of the request is in its caches."""

    request: int
    attempt: int
    sent_back_bytes: int
    kvpool_s: float


@dataclass(frozen=True)
class Failed:
    """The instance could not go on with it, and has nothing of it left."""

    request: int
    attempt: int
    why: str


@dataclass(frozen=True)
class Noticed:
    """A peer is gone, and this instance goes on without it."""

    peer: str


@dataclass(frozen=True)
class Audited:
    """The pool adds up."""

    stats: kvpool.PoolStats


FromInstance: TypeAlias = Token | Prefilled | Answered | Failed | Noticed | Audited
