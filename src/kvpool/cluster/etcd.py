"""The members of a cluster of many machines, kept by etcd: keys that end with their leases (ADR 0012)."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from typing import Any, Final

from kvpool.cluster.board import Board
from kvpool.cluster.directory import Directory, Entry, Hold, Unreachable
from kvpool.cluster.etcd_keys import Ids, Keys, Value, absent, on_lease, put, unchanged, values
from kvpool.cluster.etcd_view import EtcdView
from kvpool.cluster.gateway import AUTHENTICATE_S, Denied, Gateway, NoAnswer, Options, encode
from kvpool.cluster.keeper_process import KeeperProcess
from kvpool.cluster.place import Place
from kvpool.cluster.record import INSTANCE_MAX, Member
from kvpool.errors import ArgumentError, AuthError, DeadlineExceeded, StateError

__all__ = ["EtcdDirectory"]

_log = logging.getLogger("kvpool.cluster")

_RETRY_S: Final = 0.05
_LEAVE_S: Final = 2.0
_EXPIRY_SLACK_S: Final = (
    2.0  # TTLs are told in whole seconds, and etcd looks for those that have run out twice a second
)


class EtcdDirectory(Directory):
    """Keys under a prefix, watched by a thread of its own (etcd_view.py)."""

    def __init__(self, place: Place) -> None:
        """Reads the files of TLS, and connects to nothing yet.

        Raises:
            ArgumentError: A file of TLS cannot be used.
        """
        self.options = Options(
            place.hosts, place.tls, place.tls_ca, place.tls_cert, place.tls_key, place.user, place.password
        )
        self.secret = place.secret or ""
        self.lease_s = float(max(1, math.ceil(place.lease_s)))  # etcd counts in seconds
        self.heartbeat_s = place.heartbeat_s
        self.keys = Keys(place.name)
        self._place = place
        self._entry: EtcdEntry | None = None
        self.board = Board()
        try:
            self.gateway = Gateway(self.options)
            self._view = EtcdView(self.options, self.keys, self.board, self.heartbeat_s, self.lease_s)
        except OSError as error:
            raise ArgumentError(f"cluster: the files of TLS cannot be used: {error}") from error

    def open(self, board: Board, timeout_s: float) -> None:
        """See Directory."""
        until = time.monotonic() + timeout_s
        self.board = board
        self._view = EtcdView(self.options, self.keys, board, self.heartbeat_s, self.lease_s)
        while True:
            try:
                self._view.read_all(max(0.001, until - time.monotonic()))
                break
            except Denied as error:
                raise AuthError(f"cluster: etcd does not let us in: {error}") from None
            except NoAnswer as error:
                if time.monotonic() + _RETRY_S >= until:
                    raise DeadlineExceeded(f"cluster: etcd does not answer: {error}") from None
            time.sleep(_RETRY_S)
        self._view.start()

    def call(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """Asks etcd, for an entry.

        Raises:
            Unreachable: It does not answer, or refuses.
        """
        try:
            if timeout_s is None:
                timeout_s = max(1.0, self.heartbeat_s)
            return self.gateway.call(path, body, timeout_s, authenticate_s=AUTHENTICATE_S)
        except (NoAnswer, Denied) as error:
            raise Unreachable(str(error)) from None

    def read(self, key: str) -> Value | None:
        """One key. Raises Unreachable."""
        found = values(self.call("kv/range", {"key": encode(key)}))
        return found[0] if found else None

    def grant(self) -> tuple[int, int, int]:
        """A new lease: its id, its seconds, and when it was asked for (CLOCK_MONOTONIC). Raises Unreachable."""
        asked_ns = time.monotonic_ns()
        answer = self.call("lease/grant", {"TTL": str(int(self.lease_s)), "ID": "0"})
        ttl_s = int(answer["TTL"])
        self.lease_s = float(ttl_s)
        self._view.lease_s = self.lease_s
        return int(answer["ID"]), ttl_s, asked_ns

    def revoke(self, lease: int) -> None:
        """Ends a lease; if etcd does not answer, it runs out."""
        with contextlib.suppress(Unreachable):
            self.call("lease/revoke", {"ID": str(lease)})

    def enter(self, record: Member, timeout_s: float) -> Entry:
        """See Directory."""
        until = time.monotonic() + timeout_s
        keeper = KeeperProcess(self.options, self.heartbeat_s, self.lease_s)
        try:
            keeper.wait_ready(until)
            self._entry = self._enter(record, keeper, until)
        except BaseException:
            keeper.close()
            raise
        return self._entry

    def _enter(self, record: Member, keeper: KeeperProcess, until: float) -> EtcdEntry:
        while True:
            try:
                entry = self._enter_once(record, keeper, until)
                if entry is not None:
                    return entry
                why = "others are changing its counter all the time"
            except Unreachable as error:
                why = f"etcd does not answer: {error}"
            if time.monotonic() >= until:
                raise DeadlineExceeded(f"register: {why}")
            time.sleep(_RETRY_S)

    def _enter_once(self, record: Member, keeper: KeeperProcess, until: float) -> EtcdEntry | None:
        """One try, on a lease of its own: nobody renews it yet, so it must not grow old. None: somebody was faster."""
        self._wait_for_name(record.name, until)
        ids = self._wait_for_ids(until)
        granted = self.grant()
        entry: EtcdEntry | None = None
        try:
            entered = self._try_to_enter(record, ids, granted[0])
            if entered is not None:
                entry = EtcdEntry(self, entered, ids[0].birth, granted, keeper)
            return entry
        finally:
            if entry is None:
                self.revoke(granted[0])

    def _wait_for_name(self, name: str, until: float) -> None:
        """Until nobody has the name. A member that lives is told by its lease, which outlasts what it had left."""
        lease, ends = 0, 0.0
        while (value := self.read(self.keys.member(name))) is not None:
            now = time.monotonic()
            if lease == 0 or value.lease != lease:
                left_s = float(self.call("lease/timetolive", {"ID": str(value.lease)}).get("TTL", 0))
                lease, ends = value.lease, now + left_s + _EXPIRY_SLACK_S
            elif now >= ends:
                raise StateError(f"register: a member that lives has the name {name}")
            if now >= until:
                raise DeadlineExceeded(
                    f"register: the name {name} is held; its lease may run out in {ends - now:.1f} s"
                )
            time.sleep(_RETRY_S)

    def _wait_for_ids(self, until: float) -> tuple[Ids, Value]:
        """The counter of ids. Where there is none, members may be on their way back with the ids that they have."""
        began = time.monotonic()
        while True:
            value = self.read(self.keys.ids)
            if value is not None:
                return Ids.read(value.content), value
            if time.monotonic() >= began + self.lease_s:
                known = max((member.instance for member in self.board.members()), default=0)
                self.call("kv/txn", {
                    "compare": [absent(self.keys.ids)], "success": [put(self.keys.ids, Ids.new(known).to_bytes())],
                })  # fmt: skip
            elif time.monotonic() >= until:
                raise DeadlineExceeded("register: etcd is new; members that live are given a lease to come back")
            time.sleep(_RETRY_S)

    def _try_to_enter(self, record: Member, ids: tuple[Ids, Value], lease: int) -> Member | None:
        """None: somebody was faster, or the answer was lost."""
        counter, counted = ids
        for step in range(INSTANCE_MAX):
            number = (counter.highest + step) % INSTANCE_MAX + 1
            if self.read(self.keys.instance(number)) is None:
                break
        else:
            raise StateError(f"register: all {INSTANCE_MAX} ids are taken", needed=1)
        record = dataclasses.replace(record, instance=number)
        answer = self.call("kv/txn", {
            "compare": [
                absent(self.keys.member(record.name)), absent(self.keys.instance(number)),
                unchanged(self.keys.ids, counted),
            ],
            "success": [
                put(self.keys.member(record.name), record.to_bytes(), lease),
                put(self.keys.instance(number), str(record.epoch).encode(), lease),
                put(self.keys.ids, dataclasses.replace(counter, highest=number).to_bytes()),
            ],
        })  # fmt: skip
        if answer.get("succeeded"):
            return record
        mine = self.read(self.keys.member(record.name))
        if mine is not None and mine.lease == lease:  # a try before was done, though its answer did not come
            return self.keys.record(mine)
        return None

    def descriptors(self) -> tuple[int, ...]:
        """See Directory."""
        entry = self._entry
        if entry is None or entry.over:
            return ()
        try:
            return (entry.keeper.descriptor(),)
        except ValueError:  # it is just being closed
            return ()

    def tend(self) -> None:
        """See Directory."""
        self._view.tend()

    def close(self) -> None:
        """See Directory."""
        self._view.close()
        self.gateway.close()

    def abandon(self) -> None:
        """See Directory: connections keep nothing alive."""


class EtcdEntry(Entry):
    """A record and an id on a lease, which a process of its own keeps."""

    def __init__(
        self,
        directory: EtcdDirectory,
        record: Member,
        birth: str,
        granted: tuple[int, int, int],
        keeper: KeeperProcess,
    ) -> None:
        """Starts to keep the lease, on which the record stands already."""
        self.record = record
        self.over = False
        self._directory = directory
        self._birth = birth
        self._lease = granted[0]
        self._gone = False
        self.keeper = keeper
        self._lapses = self.keeper.beacon.lapses
        self.keeper.keep(*granted, directory.keys.member(record.name))

    def valid(self) -> bool:
        """See Entry."""
        return time.monotonic_ns() < self.keeper.valid_until_ns

    def hold(self) -> Hold:
        """See Entry."""
        self._gone |= self.keeper.gone()
        if not self._gone:
            return "held"
        value = self._directory.read(self._directory.keys.ids)
        forgotten = value is None or Ids.read(value.content).birth != self._birth
        return "forgotten" if forgotten and self.keeper.beacon.lapses == self._lapses else "lost"

    def write(self, record: Member) -> None:
        """See Entry."""
        key = self._directory.keys.member(record.name)
        answer = self._directory.call("kv/txn", {
            "compare": [on_lease(key, self._lease)], "success": [put(key, record.to_bytes(), self._lease)],
        })  # fmt: skip
        if not answer.get("succeeded"):
            raise Unreachable("the record is not there any more")
        self.record = record

    def enter_again(self, record: Member, *, lost: bool) -> int | None:
        """See Entry."""
        directory, keys = self._directory, self._directory.keys
        self._gone |= self.keeper.gone()  # what it says must be read, or the tender never sleeps
        record = dataclasses.replace(record, term=self.record.term + lost)
        member, instance = keys.member(record.name), keys.instance(record.instance)
        there, holder, counted = directory.read(member), directory.read(instance), directory.read(keys.ids)
        other = keys.record(there) if there is not None else None
        taken = other is not None and other.epoch != record.epoch
        if taken or (holder is not None and holder.content != str(record.epoch).encode()):
            self.over = True
            self.keeper.close()
            return None
        known = max([record.instance, *(one.instance for one in directory.board.members())])
        ids = Ids.new(known) if counted is None else Ids.read(counted.content).raised(known)
        lease, ttl_s, asked_ns = directory.grant()
        try:
            answer = directory.call("kv/txn", {
                "compare": [unchanged(member, there), unchanged(instance, holder), unchanged(keys.ids, counted)],
                "success": [
                    put(member, record.to_bytes(), lease), put(instance, str(record.epoch).encode(), lease),
                    put(keys.ids, ids.to_bytes()),
                ],
            })  # fmt: skip
            if not answer.get("succeeded"):
                raise Unreachable("somebody else has changed it just now")
        except Unreachable:
            directory.revoke(lease)
            raise
        self.record, self._birth, self._lease, self._gone = record, ids.birth, lease, False
        self._lapses = self.keeper.beacon.lapses
        self.keeper.keep(lease, ttl_s, asked_ns, member)
        return record.term

    def leave(self, record: Member) -> None:
        """See Entry."""
        if self.over:
            return
        self.over = True
        key = self._directory.keys.member(record.name)
        content = dataclasses.replace(record, state="left").to_bytes()
        ours = [on_lease(key, self._lease)]
        try:
            for change in (put(key, content, self._lease), {"request_delete_range": {"key": encode(key)}}):
                self._directory.call("kv/txn", {"compare": ours, "success": [change]}, _LEAVE_S)
        except Unreachable as error:
            _log.warning("%s cannot say goodbye: %s", record.name, error)
        finally:
            self.keeper.close()  # which revokes the lease, and with it the id

    def abandon(self) -> None:
        """See Entry."""
        self.over = True
        self.keeper.abandon()
