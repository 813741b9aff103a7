"""class Cluster: who is there."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, get_args

from kvpool.cluster.board import Board
from kvpool.cluster.callback import MemberCallback
from kvpool.cluster.directory import Directory
from kvpool.cluster.local import LocalDirectory
from kvpool.cluster.local_forget import forget_folder
from kvpool.cluster.place import Place, check_seconds, parse_place
from kvpool.cluster.record import Load, Member, MemberEvent, Role
from kvpool.cluster.registration import Registration
from kvpool.cluster.tender import Tender
from kvpool.errors import ArgumentError, ArgumentTypeError, ClosedError, DeadlineExceeded, ForkError, StateError
from kvpool.waiting.threads import begin_anew, busy

__all__ = ["Cluster"]

_REGISTER_S: Final = 10.0  # to register, beside the leases that it may have to wait for


class Cluster:
    """A cluster, as one process sees it; and one of its members, once a pool has been attached.

    Without a registration it is an observer: a router, or `kvpool cluster`. Any thread may call. Nothing that moves
    blocks waits for it: while the directory does not answer `members` keeps its last picture.

    After fork it belongs to the parent: in the child every call raises ForkError, and `close` does nothing.
    """

    def __init__(self, place: Place, directory: Directory, board: Board) -> None:
        """Use `Cluster.join`."""
        self._place = place
        self._directory = directory
        self._board = board
        self._process = os.getpid()
        self._tender = Tender(directory, board, place.heartbeat_s)
        self._closed = False
        # When the cluster is dropped, in whatever thread.
        self._end = weakref.finalize(self, _end, self._tender, self._process)
        self._end.atexit = False
        _clusters.add(self)
        _tenders.add(self._tender)

    @classmethod
    def join(
        cls,
        url: str,
        *,
        secret: str | None = None,
        lease: float = 3.0,
        heartbeat: float | None = None,
        timeout: float = 10.0,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        user: str | None = None,
        password: str | None = None,
    ) -> Cluster:
        """Begins to watch a cluster. In a local one this makes the folder and its secret, if there are none yet.

        Args:
            url: "local://NAME": the processes of this user on this machine; nothing has to be started. Or
                "etcd://HOST:PORT[,HOST:PORT...]/PREFIX"; "etcds://" over TLS.
            secret: What the pools of the cluster prove to each other that they know. A local cluster makes one, if
                none is given, and keeps it where only this user can read it. While no member lives one that is given
                replaces it.
            lease: Seconds after which a member that is silent is lost. With etcd at least what that allows, mostly two.
            heartbeat: Seconds between signs of life, and between loads; a third of the lease, unless given.
            timeout: Seconds to wait for the directory.
            tls_ca: File of the certificates that etcd's must be signed by; those of the system, unless given.
            tls_cert: File of our own certificate, if etcd wants one.
            tls_key: File of its key.
            user: Whom etcd knows us as.
            password: Of the user.

        Raises:
            ArgumentError: An address that is none, an option that does not go with it, a value out of range.
            ArgumentTypeError: A value of the wrong type.
            DeadlineExceeded: The directory does not answer.
            AuthError: etcd does not let us in; or the local cluster has another secret.
            StateError: The folder of a local cluster cannot be written, or other users may open it; or other users sit
                in every place where it could be. It says who sits where.
        """
        place = parse_place(
            url, lease=lease, heartbeat=heartbeat, secret=secret,
            tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, user=user, password=password,
        )  # fmt: skip
        until = time.monotonic() + check_seconds("timeout", timeout)
        directory = _directory_of(place)
        board = Board()
        try:
            directory.open(board, max(0.0, until - time.monotonic()))
        except BaseException:
            directory.close()
            raise
        return cls(place, directory, board)

    @property
    def secret(self) -> str:
        """What the pools of this cluster prove to each other that they know. "" with etcd, when none was given."""
        return self._directory.secret

    @property
    def lease_s(self) -> float:
        """Seconds after which a member that is silent is lost: what was asked for, or the shortest that etcd allows."""
        return self._directory.lease_s

    @property
    def heartbeat_s(self) -> float:
        """Seconds between signs of life, and between loads."""
        return self._place.heartbeat_s

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def registration(self) -> Registration | None:
        """The one that was made and has not left, or None."""
        registration = self._tender.registration
        return None if registration is None or registration.closed else registration

    def members(self) -> list[Member]:
        """Who is there, by name: a snapshot from memory, without a round trip. This process's own member, too.

        Raises:
            ClosedError: The cluster is closed.
            ForkError: Called in a forked child.
        """
        self._check_open()
        return self._board.members()

    def on_change(self, callback: Callable[[MemberEvent], object]) -> MemberCallback:
        """Calls back with each change: first "joined" for each that is there, then what happens, in order.

        Each callback has a thread of its own; one that raises is logged and called again with the next.

        Args:
            callback: Takes a MemberEvent.

        Raises:
            ArgumentTypeError: It cannot be called.
            ClosedError: The cluster is closed.
            ForkError: Called in a forked child.
        """
        if not callable(callback):
            raise ArgumentTypeError(f"on_change: {callback!r} cannot be called")
        with busy, self._tender.lock:
            self._check_open()
            handle = MemberCallback(self._board, callback)
            self._tender.callbacks.add(handle)
        return handle

    def wait_for(self, role: Role | None = None, n: int = 1, timeout: float = 30.0) -> list[Member]:
        """Waits until enough members are there that take new work.

        Args:
            role: "prefill" or "decode", which members of role "both" have, too; or "both"; None for any.
            n: How many.
            timeout: Seconds.

        Returns:
            All of them, by name: n or more. Members that drain do not count.

        Raises:
            DeadlineExceeded: There were not enough in time; it says who is there.
            ArgumentError: A value out of range.
            ArgumentTypeError: A value of the wrong type.
            ClosedError: The cluster is closed, or was while this waited.
            ForkError: Called in a forked child.
        """
        if role is not None and role not in get_args(Role):
            raise ArgumentError(f"wait_for: role is {role!r}; it must be one of {', '.join(get_args(Role))}")
        if isinstance(n, bool) or not isinstance(n, int):
            raise ArgumentTypeError(f"wait_for: n must be an int, not {type(n).__name__}")
        if n < 0:
            raise ArgumentError(f"wait_for: n is {n}", value=n)
        until = time.monotonic() + check_seconds("timeout", timeout)
        self._check_open()

        def fitting(members: list[Member]) -> list[Member]:
            return [one for one in members if (one.serves(role) if role else one.state == "up")]

        there = self._board.wait(lambda members: self._closed or len(fitting(members)) >= n, until)
        self._check_open()
        found = fitting(there)
        if len(found) < n:
            names = ", ".join(f"{one.name} ({one.role}, {one.state})" for one in there) or "nobody"
            raise DeadlineExceeded(
                f"wait_for: {len(found)} of {n} {role or 'members'} after {timeout} s; there are: {names}"
            )
        return found

    def register(
        self,
        *,
        name: str,
        role: Role,
        epoch: int,
        endpoints: Sequence[str] = (),
        layout: Mapping[str, Any] | None = None,
        model: str = "",
        parallel: Mapping[str, Any] | None = None,
        hbm_blocks: int = 0,
        dram_blocks: int = 0,
        load: Load | None = None,
        timeout: float | None = None,
    ) -> Registration:
        """Makes this process a member. For integrators: `Pool.attach` calls this.

        The id must be in the pool before it gives out an address, so register first, without endpoints, then listen,
        then `publish(endpoints=...)`.

        Args:
            name: What the member calls itself. One that a dead member had can be taken: at once on one machine,
                after its lease with etcd.
            role: "prefill", "decode" or "both".
            epoch: Of this incarnation, never used before with the name: 64 bits that the pool has made.
            endpoints: Where the pool is called, the best first.
            layout: Of its blocks, as JSON.
            model: Fingerprint of its model.
            parallel: Its parallel configuration, as JSON; None for one rank.
            hbm_blocks: Its capacity.
            dram_blocks: Its capacity.
            load: How busy it is at first.
            timeout: Seconds to wait for the directory, and for the name. By default 10 and two leases: one for a dead
                member to lose the name, one for those who may be on their way back to an etcd that knows nobody.

        Returns:
            The registration, with the id given. It is on this process's own board when this returns.

        Raises:
            StateError: A live member has the name, this cluster has a registration already, all ids are taken, or the
                counter of ids in etcd cannot be read and no member mends it (see `repair_ids`).
            DeadlineExceeded: The directory did not answer, or did not free the name of a dead member, in time. The
                first member of a new etcd waits for a lease, because others may be on their way back.
            AuthError: The folder of a local cluster was made anew with another secret: join again.
            Unsupported: The thread that beats, or the keeper of the lease, cannot be started.
            ArgumentError: A value that no member can have.
            ArgumentTypeError: A value of the wrong type.
            ClosedError: The cluster is closed.
            ForkError: Called in a forked child.
        """
        record = Member(
            name, 0, epoch, role, tuple(endpoints) if isinstance(endpoints, list) else endpoints,  # type: ignore[arg-type]
            {} if layout is None else layout, model, parallel, hbm_blocks, dram_blocks, load or Load(),
        )  # fmt: skip
        record.to_bytes()  # which checks its length
        timeout_s = _REGISTER_S + 2 * self.lease_s if timeout is None else check_seconds("timeout", timeout)
        until = time.monotonic() + timeout_s
        with busy, self._tender.lock:
            self._check_open()
            if self.registration is not None:
                raise StateError(f"register: this cluster has a member already, {self.registration.name}")
            if self._tender.registration is not None:
                self._tender.registration.leave_now()  # which it may have been told to do soon
            entry = self._directory.enter(record, max(0.0, until - time.monotonic()))
            self._board.show(entry.record)
            registration = Registration(entry, self._place.heartbeat_s, self._tender.wake)
            self._tender.registration = registration
            return registration

    @classmethod
    def forget(cls, url: str, *, timeout: float = 10.0) -> bool:
        """Removes what a local cluster without members has left on this machine: its folder, with secret and ids.

        Who only watches it makes an empty one again, as long as it does.

        Args:
            url: "local://NAME".
            timeout: Seconds to wait for those who are just joining or leaving.

        Returns:
            Whether there was anything.

        Raises:
            StateError: Members live, and keep what they have; or the folder is not ours, or cannot be removed.
            ArgumentError: No address of a local cluster. In etcd, what a member has goes with its lease.
            ArgumentTypeError: A value of the wrong type.
            DeadlineExceeded: Members come and go all the time.
        """
        place = parse_place(url, lease=3.0, heartbeat=None, secret=None)
        if place.kind != "local":
            raise ArgumentError(f"forget: {url} is no local cluster: in etcd, what a member has goes with its lease")
        return forget_folder(place.name, time.monotonic() + check_seconds("timeout", timeout))

    def repair_ids(self) -> int:
        """Writes the counter of ids in etcd again: above every id that etcd shows, and that this process knows of.

        Members that live do so by themselves when somebody has deleted it, overwritten it or set it back. This is for a
        cluster without any: `register` refuses there, because it cannot know which ids were given. A counter
        that is well stays as it is.

        Returns:
            How many ids were given, as the counter says now.

        Raises:
            DeadlineExceeded: etcd does not answer, or a member has just changed it.
            ArgumentError: A local cluster, whose ids the kernel keeps.
            ClosedError: The cluster is closed.
            ForkError: Called in a forked child.
        """
        self._check_open()
        return self._directory.repair_ids()

    def close(self) -> None:
        """Leaves, if there is a registration, and stops watching. Callbacks end. Idempotent; does not raise.

        When this returns it is done, and no callback runs any more. From a callback, of a pool or a cluster, or a
        finalizer that the garbage collector runs, it is done soon: those must not wait. A callback that runs for longer
        than a minute is not waited for.
        """
        if os.getpid() != self._process:
            return
        self._closed = True
        self._end.detach()
        self._tender.close()

    def __enter__(self) -> Cluster:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise ForkError("a cluster belongs to the process that joined it; join anew in the child")
        if self._closed:
            raise ClosedError("the cluster is closed")

    def _abandon(self) -> None:
        self._end.detach()
        registration = self._tender.registration
        if registration is not None:
            registration.abandon()
        self._directory.abandon()


_clusters: weakref.WeakSet[Cluster] = weakref.WeakSet()
_tenders: weakref.WeakSet[Tender] = weakref.WeakSet()  # also of clusters that are gone: their threads keep them


def _directory_of(place: Place) -> Directory:
    if place.kind == "local":
        return LocalDirectory(place)
    from kvpool.cluster.etcd import EtcdDirectory  # with HTTP and TLS, which a process may never need

    return EtcdDirectory(place)


def _end(tender: Tender, process: int) -> None:
    """Lets the tender of a cluster that was dropped end. Waits for nothing: the garbage collector may call it."""
    if os.getpid() == process:
        tender.stop()


def _close_all() -> None:
    """When the process ends without a word: the others are told of a leave, not of a loss."""
    begin_anew()
    tenders = list(_tenders)
    for tender in tenders:  # all at once: one that takes its time holds up none of the others
        tender.stop()
    for tender in tenders:
        tender.close()


def _abandon_all() -> None:
    """A forked child must not keep its parent's membership alive when the parent dies."""
    _tenders.clear()
    for cluster in list(_clusters):
        cluster._abandon()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
