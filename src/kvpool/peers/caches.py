"""What the peers of a pool have cached: which of them has a prompt or keys, and bringing blocks here by their keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, TypedDict, TypeVar, overload

from kvpool import _core
from kvpool.arguments import flag_from, seconds_from
from kvpool.errors import ArgumentTypeError
from kvpool.peers.service import NetworkedPool
from kvpool.transfer.key_fetch import fetch_keys
from kvpool.transfer.peer_match import PeerKeyMatch, PeerMatch, ask_each, names_of
from kvpool.types import Keys, TokenVector

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["PeerCaches"]

_Names: TypeAlias = list[str] | tuple[str, ...]
_Match = TypeVar("_Match", bound=PeerMatch)


class _Asking(TypedDict, total=False):
    """What the overloads of a question have in common; defaults and meaning are those of the method."""

    hold: float | None
    timeout: float | None
    wait: bool


class PeerCaches:
    """The verbs of `Peers` that ask peers what they have cached."""

    __slots__ = ("_pool",)

    def __init__(self, pool: NetworkedPool) -> None:
        """Use `Pool.peers`."""
        self._pool = pool

    @overload
    def match(self, peer: str, tokens: TokenVector, namespace: str = "", **asking: Unpack[_Asking]) -> PeerMatch: ...
    @overload
    def match(
        self, peer: _Names, tokens: TokenVector, namespace: str = "", **asking: Unpack[_Asking]
    ) -> list[PeerMatch]: ...
    def match(
        self,
        peer: str | _Names,
        tokens: TokenVector,
        namespace: str = "",
        *,
        hold: float | None = None,
        timeout: float | None = None,
        wait: bool = True,
    ) -> PeerMatch | list[PeerMatch]:
        """Asks a peer, or several at once, for the longest prefix of a prompt that it has cached, and to keep it.

        Each peer pins what it finds, as `Pool.match` does here, so that a fetch of the addresses finds the blocks. It
        counts as a use of them there. A member of the pool's cluster is connected first if necessary, in another
        thread: this call waits for nothing but answers, and with ``wait=False`` not for these. Releases the GIL.

        Args:
            peer: Its name, as in `Pool.transfer`; or a list or tuple of names.
            tokens: As in `Pool.match`; at most 1,048,576.
            namespace: As in `Pool.match`.
            hold: Seconds for which a peer keeps the blocks pinned, from the call on; None: the setting ``timeout_s``. A
                peer keeps them no longer than its setting ``reserve_max_s``.
            timeout: Seconds until a question that was not answered fails; None: the setting ``timeout_s``.
            wait: Whether to wait for the answers.

        Returns:
            A PeerMatch, or with several peers a list of one for each, in their order: all have ended if it has waited.
            Close them, or use each in a ``with``.

        Raises:
            PeerLost, DeadlineExceeded, Busy, Unsupported: Of one peer that was waited for: see PeerMatch.wait. Of
                several, each PeerMatch raises its own.
            Fenced: This pool has lost its lease in the cluster.
            StateError: The pool has no peers yet: call listen or connect first.
            ArgumentError, ArgumentTypeError: A wrong value; nobody was asked.
        """
        pool = self._pool
        wait = flag_from(wait, "wait")

        def ask(name: str) -> PeerMatch:
            return pool._match_at(name, tokens, namespace, hold, timeout)

        return self._ask(ask, peer, wait)

    @overload
    def match_keys(
        self, peer: str, cache: _core.KeyedCache, keys: Keys, *, every: bool = False, **asking: Unpack[_Asking]
    ) -> PeerKeyMatch: ...
    @overload
    def match_keys(
        self, peer: _Names, cache: _core.KeyedCache, keys: Keys, *, every: bool = False, **asking: Unpack[_Asking]
    ) -> list[PeerKeyMatch]: ...
    def match_keys(
        self,
        peer: str | _Names,
        cache: _core.KeyedCache,
        keys: Keys,
        *,
        every: bool = False,
        hold: float | None = None,
        timeout: float | None = None,
        wait: bool = True,
    ) -> PeerKeyMatch | list[PeerKeyMatch]:
        """Asks a peer, or several at once, which keys its cache has stored, and to keep their blocks.

        As `match`, for keys in place of tokens.

        Args:
            peer: As in `match`.
            cache: A KeyedCache of this pool that has a name: the peer's cache of that name is asked. This one's keys
                have the same length.
            keys: As in `KeyedCache.match`; at most 8,192.
            every: Find all keys that are stored, also behind one that is not.
            hold: As in `match`.
            timeout: As in `match`.
            wait: As in `match`.

        Returns:
            A PeerKeyMatch, or with several peers a list of one for each, as in `match`.

        Raises:
            PeerLost, DeadlineExceeded, Busy, Unsupported: As in `match`.
            StateError: The peer has no open cache of this name. Or this pool has no peers yet.
            ArgumentError: The keys of the peer's cache have another length; or there are too many.
            Fenced: As in `match`.
            ArgumentError, ArgumentTypeError: A wrong value; or the cache has no name, or is of another pool. Nobody was
                asked.
        """
        pool = self._pool
        wait = flag_from(wait, "wait")

        def ask(name: str) -> PeerKeyMatch:
            return pool._match_keys_at(name, cache, keys, every, hold, timeout)

        return self._ask(ask, peer, wait)

    def fetch_keys(
        self,
        peer: str | _Names,
        cache: _core.KeyedCache,
        keys: Keys,
        *,
        timeout: float | None = None,
        ask_timeout: float | None = None,
    ) -> _core.KeyedMatch:
        """Brings what peers have stored under keys, and this pool's cache has not, into the cache.

        All peers are asked at once, and each block is fetched from one that has it, into DRAM. A peer that is lost,
        refuses or does not answer in time costs only its blocks. A block is stored whole or not at all. Ctrl-C cancels
        the fetches, and gives their blocks back. Releases the GIL.

        Args:
            peer: As in `match`.
            cache: As in `match_keys`.
            keys: As in `KeyedCache.match`. Peers are asked for at most 8,192 at a time.
            timeout: Seconds for all of it, however many parts it has; None: the setting ``timeout_s``. What has come by
                then is stored.
            ask_timeout: Seconds of these in which a peer must have answered a question; None: half of them. A peer that
                has not is not asked for the next parts.

        Returns:
            A KeyedMatch of all keys that are stored here now (``every=True``), wherever they came from: pinned until it
            is closed.

        Raises:
            OutOfBlocks: The cache has no room for all that the peers have. What had room was fetched.
            StateError, Fenced, ArgumentError, ArgumentTypeError: As in `match_keys`; nobody was asked.
        """
        pool = self._pool
        if not isinstance(cache, _core.KeyedCache):
            raise ArgumentTypeError(f"cache must be a KeyedCache, not {type(cache).__name__}")
        seconds = pool.settings.timeout_s if timeout is None else seconds_from(timeout, "timeout")
        ask = seconds / 2 if ask_timeout is None else min(seconds_from(ask_timeout, "ask_timeout"), seconds)
        return fetch_keys(pool, cache, [peer] if isinstance(peer, str) else names_of(peer), keys, seconds, ask)

    def _ask(self, ask: Callable[[str], _Match], peer: str | _Names, wait: bool) -> _Match | list[_Match]:
        """One match for one name, and a list of them for several."""
        if not isinstance(peer, str):
            return ask_each(ask, names_of(peer), wait)
        match = ask(peer)
        if wait:
            match.wait()
        return match
