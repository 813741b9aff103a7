"""The other members that a pool of a cluster knows: those that a verb may name, and those it has connected to."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Final

from kvpool.cluster import Member, MemberEvent
from kvpool.errors import Error
from kvpool.peers.info import PeerInfo
from kvpool.peers.peers import Peers
from kvpool.peers.service import NetworkedPool
from kvpool.waiting.threads import busy

__all__ = ["MemberTable"]

_CONNECTED_MAX: Final = 4096
_Entry = tuple[int, int, list[str]]  # instance, incarnation, endpoints


class MemberTable:
    """The members of the cluster's view, as passed to the pool's C++ half. Keeps no pool alive.

    Any thread may call. The lock comes after the view's lock, under which `enter` is called.
    """

    def __init__(self, pool: NetworkedPool, incarnation: int) -> None:
        """Starts empty. `incarnation` is the pool's, which is not listed."""
        self._pool = weakref.ref(pool)
        self._incarnation = incarnation
        self._lock = threading.Lock()  # so that the pool gets the lists in their order
        self._listed: dict[str, _Entry] = {}
        self._connected: dict[int, None] = {}  # incarnations of all former and present peers, the oldest first
        self._met: set[str] = set()  # names of former and present peers that have not left

    def names(self) -> set[str]:
        """The names of the listed members."""
        with busy, self._lock:
            return set(self._listed)

    def enter(self, event: MemberEvent) -> None:
        """Lists or removes a member, before `Cluster.members` does, so that a caller who sees a member can name it."""
        member = event.member
        if member.incarnation == self._incarnation:
            return
        with busy, self._lock:
            known = self._listed.get(member.name)
            if event.kind in ("left", "lost"):
                if known is None or known[1] != member.incarnation:
                    return
                del self._listed[member.name]
            elif known == _entry(member):
                return  # mostly a new load
            else:
                self._listed[member.name] = _entry(member)
            self._pass()

    def pass_again(self) -> None:
        """Passes the list to the pool again, so that an expelled member that is listed again may connect."""
        with busy, self._lock:
            self._pass()

    def remember_peers(self) -> None:
        """Notes the current peers. Called regularly, because peers may disconnect before the loss of a lease is known.

        Raises:
            ClosedError: The pool is closed.
        """
        pool = self._pool()
        if pool is None:
            return
        self._remember(Peers(pool).list())

    def _remember(self, peers: list[PeerInfo]) -> None:
        with busy, self._lock:
            # Not a member that has left and is still connected.
            self._met |= {peer.name for peer in peers} & self._listed.keys()
            self._connected.update(dict.fromkeys(peer.incarnation for peer in peers))
            while len(self._connected) > _CONNECTED_MAX:
                del self._connected[next(iter(self._connected))]

    # ---- PeerLinks: a directory asks before it gives a member up

    def is_connected(self, member: Member) -> bool:
        """Whether the pool has a link to this incarnation."""
        return any(peer.incarnation == member.incarnation for peer in self._peers())

    def has_disconnected(self, member: Member) -> bool:
        """Whether the pool had a link to it that has ended."""
        linked = self.is_connected(member)
        with busy, self._lock:
            return not linked and member.incarnation in self._connected

    def connected_instances(self) -> list[int]:
        """The ids of the connected members."""
        return [peer.instance for peer in self._peers()]

    def _peers(self) -> list[PeerInfo]:
        pool = self._pool()
        if pool is None:
            return []
        try:
            peers = Peers(pool).list()
        except Error:  # closed, or a parent process's
            return []
        self._remember(peers)
        return peers

    def forget(self, name: str) -> None:
        """Notes that a member has left, so the pool does not connect to it again."""
        with busy, self._lock:
            self._met.discard(name)

    def peers_to_reconnect(self) -> list[str]:
        """The listed members among its peers. A member that is not listed will connect to this pool by itself."""
        with busy, self._lock:
            return sorted(self._met & self._listed.keys())

    def _pass(self) -> None:
        """Passes the list to the pool. The caller holds the lock."""
        pool = self._pool()
        if pool is not None:
            with contextlib.suppress(Error):  # closed, or a parent process's
                pool._set_members([(name, *entry) for name, entry in self._listed.items()])


def _entry(member: Member) -> _Entry:
    return member.instance, member.incarnation, list(member.endpoints)
