"""The handle of a match at a peer: what coroutines need, and asking several peers at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from kvpool._core import PeerKeyMatch, PeerMatch
from kvpool.errors import ArgumentTypeError
from kvpool.waiting.coroutines import until_done

__all__ = ["PeerKeyMatch", "PeerMatch", "ask_each", "names_of"]

_Match = TypeVar("_Match", bound=PeerMatch)


def names_of(peers: object) -> list[str]:
    """The names of the peers, of a list or tuple of them."""
    if not isinstance(peers, list | tuple):
        raise ArgumentTypeError(f"peer must be a str, or a list or tuple of str, not {type(peers).__name__}")
    for peer in peers:
        if not isinstance(peer, str):
            raise ArgumentTypeError(f"each peer must be a str, not {type(peer).__name__}")
    return list(peers)


def ask_each(ask: Callable[[str], _Match], peers: Iterable[str], wait: bool) -> list[_Match]:
    """Asks all peers at once.

    Args:
        ask: Asks one of them.
        peers: Their names.
        wait: Return when each question has ended, with or without an answer.

    Raises:
        Whatever `ask` raises, or a signal's handler meanwhile: then all questions are closed.
    """
    matches: list[_Match] = []
    try:
        matches.extend(map(ask, peers))
        for match in matches if wait else ():
            match.exception()
    except BaseException:
        for match in matches:
            match.close()
        raise
    return matches


def _await(self: PeerMatch) -> Generator[Any, None, PeerMatch]:
    """Waits in a coroutine; raises what wait() raises. Cancelling the task ends the waiting, not the match."""
    return _answered(self).__await__()


async def _answered(match: PeerMatch) -> PeerMatch:
    await until_done(match)
    return match.wait()


PeerMatch.__await__ = _await  # type: ignore[method-assign]
