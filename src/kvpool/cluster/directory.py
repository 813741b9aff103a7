"""What a directory of members must do, whichever keeps it: the files of one machine, or etcd.

A directory is asked by one thread, the tender of a `Cluster` (tender.py), but for `enter`, `valid` and what says
otherwise. It shows what it sees on a `Board`. The conformance suite (tests/python/cluster) runs over every kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, Protocol

from kvpool.cluster.board import Board
from kvpool.cluster.record import Member
from kvpool.errors import ArgumentError

__all__ = ["Directory", "Entry", "Hold", "Unreachable", "Witness"]

Hold = Literal["held", "forgotten", "lost"]


class Unreachable(Exception):
    """The directory does not answer. What was asked may have been done all the same; it will be asked again."""


class Witness(Protocol):
    """What the direct links of an attached pool show of other members. Any thread; no wait; no lock of the board's."""

    def is_linked(self, member: Member) -> bool:
        """Whether a link to this incarnation is there now: it lives, whatever the directory says."""

    def has_parted(self, member: Member) -> bool:
        """Whether there was a link to it, which has ended: what it had here was taken back."""

    def instances(self) -> list[int]:
        """The ids of those that are linked now."""


class Entry(ABC):
    """What one member has in a directory: its record, its id, and a lease that ends with its process.

    Invariant: while `hold()` would say "held", no other incarnation has the name or the id.
    """

    record: Member
    """As it was entered, with the id given and the term."""

    @abstractmethod
    def valid(self) -> bool:
        """Whether the lease is certainly still held, as far as this process can tell by itself. Any thread; no wait."""

    @abstractmethod
    def lapsed(self) -> bool:
        """Whether the lease is lost by this machine's clock alone. Any thread; no wait.

        Nothing here has kept it alive for longer than it lasts. `hold()` says "lost" then, until it is entered again.
        """

    @abstractmethod
    def dropped(self, why: str) -> None:
        """A peer has refused this member, which it has dropped: `hold()` says "lost" next. Any thread; no wait."""

    def renewals_failed(self) -> int:
        """How many renewals the directory has not answered. Any thread; no wait."""
        return 0

    @abstractmethod
    def hold(self) -> Hold:
        """What has become of the lease.

        "lost": another incarnation has the name or the id, peers have dropped this one, or this process was stopped for
        longer than its lease. "forgotten": the directory does not list it, and nobody has taken anything from it; the
        member has only to be entered again.

        Raises:
            Unreachable: The directory does not answer, so nobody knows.
        """

    @abstractmethod
    def write(self, record: Member) -> None:
        """Replaces the record. The name, id, epoch and term are the entry's own.

        Raises:
            Unreachable: It may or may not be written.
        """

    @abstractmethod
    def enter_again(self, record: Member, *, lost: bool) -> int | None:
        """Takes name and id back, in a new term if the lease was lost.

        Returns:
            The term; or None: another incarnation has the name or the id, and the entry is void.

        Raises:
            Unreachable: Nobody knows; ask again.
        """

    @abstractmethod
    def leave(self, record: Member) -> None:
        """Takes the member out, which others are told as "left". Idempotent; never raises."""

    @abstractmethod
    def abandon(self) -> None:
        """Called in a forked child: lets go of what would keep the parent's lease alive, and touches nothing else."""


class Directory(ABC):
    """A place where members are written down."""

    secret: str
    """What the members prove to each other that they know; "" when the directory has none."""

    witness: Witness | None = None
    """Of the pool that is attached. A directory that cannot be silent needs none."""

    lease_s: float
    """As it is, which can be longer than was asked for."""

    def attest(self, witness: Witness) -> None:
        """From now on the links of a pool are asked, too, before a member is given up. Any thread."""
        self.witness = witness

    def repair_ids(self) -> int:
        """See Cluster.repair_ids."""
        raise ArgumentError("repair_ids: the kernel keeps the ids of a local cluster; there is nothing to repair")

    @abstractmethod
    def open(self, board: Board, timeout_s: float) -> None:
        """Begins to watch; when this returns the board shows who is there.

        Raises:
            DeadlineExceeded: It does not answer.
            AuthError: It does not let us in, or the cluster has another secret.
        """

    @abstractmethod
    def enter(self, record: Member, timeout_s: float) -> Entry:
        """Writes a new member down and gives it an id. Any thread.

        Raises:
            StateError: A live member has the name.
            DeadlineExceeded: It does not answer, or the name of a member that died was not free in time.
        """

    @abstractmethod
    def descriptors(self) -> tuple[int, ...]:
        """Readable when there is something to `tend`."""

    @abstractmethod
    def tend(self) -> None:
        """Looks at what has changed, and shows it on the board. At least every heartbeat. Never raises."""

    @abstractmethod
    def close(self) -> None:
        """Ends the watch. Idempotent."""

    @abstractmethod
    def abandon(self) -> None:
        """Called in a forked child, like `Entry.abandon`."""
