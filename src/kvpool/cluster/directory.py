"""The interface of a directory of members. Files implement it on one machine (local/), keys in etcd on many (etcd/).

One thread calls a directory, the `MembershipLoop` of a `Cluster`, except for `enter`, `valid` and methods that say
otherwise. The directory writes what it finds into a `MembershipView`. The conformance suite (tests/python/cluster) runs
over every kind of directory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, Protocol

from kvpool.cluster.membership_view import MembershipView
from kvpool.cluster.record import Member
from kvpool.errors import ArgumentError

__all__ = ["Directory", "Entry", "LeaseState", "PeerLinks", "Unreachable"]

LeaseState = Literal["held", "forgotten", "lost"]


class Unreachable(Exception):
    """The directory does not answer. It may have carried out the request all the same; the caller tries again."""


class PeerLinks(Protocol):
    """What an attached pool knows of members by its own links. Any thread; no wait; takes no lock of the view."""

    def is_connected(self, member: Member) -> bool:
        """Whether the pool has a link to this incarnation: then it lives, whatever the directory says."""

    def has_disconnected(self, member: Member) -> bool:
        """Whether the pool had a link to it that has ended: then the pool has taken back the blocks it had reserved."""

    def connected_instances(self) -> list[int]:
        """The ids of the connected members."""


class Entry(ABC):
    """One member in a directory: its record, its id, and a lease that ends with its process.

    Invariant: while `check_lease()` would return "held", no other incarnation has the name or the id.
    """

    record: Member
    """The record as it was entered, with the assigned id and the term."""

    @abstractmethod
    def valid(self) -> bool:
        """Whether this process knows, without asking anybody, that the lease is held. Any thread; no wait."""

    @abstractmethod
    def lapsed(self) -> bool:
        """Whether the lease is lost by this machine's clock alone. Any thread; no wait.

        True if nothing on this machine has renewed it for longer than it lasts. `check_lease()` then returns "lost",
        until the member is entered again.
        """

    @abstractmethod
    def dropped(self, why: str) -> None:
        """Notes that a peer has dropped this member: `check_lease()` returns "lost" next. Any thread; no wait."""

    def renewals_failed(self) -> int:
        """How many renewals the directory did not answer. Any thread; no wait."""
        return 0

    @abstractmethod
    def check_lease(self) -> LeaseState:
        """Checks the lease.

        Returns:
            "held"; "lost": another incarnation has the name or the id, peers have dropped this member, or this process
            was stopped for longer than its lease; "forgotten": the directory does not list the member, but nobody has
            taken anything from it, so it only has to be entered again.

        Raises:
            Unreachable: The directory does not answer, so the state is unknown.
        """

    @abstractmethod
    def write(self, record: Member) -> None:
        """Replaces the record; name, id, incarnation and term stay.

        Raises:
            Unreachable: The record may or may not be written.
        """

    @abstractmethod
    def enter_again(self, record: Member, *, lost: bool) -> int | None:
        """Takes name and id back, in a new term if the lease was lost.

        Returns:
            The term. None if another incarnation has the name or the id: then the entry is void.

        Raises:
            Unreachable: The outcome is unknown; call again.
        """

    @abstractmethod
    def leave(self, record: Member) -> None:
        """Removes the member; the others see it as "left". Idempotent; never raises."""

    @abstractmethod
    def abandon(self) -> None:
        """In a forked child: releases what would keep the parent's lease alive, and touches nothing else."""


class Directory(ABC):
    """The list of the members of a cluster, outside this process."""

    secret: str
    """The secret with which members authenticate each other; "" if the directory has none."""

    peer_links: PeerLinks | None = None
    """The links of the attached pool. A directory that always answers needs none."""

    @property
    @abstractmethod
    def lease_s(self) -> float:
        """Seconds of a member's lease, which can be longer than was asked for."""

    def use_links(self, links: PeerLinks) -> None:
        """From now on the directory also asks these links before it gives a member up. Any thread."""
        self.peer_links = links

    def repair_ids(self) -> int:
        """See Cluster.repair_ids."""
        raise ArgumentError("repair_ids: the kernel keeps the ids of a local cluster, so they need no repair")

    @abstractmethod
    def open(self, view: MembershipView, timeout_s: float) -> None:
        """Starts to watch the members. When this returns the view has the current ones.

        Raises:
            DeadlineExceeded: The directory does not answer.
            AuthError: The directory refuses access.
        """

    @abstractmethod
    def enter(self, record: Member, timeout_s: float) -> Entry:
        """Enters a new member and gives it an id. Any thread.

        Raises:
            StateError: A live member has the name.
            DeadlineExceeded: The directory does not answer, or the name of a dead member was not free in time.
        """

    @abstractmethod
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that become readable when `update` has something to do."""

    @abstractmethod
    def update(self) -> None:
        """Brings the view up to date. Called at least once a heartbeat. Never raises."""

    @abstractmethod
    def close(self) -> None:
        """Stops watching. Idempotent."""

    @abstractmethod
    def abandon(self) -> None:
        """In a forked child, like `Entry.abandon`."""
