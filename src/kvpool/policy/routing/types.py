"""Requests of a router, and decisions for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvpool.types import TokenVector

__all__ = ["Decision", "Fetch", "Holder", "Kind", "Request"]


class Kind(Enum):
    """What an instance does; each kind has a separate prompt tree (MemServe §6)."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"  # both


@dataclass(frozen=True)
class Request:
    """A prompt that wants an instance.

    Attributes:
        tokens: Token ids; a NumPy array of int32 is the fastest.
        session: The client's session, for the policy session-id. None: the request is a session by itself.
        namespace: Tenant, adapter, salt; prefixes of different ones never match.
    """

    tokens: TokenVector
    session: str | None = None
    namespace: str = ""


class Holder(NamedTuple):
    """An instance that holds tokens [start, stop) of the prompt, which the chosen one lacks."""

    instance: int
    start: int
    stop: int


class Fetch(NamedTuple):
    """Tokens [start, stop) come from an instance faster than they are computed (eq. 2).

    Attributes:
        instance: That holds them.
        start: The first token; what the chosen instance holds ends here.
        stop: The end.
        transfer_s: Predicted.
        saved_s: Of computing.
    """

    instance: int
    start: int
    stop: int
    transfer_s: float
    saved_s: float


class Decision(NamedTuple):
    """Where a request goes, and what is predicted.

    Attributes:
        ticket: Names the request from here on: first_token, finished, failed.
        instance: That computes the prompt.
        cached: Tokens of it that the instance holds by the tree. The instance itself decides with its own match.
        holders: Instances that hold more of it, the longest first, and where equally long the least loaded first.
        fetch: What to fetch from one of them; None says recompute.
        queue_s: Until the instance begins with it.
        exec_s: That it takes then, fetching included.
        decode: The instance that decodes, where the one above only prefills; else None.
        decode_cached: Tokens that it holds: they need not be sent to it.
    """

    ticket: int
    instance: int
    cached: int
    holders: tuple[Holder, ...]
    fetch: Fetch | None
    queue_s: float
    exec_s: float
    decode: int | None = None
    decode_cached: int = 0
