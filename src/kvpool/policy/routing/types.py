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

    __hash__ = object.__hash__  # Enum's is a function of Python, and a decision looks up kinds six times


@dataclass(frozen=True)
class Request:
    """A prompt that needs an instance.

    Attributes:
        tokens: Token ids; a NumPy array of int32 is the fastest.
        session: The client's session, for the policy session-id. None: the request is a session by itself.
        namespace: Tenant, adapter, salt; prefixes of different ones never match.
    """

    tokens: TokenVector
    session: str | None = None
    namespace: str = ""


class Holder(NamedTuple):
    """An instance that holds tokens [start, stop) of the prompt, or is to compute them; the chosen one lacks them."""

    instance: int
    start: int
    stop: int


class Fetch(NamedTuple):
    """Fetching tokens [start, stop) from an instance is faster than computing them (eq. 2).

    Attributes:
        instance: The instance that holds them.
        start: The first token; what the chosen instance holds ends here.
        stop: The end.
        transfer_s: The predicted time of the transfer.
        saved_s: The predicted time of computing that it saves.
    """

    instance: int
    start: int
    stop: int
    transfer_s: float
    saved_s: float


class Decision(NamedTuple):
    """Where a request goes, and the predicted times.

    Attributes:
        ticket: Names the request from here on: first_token, finished, failed.
        instance: The instance that computes the prompt.
        cached: Tokens of it that the instance holds, according to the tree. The instance decides by its own match.
        holders: Instances that hold more of it, the longest first, among equals the least loaded first.
        fetch: What to fetch from one of them; None says recompute.
        queue_s: The time until the instance begins with it.
        exec_s: The time that it takes then, fetching included.
        decode: The instance that decodes, if `instance` only prefills; else None.
        decode_cached: Tokens that `decode` holds: they need not be sent to it.
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
