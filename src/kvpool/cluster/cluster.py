"""class Cluster: the members of a cluster, and this process's membership."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, get_args

from kvpool.cluster.callback import MemberCallback
from kvpool.cluster.cluster_url import ClusterUrl, check_seconds, parse_cluster_url
from kvpool.cluster.directory import Directory
from kvpool.cluster.ends import end_with_process, stop
from kvpool.cluster.local.directory import LocalDirectory
from kvpool.cluster.local.forget import forget_folder
from kvpool.cluster.membership_loop import MembershipLoop
from kvpool.cluster.membership_view import MembershipView
from kvpool.cluster.record import Load, Member, MemberEvent, Role
from kvpool.cluster.registration import Registration
from kvpool.errors import ArgumentError, ArgumentTypeError, ClosedError, DeadlineExceeded, ForkError, StateError
from kvpool.waiting.threads import busy

__all__ = ["Cluster"]

# Defaults of timeouts.
_DIRECTORY_S: Final = 10.0  # for the directory; to register, in addition to leases that may have to end first
_WAIT_S: Final = 30.0  # for members


class Cluster:
    """A cluster as one process sees it, and this process's membership once a pool is attached.

    Without a registration the process is an observer, such as a router or `kvpool cluster`. Any thread may call.
    Transfers never wait for a cluster: while the directory does not answer, `members` returns the last known members.

    After fork the cluster belongs to the parent: in the child every call raises ForkError, and `close` does nothing.
    """

    def __init__(self, url: ClusterUrl, directory: Directory, view: MembershipView) -> None:
        """Use `Cluster.join`."""
        self._url = url
        self._directory = directory
        self._view = view
        self._process = os.getpid()
        self._loop = MembershipLoop(directory, view, url.heartbeat_s)
        self._closed = False
        # Runs when the cluster is dropped, in any thread.
        self._end = weakref.finalize(self, stop, self._loop, self._process)
        self._end.atexit = False
        end_with_process(self, self._loop)

    @classmethod
    def join(
        cls,
        url: str,
        *,
        lease: float = 3.0,
        heartbeat: float | None = None,
        timeout: float | None = None,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        user: str | None = None,
        password: str | None = None,
    ) -> Cluster:
        """Starts to watch a cluster. A local cluster that does not exist yet gets a folder and a secret.

        Args:
            url: "local://NAME": the processes of this user on this machine; no server is needed. Or
                "etcd://HOST:PORT[,HOST:PORT...]/PREFIX"; "etcds://" over TLS.
            lease: Seconds after which a silent member is lost. etcd has a minimum, usually two seconds.
            heartbeat: Seconds between heartbeats, and between published loads. Default: a third of the lease.
            timeout: Seconds to wait for the directory; None: 10.
            tls_ca: File of the CA certificates that etcd's certificate must be signed by. Default: the system's.
            tls_cert: File of the client certificate, if etcd requires one.
            tls_key: File of its key.
            user: User name for etcd.
            password: Password of that user.

        Raises:
            ArgumentError: An invalid URL, an option that does not apply to it, or a value out of range.
            ArgumentTypeError: A value of the wrong type.
            DeadlineExceeded: The directory does not answer.
            AuthError: etcd refuses access.
            StateError: The folder of a local cluster cannot be written, or other users may open it; or every path for
                it belongs to another user. The message names paths and users.
        """
        parsed = parse_cluster_url(
            url, lease=lease, heartbeat=heartbeat,
            tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, user=user, password=password,
        )  # fmt: skip
        until = time.monotonic() + _seconds(timeout, _DIRECTORY_S)
        directory = _directory_of(parsed)
        view = MembershipView()
        try:
            directory.open(view, max(0.0, until - time.monotonic()))
        except BaseException:
            directory.close()
            raise
        return cls(parsed, directory, view)

    @property
    def secret(self) -> str:
        """The secret with which the pools of a local cluster authenticate each other. "" with etcd, which has none.

        The first process that joins a local cluster generates it, and stores it where only this user can read it. Pools
        that attach take it. With etcd, give every pool the same setting ``secret``.
        """
        return self._directory.secret

    @property
    def lease_s(self) -> float:
        """Seconds after which a silent member is lost: as requested, or the shortest that etcd grants."""
        return self._directory.lease_s

    @property
    def heartbeat_s(self) -> float:
        """Seconds between heartbeats, and between published loads."""
        return self._url.heartbeat_s

    @property
    def closed(self) -> bool:
        """Whether the cluster was closed."""
        return self._closed

    @property
    def registration(self) -> Registration | None:
        """The current registration, or None before `register` and after it has left."""
        registration = self._loop.registration
        return None if registration is None or registration.closed else registration

    def members(self) -> list[Member]:
        """All members by name, including this process's: a snapshot from memory, without a round trip.

        Raises:
            ClosedError: The cluster is closed.
            ForkError: Called in a forked child.
        """
        self._check_open()
        return self._view.members()

    def on_change(self, callback: Callable[[MemberEvent], object]) -> MemberCallback:
        """Calls `callback` with "joined" for each current member, then with every change in order.

        Each callback has a separate thread. If it raises, the exception is logged and the next event follows.

        Args:
            callback: A function of a MemberEvent.

        Raises:
            ArgumentTypeError: The callback is not callable.
            ClosedError: The cluster is closed.
            ForkError: Called in a forked child.
        """
        if not callable(callback):
            raise ArgumentTypeError(f"on_change: {callback!r} is not callable")
        with busy, self._loop.lock:
            self._check_open()
            handle = MemberCallback(self._view, callback)
            self._loop.callbacks.add(handle)
        return handle

    def wait_for(self, role: Role | None = None, n: int = 1, timeout: float | None = None) -> list[Member]:
        """Waits until enough members take new work.

        Args:
            role: "prefill" or "decode", which also match members of role "both"; or "both"; None for any.
            n: How many members.
            timeout: Seconds; None: 30.

        Returns:
            All matching members by name, n or more. Draining members do not match.

        Raises:
            DeadlineExceeded: There were too few in time; the message lists the members.
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
        timeout_s = _seconds(timeout, _WAIT_S)
        until = time.monotonic() + timeout_s
        self._check_open()

        def matching(members: list[Member]) -> list[Member]:
            return [one for one in members if (one.serves(role) if role else one.state == "up")]

        members = self._view.wait(lambda members: self._closed or len(matching(members)) >= n, until)
        self._check_open()
        found = matching(members)
        if len(found) < n:
            names = ", ".join(f"{one.name} ({one.role}, {one.state})" for one in members) or "no members"
            raise DeadlineExceeded(
                f"wait_for: {len(found)} of {n} {role or 'members'} after {timeout_s:g} s; the cluster has: {names}"
            )
        return found

    def register(
        self,
        *,
        name: str,
        role: Role,
        incarnation: int,
        endpoints: Sequence[str] = (),
        layout: Mapping[str, Any] | None = None,
        model: str = "",
        parallel: Mapping[str, Any] | None = None,
        hbm_blocks: int = 0,
        dram_blocks: int = 0,
        load: Load | None = None,
        url: str = "",
        rank: int | None = None,
        events: str = "",
        events_replay: str = "",
        timeout: float | None = None,
    ) -> Registration:
        """Makes this process a member. For integrators: `Pool.attach` calls this.

        A pool needs its id before it gives out an address. So register without endpoints first, then listen, then
        `publish(endpoints=...)`.

        Args:
            name: The member's name. The name of a dead member is free at once on one machine, and after its lease with
                etcd.
            role: "prefill", "decode" or "both".
            incarnation: 64 random bits that the pool has drawn, different each time a process takes the name.
            endpoints: The addresses at which the pool listens, the best first.
            layout: The layout of its blocks, as JSON.
            model: Fingerprint of its model.
            parallel: Its parallel configuration, as JSON; None for one rank.
            hbm_blocks: Its capacity in HBM.
            dram_blocks: Its capacity in DRAM.
            load: How busy it is at first.
            url: Where its engine answers HTTP.
            rank: Its data-parallel rank there; None if the server has one rank.
            events: Where its engine publishes KV events.
            events_replay: Where it repeats them.
            timeout: Seconds to wait for the directory, and for the name. None: 10 plus two leases: one for a dead
                member to lose the name, one for members that may be coming back to an etcd that has lost its data.

        Returns:
            The registration, with the assigned id. `members` includes the member when this returns.

        Raises:
            StateError: A live member has the name, this cluster already has a registration, all ids are taken, or the
                counter of ids in etcd is unreadable and no member repairs it (see `repair_ids`).
            DeadlineExceeded: The directory did not answer, or did not free the name of a dead member, in time. The
                first member in a new etcd waits for a lease, because others may be coming back.
            AuthError: The folder of a local cluster was created again with another secret: join again.
            Unsupported: The heartbeat thread or the lease renewer cannot be started.
            ArgumentError: An invalid value.
            ArgumentTypeError: A value of the wrong type.
            ClosedError: The cluster is closed.
            ForkError: Called in a forked child.
        """
        record = Member(
            name, 0, incarnation, role, tuple(endpoints) if isinstance(endpoints, list) else endpoints,  # type: ignore[arg-type]
            {} if layout is None else layout, model, parallel, hbm_blocks, dram_blocks, load or Load(),
            url=url, rank=rank, events=events, events_replay=events_replay,
        )  # fmt: skip
        record.to_bytes()  # checks its length
        until = time.monotonic() + _seconds(timeout, _DIRECTORY_S + 2 * self.lease_s)
        with busy, self._loop.lock:
            self._check_open()
            if self.registration is not None:
                raise StateError(f"register: this cluster already has a registration, {self.registration.name}")
            if self._loop.registration is not None:
                self._loop.registration.leave_now()  # its leave may only be scheduled
            entry = self._directory.enter(record, max(0.0, until - time.monotonic()))
            self._view.show(entry.record)
            registration = Registration(entry, self._url.heartbeat_s, self._loop.wake)
            self._loop.registration = registration
            return registration

    @classmethod
    def forget(cls, url: str, *, timeout: float | None = None) -> bool:
        """Removes the folder of a local cluster without members, with its secret and its counter of ids.

        A process that still watches the cluster creates an empty folder again.

        Args:
            url: "local://NAME".
            timeout: Seconds to wait for processes that are joining or leaving; None: 10.

        Returns:
            Whether there was such a folder.

        Raises:
            StateError: Members live; or the folder belongs to another user, or cannot be removed.
            ArgumentError: Not the URL of a local cluster. In etcd, keys of a member expire with its lease.
            ArgumentTypeError: A value of the wrong type.
            DeadlineExceeded: Members kept joining and leaving.
        """
        parsed = parse_cluster_url(url, lease=3.0, heartbeat=None)
        if parsed.kind != "local":
            raise ArgumentError(
                f"forget: {url} is not a local cluster; in etcd, keys of a member expire with its lease"
            )
        return forget_folder(parsed.name, time.monotonic() + _seconds(timeout, _DIRECTORY_S))

    def repair_ids(self) -> int:
        """Writes the counter of ids in etcd again, above every id that etcd lists or this process knows.

        Live members do this by themselves if the counter is deleted, overwritten or set back. Call it for a
        cluster without members, where `register` fails because it cannot know which ids were given. A counter that is
        right stays as it is.

        Returns:
            The count of given ids in the counter.

        Raises:
            DeadlineExceeded: etcd does not answer, or a member changed the counter at the same time.
            ArgumentError: The cluster is local: the kernel keeps its ids.
            ClosedError: The cluster is closed.
            ForkError: Called in a forked child.
        """
        self._check_open()
        return self._directory.repair_ids()

    def close(self) -> None:
        """Leaves if there is a registration, stops watching, and ends callbacks. Idempotent; does not raise.

        When this returns no callback runs. It waits for a running callback for at most a minute. Called from a callback
        of a pool or a cluster, or from a finalizer that the garbage collector runs, it only schedules the close.
        """
        if os.getpid() != self._process:
            return
        self._closed = True
        self._end.detach()
        self._loop.close()

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
            raise ForkError("a cluster belongs to the process that joined it; join again in the child")
        if self._closed:
            raise ClosedError("the cluster is closed")

    def _abandon(self) -> None:
        """In a forked child: forgets what belongs to the parent."""
        self._end.detach()
        registration = self._loop.registration
        if registration is not None:
            registration.abandon()
        self._directory.abandon()


def _seconds(timeout: float | None, default_s: float) -> float:
    """The timeout of a call: None is its default, as everywhere in kvpool."""
    return default_s if timeout is None else check_seconds("timeout", timeout)


def _directory_of(url: ClusterUrl) -> Directory:
    if url.kind == "local":
        return LocalDirectory(url)
    from kvpool.cluster.etcd.directory import (
        EtcdDirectory,
    )  # lazily: it loads HTTP and TLS, which local clusters never need

    return EtcdDirectory(url)
