"""The handle of a match at a peer: what coroutines need, and asking several peers at once."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from kvpool._core import PeerKeyMatch, PeerMatch
from kvpool.errors import ArgumentTypeError
from kvpool.waiting.coroutines import until_done

__all__ = ["PeerKeyMatch", "PeerMatch", "names_of", "wait_for_all"]


def names_of(peers: object) -> list[str]:
    """The names of the peers, of a list or tuple of them."""
    if not isinstance(peers, list | tuple):
        raise ArgumentTypeError(f"peer must be a str, or a list or tuple of str, not {type(peers).__name__}")
    for peer in peers:
        if not isinstance(peer, str):
            raise ArgumentTypeError(f"each peer must be a str, not {type(peer).__name__}")
    return list(peers)


def wait_for_all(matches: Sequence[PeerMatch]) -> None:
    """Returns when each has ended, with or without an answer. If a signal's handler raises, all are closed."""
    try:
        for match in matches:
            match.exception()
    except BaseException:
        for match in matches:
            match.close()
        raise


def _await(self: PeerMatch) -> Generator[Any, None, PeerMatch]:
    """Waits in a coroutine; raises what wait() raises. Cancelling the task ends the waiting, not the match."""
    return _answered(self).__await__()


async def _answered(match: PeerMatch) -> PeerMatch:
    await until_done(match)
    return match.wait()


PeerMatch.__await__ = _await  # type: ignore[method-assign]
