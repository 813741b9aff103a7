"""The members of a cluster of many machines, kept by etcd: keys that end with their leases (ADR 0012)."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from typing import Any, Final

from kvpool.cluster.board import Board
from kvpool.cluster.directory import Directory, Entry, Unreachable, Witness
from kvpool.cluster.etcd_entry import EtcdEntry
from kvpool.cluster.etcd_keys import Holder, Ids, Keys, Value, absent, get, put, unchanged, values
from kvpool.cluster.etcd_view import EtcdView
from kvpool.cluster.gateway import AUTHENTICATE_S, Denied, Gateway, NoAnswer, Options, encode
from kvpool.cluster.keeper_process import KeeperProcess
from kvpool.cluster.place import Place
from kvpool.cluster.record import INSTANCE_MAX, Member
from kvpool.errors import ArgumentError, AuthError, DeadlineExceeded, StateError

__all__ = ["EtcdDirectory"]

_log = logging.getLogger("kvpool.cluster")

_RETRY_S: Final = 0.05
_ID_LEASE_S: Final = 3600  # an id stays taken for so long after its member was last heard of
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
        self.view.witness = self.witness
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
        body = {"success": [get(key) for key in keys]}
        found = [values(one.get("response_range", {})) for one in self.call("kv/txn", body)["responses"]]
        return [one[0] if one else None for one in found]

    def attest(self, witness: Witness) -> None:
        """See Directory."""
        self.witness = self.view.witness = witness

    def given_at_least(self, *more: int) -> int:
        """How many ids were given, as far as this process knows: by the counter, by the board, and by its links.

        The counter as it was last seen counts, besides those who are there: one that the others were told to be lost
        may live, cut off, with an id that nobody else remembers.
        """
        linked = [] if self.witness is None else self.witness.instances()
        return max([self.view.given, *more, *linked, *(member.instance for member in self.board.members())])

    def mend_ids(self, there: Value | None, birth: str, given: int) -> None:
        """Writes the counter of ids again, with what this process knows. Raises Unreachable."""
        ids = Ids(self.given_at_least(given), birth)
        changed = {"compare": [unchanged(self.keys.ids, there)], "success": [put(self.keys.ids, ids.to_bytes())]}
        self.call("kv/txn", changed)

    def grant(self) -> tuple[int, int, int]:
        """A new lease: its id, its seconds, and when it was asked for (CLOCK_MONOTONIC). Raises Unreachable."""
        asked_ns = time.monotonic_ns()
        answer = self.call("lease/grant", {"TTL": str(int(self.lease_s)), "ID": "0"})
        ttl_s = int(answer["TTL"])
        self.lease_s = float(ttl_s)
        self.view.note_lease(self.lease_s)
        return int(answer["ID"]), ttl_s, asked_ns

    def grant_for_id(self) -> int:
        """A new lease for the key of an id, which outlasts the member's own. Raises Unreachable."""
        return int(self.call("lease/grant", {"TTL": str(_ID_LEASE_S), "ID": "0"})["ID"])

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
        """One try, on leases of its own: nobody renews them yet. None: somebody was faster."""
        self._wait_for_name(record.name, until)
        ids = self._wait_for_ids(until)
        leases: list[int] = []
        entry: EtcdEntry | None = None
        try:
            granted = self.grant()
            leases.append(granted[0])
            leases.append(self.grant_for_id())
            entered = self._try_to_enter(record, ids, leases[0], leases[1])
            if entered is not None:
                held = Holder(record.epoch, entered[1])
                entry = EtcdEntry(self, entered[0], held, ids[0].birth, granted, leases[1], keeper)
            return entry
        finally:
            if entry is None:
                for lease in leases:
                    self.revoke(lease)

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
        """The counter of ids. Where there is none, members may be on their way back with the ids that they have.

        One that cannot be read is mended by any member that lives, within a lease; nobody else can know what it was.

        Raises:
            StateError: No member has mended it.
        """
        began = time.monotonic()
        while True:
            value = self.read(self.keys.ids)
            ids = Ids.read(value.content) if value is not None else None
            if value is not None and ids is not None:
                return ids, value
            if time.monotonic() >= began + self.lease_s:
                if value is not None:
                    raise StateError(
                        f"register: {self.keys.no_counter(value)}, and no member that lives has mended it: an id that "
                        f"somebody has might be given again. `kvpool cluster {self._url()} --repair-ids` writes one "
                        "above every id that etcd shows",
                        shown=max(self._shown_ids()[1], default=0),
                    )
                fresh = Ids.new(self.given_at_least(*self._shown_ids()[1])).to_bytes()
                self.call("kv/txn", {"compare": [absent(self.keys.ids)], "success": [put(self.keys.ids, fresh)]})
            elif time.monotonic() >= until:
                if value is not None:
                    why = f"{self.keys.no_counter(value)}; members that live are given a lease to mend it"
                else:
                    why = "etcd is new; members that live are given a lease to come back"
                raise DeadlineExceeded(f"register: {why}")
            time.sleep(_RETRY_S)

    def repair_ids(self) -> int:
        """See Cluster.repair_ids."""
        try:
            there = self.read(self.keys.ids)
            given = self.given_at_least(*self._shown_ids()[1])
            ids = Ids.read(there.content) if there is not None else None
            if ids is not None and ids.given >= given:
                return ids.given
            ids = Ids.new(given) if ids is None else ids.raised(given)
            changed = {"compare": [unchanged(self.keys.ids, there)], "success": [put(self.keys.ids, ids.to_bytes())]}
            if not self.call("kv/txn", changed).get("succeeded"):
                raise DeadlineExceeded("repair_ids: a member has changed the counter just now: look again")
        except Unreachable as error:
            raise DeadlineExceeded(f"repair_ids: etcd does not answer: {error}") from None
        return ids.given

    def _url(self) -> str:
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.options.hosts)
        return f"etcd{'s' if self.options.tls else ''}://{hosts}/{self._place.name}"

    def _shown_ids(self) -> tuple[set[int], list[int]]:
        """The ids that are taken, and how many were given, by all that etcd shows beside the counter."""
        body = {"success": [{"request_range": one} for one in (self.keys.all_instances(), self.keys.all_members())]}
        answers = self.call("kv/txn", body)["responses"]
        instances, members = (values(one.get("response_range", {})) for one in answers)
        taken = {self.keys.number_of(value.key) for value in instances} - {0}
        records = [record for record in map(self.keys.record, members) if record is not None]
        taken |= {record.instance for record in records}
        holders = [Holder.read(value.content) for value in instances]
        return taken, [*taken, *(holder.given for holder in holders if holder is not None)]

    def _try_to_enter(
        self, record: Member, ids: tuple[Ids, Value], lease: int, id_lease: int
    ) -> tuple[Member, int] | None:
        """The record, and how many ids were given with its own. None: somebody was faster, or the answer was lost."""
        counted = ids[1]
        taken, shown = self._shown_ids()
        known = self.given_at_least(*shown)
        found = ids[0].raised(known).next_free(taken | {member.instance for member in self.board.members()})
        if found is None:
            raise StateError(f"register: all {INSTANCE_MAX} ids are taken", needed=1)
        counter, number = found
        record = dataclasses.replace(record, instance=number)
        answer = self.call("kv/txn", {
            "compare": [
                absent(self.keys.member(record.name)), absent(self.keys.instance(number)),
                unchanged(self.keys.ids, counted),
            ],
            "success": [
                put(self.keys.member(record.name), record.to_bytes(), lease),
                put(self.keys.instance(number), Holder(record.epoch, counter.given).to_bytes(), id_lease),
                put(self.keys.ids, counter.to_bytes()),
            ],
        })  # fmt: skip
        if answer.get("succeeded"):
            if known > ids[0].given:
                _log.warning("the counter of ids in etcd was at %d, though %d were given", ids[0].given, known)
            return record, counter.given
        mine = self.read(self.keys.member(record.name))
        if mine is not None and mine.lease == lease:  # a try before was done, though its answer did not come
            there = self.keys.record(mine)
            return None if there is None else (there, counter.given)
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
