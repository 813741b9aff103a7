"""What a pool in a cluster knows of the other members: whom a verb may name, and whom it has met."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Final

from kvpool.cluster import Member, MemberEvent
from kvpool.errors import Error
from kvpool.transfer import PeerInfo, PeerVerbs
from kvpool.waiting.threads import busy

__all__ = ["MemberTable"]

_LINKED_MAX: Final = 4096
_Entry = tuple[int, int, list[str]]  # instance, epoch, endpoints


class MemberTable:
    """The members that the cluster's board shows, as the pool's C++ half has them. Keeps no pool alive.

    Any thread may call anything. The lock is taken below that of the board, under which `enter` is called.
    """

    def __init__(self, pool: PeerVerbs, epoch: int) -> None:
        """Knows nobody. `epoch` is the pool's own, which is not listed."""
        self._pool = weakref.ref(pool)
        self._epoch = epoch
        self._lock = threading.Lock()  # pictures reach the pool in their order
        self._told: dict[str, _Entry] = {}
        self._linked: dict[int, None] = {}  # epochs of those with whom it was ever linked, the oldest first
        self._met: set[str] = set()  # of whom it has been a peer, and who has not left since

    def names(self) -> set[str]:
        """Who is listed."""
        with busy, self._lock:
            return set(self._told)

    def enter(self, event: MemberEvent) -> None:
        """Lists a member, or takes it out, before `Cluster.members` shows that: whoever sees it may name it."""
        member = event.member
        if member.epoch == self._epoch:
            return
        with busy, self._lock:
            known = self._told.get(member.name)
            if event.kind in ("left", "lost"):
                if known is None or known[1] != member.epoch:
                    return
                del self._told[member.name]
            elif known == _entry(member):
                return  # its load, mostly
            else:
                self._told[member.name] = _entry(member)
            self._tell()

    def tell_again(self) -> None:
        """Who was expelled is let in when it is listed again."""
        with busy, self._lock:
            self._tell()

    def remember_peers(self) -> None:
        """While the pool is well: when it hears that its lease is lost its peers may have parted from it already.

        Raises:
            ClosedError: The pool is closed.
        """
        pool = self._pool()
        if pool is None:
            return
        self._remember(pool.peers())

    def _remember(self, peers: list[PeerInfo]) -> None:
        with busy, self._lock:
            # None that has left, although its connection is still there.
            self._met |= {peer.name for peer in peers} & self._told.keys()
            self._linked.update(dict.fromkeys(peer.epoch for peer in peers))
            while len(self._linked) > _LINKED_MAX:
                del self._linked[next(iter(self._linked))]

    # ---- what a directory asks before it gives a member up (Witness)

    def is_linked(self, member: Member) -> bool:
        """Whether there is a link to this incarnation now."""
        return any(peer.epoch == member.epoch for peer in self._peers())

    def has_parted(self, member: Member) -> bool:
        """Whether there was a link to it, and is none now."""
        linked = self.is_linked(member)
        with busy, self._lock:
            return not linked and member.epoch in self._linked

    def instances(self) -> list[int]:
        """The ids of those that are linked now."""
        return [peer.instance for peer in self._peers()]

    def _peers(self) -> list[PeerInfo]:
        pool = self._pool()
        if pool is None:
            return []
        try:
            peers = pool.peers()
        except Error:  # closed, or a parent process's
            return []
        self._remember(peers)
        return peers

    def forget(self, name: str) -> None:
        """It has left, and is not met again."""
        with busy, self._lock:
            self._met.discard(name)

    def met(self) -> list[str]:
        """Whom the pool has met, of those that are listed. Another one that is away meets this pool by itself."""
        with busy, self._lock:
            return sorted(self._met & self._told.keys())

    def _tell(self) -> None:
        """The caller has the lock."""
        pool = self._pool()
        if pool is not None:
            with contextlib.suppress(Error):  # closed, or a parent process's
                pool._set_members([(name, *entry) for name, entry in self._told.items()])


def _entry(member: Member) -> _Entry:
    return member.instance, member.epoch, list(member.endpoints)
