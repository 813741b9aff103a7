"""The members of a cluster of many machines, kept by etcd: keys that end with their leases (ADR 0012)."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from typing import Any, Final

from kvpool.cluster.board import Board
from kvpool.cluster.directory import Directory, Entry, Unreachable
from kvpool.cluster.etcd_entry import EtcdEntry
from kvpool.cluster.etcd_keys import Ids, Keys, Value, absent, put, unchanged, values
from kvpool.cluster.etcd_view import EtcdView
from kvpool.cluster.gateway import AUTHENTICATE_S, Denied, Gateway, NoAnswer, Options, encode
from kvpool.cluster.keeper_process import KeeperProcess
from kvpool.cluster.place import Place
from kvpool.cluster.record import INSTANCE_MAX, Member
from kvpool.errors import ArgumentError, AuthError, DeadlineExceeded, StateError

__all__ = ["EtcdDirectory"]

_RETRY_S: Final = 0.05
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
            self.view = EtcdView(self.options, self.keys, self.board, self.heartbeat_s, self.lease_s)
        except OSError as error:
            raise ArgumentError(f"cluster: the files of TLS cannot be used: {error}") from error

    def open(self, board: Board, timeout_s: float) -> None:
        """See Directory."""
        until = time.monotonic() + timeout_s
        self.board = board
        self.view = EtcdView(self.options, self.keys, board, self.heartbeat_s, self.lease_s)
        while True:
            try:
                self.view.read_all(max(0.001, until - time.monotonic()))
                break
            except Denied as error:
                raise AuthError(f"cluster: etcd does not let us in: {error}") from None
            except NoAnswer as error:
                if time.monotonic() + _RETRY_S >= until:
                    raise DeadlineExceeded(f"cluster: etcd does not answer: {error}") from None
            time.sleep(_RETRY_S)
        self.view.start()

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

    def read_at_once(self, *keys: str) -> list[Value | None]:
        """Several keys, as they stood at one moment. Raises Unreachable."""
        body = {"success": [{"request_range": {"key": encode(key)}} for key in keys]}
        found = [values(one.get("response_range", {})) for one in self.call("kv/txn", body)["responses"]]
        return [one[0] if one else None for one in found]

    def highest_known(self, *more: int) -> int:
        """The highest id that this process knows to have been given.

        The counter as it was last seen counts, besides those who are there: one that the others were told to be lost
        may live, cut off, with an id that nobody else remembers.
        """
        return max([self.view.highest, *more, *(member.instance for member in self.board.members())])

    def grant(self) -> tuple[int, int, int]:
        """A new lease: its id, its seconds, and when it was asked for (CLOCK_MONOTONIC). Raises Unreachable."""
        asked_ns = time.monotonic_ns()
        answer = self.call("lease/grant", {"TTL": str(int(self.lease_s)), "ID": "0"})
        ttl_s = int(answer["TTL"])
        self.lease_s = float(ttl_s)
        self.view.lease_s = self.lease_s
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
                fresh = Ids.new(self.highest_known()).to_bytes()
                self.call("kv/txn", {"compare": [absent(self.keys.ids)], "success": [put(self.keys.ids, fresh)]})
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
        entry, notice = self._entry, self.view.descriptor()
        found = () if notice is None else (notice,)
        if entry is None or entry.over:
            return found
        try:
            return (*found, entry.keeper.descriptor())
        except ValueError:  # it is just being closed
            return found

    def tend(self) -> None:
        """See Directory."""
        self.view.take_notice()
        self.view.tend()

    def close(self) -> None:
        """See Directory."""
        self.view.close()
        self.gateway.close()

    def abandon(self) -> None:
        """See Directory: connections keep nothing alive."""
