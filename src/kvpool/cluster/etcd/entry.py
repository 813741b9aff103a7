"""What one member has in etcd: a record and an id, on leases (ADR 0012, 0020, 0022)."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Final

from kvpool.cluster.directory import Entry, LeaseState, Unreachable
from kvpool.cluster.etcd.id_counter import IdCounter
from kvpool.cluster.etcd.keys import Holder, Ids, Value, absent, delete, on_lease, put, unchanged
from kvpool.cluster.etcd.renewer_process import RenewerProcess
from kvpool.cluster.etcd.store import EtcdStore, GrantedLease
from kvpool.cluster.etcd.watcher import EtcdWatcher
from kvpool.cluster.record import Member

__all__ = ["EtcdEntry"]

_log = logging.getLogger("kvpool.cluster")

_LEAVE_S: Final = 2.0
_RENEW_ID_S: Final = 600.0  # of the hour that an id is held for


class EtcdEntry(Entry):
    """A record and an id on leases. The lease renewer, another process, renews the record's; this process the id's.

    A renewed lease says nothing about the keys on it, which anybody with write access may delete. So the entry reads
    its keys whenever the watch reports one of them, when a write finds the record gone, and once a lease. It puts back
    missing keys without a loss, unless etcd says that a peer has dropped this member (ADR 0022).
    """

    def __init__(
        self,
        store: EtcdStore,
        watcher: EtcdWatcher,
        counter: IdCounter,
        renewer: RenewerProcess,
        record: Member,
        holder: Holder,
        birth: str,
        granted: GrantedLease,
        id_lease: int,
    ) -> None:
        """Starts to renew the leases, which record and id are already attached to."""
        self.record = record
        self.renewer = renewer
        self.ended = False
        self._store = store
        self._watcher = watcher
        self._counter = counter
        self._holder = holder
        self._lapsed = False
        self._dropped = ""  # why
        self._renew_id_at = 0.0
        self._start_leases(birth, granted, id_lease)

    def _start_leases(self, birth: str, granted: GrantedLease, id_lease: int) -> None:
        """Record and id are attached to these leases from now on."""
        member = self._store.keys.member(self.record.name)
        self._birth = birth
        self._lease, self._id_lease = granted.id, id_lease
        self._gone = False
        self._lapses = self.renewer.heartbeat.lapses
        self._check_at = time.monotonic() + self._store.lease_s
        self._watcher.set_lease(self._store.lease_s)
        self._watcher.doubt = False  # about the keys of before
        self._watcher.own = self._own_keys(granted.id, id_lease)
        self.renewer.keep(granted.id, granted.ttl_s, granted.asked_ns, member, id_lease)

    def _own_keys(self, lease: int, id_lease: int) -> dict[str, int]:
        keys, record = self._store.keys, self.record
        member, instance = keys.member(record.name), keys.instance(record.instance)
        return {member: lease, instance: id_lease, keys.dropped(record.incarnation): -1}

    def valid(self) -> bool:
        """See Entry."""
        return time.monotonic_ns() < self.renewer.valid_until_ns and not self._watcher.doubt

    def lapsed(self) -> bool:
        """See Entry: the renewer has been silent for longer than the lease, and has not renewed it before."""
        if not self._lapsed and time.monotonic_ns() >= self.renewer.valid_until_ns:
            self._lapsed = not self.ended and self.renewer.silent_s() > self._store.lease_s
        return self._lapsed

    def dropped(self, why: str) -> None:
        """See Entry."""
        self._dropped = why

    def renewals_failed(self) -> int:
        """See Entry."""
        return self.renewer.failed

    def check_lease(self) -> LeaseState:
        """See Entry."""
        if self.lapsed():
            return "lost"
        if self._dropped:
            self._warn(self._dropped)
            return "lost"
        self._gone |= self.renewer.gone()
        if self._gone or self._watcher.doubt or time.monotonic() >= self._check_at:
            return self._check_keys()
        return "held"

    def _check_keys(self) -> LeaseState:
        """Whether record and id are still on their leases, and no one has taken anything from this member."""
        store, keys, watcher = self._store, self._store.keys, self._watcher
        doubted, watcher.doubt = watcher.doubt, False  # changes during this check are checked next time
        try:
            member, instance, ids, dropped = store.read_at_once(
                keys.member(self.record.name), keys.instance(self.record.instance), keys.ids,
                keys.dropped(self.record.incarnation),
            )  # fmt: skip
            listed = member is not None and member.lease == self._lease and not self._gone
            self._renew_id()
            if listed:
                self._repair_counter(ids)
        except Unreachable:
            watcher.doubt |= doubted
            raise
        self._check_at = time.monotonic() + store.lease_s
        if dropped is not None:
            self._warn("a peer had dropped it: its record had expired, and the link to it had ended")
        elif listed and instance is not None and instance.lease == self._id_lease:
            return "held"
        watcher.doubt = True  # until both are written again
        if dropped is not None or self._is_taken(member, instance):
            return "lost"
        if not listed and self.renewer.heartbeat.lapses != self._lapses:
            self._warn("it was stopped for longer than its lease")
            return "lost"
        what = "id" if listed else "record"
        self._warn(f"its {what} is missing in etcd, or not on its lease; it is put back")
        return "forgotten"

    def _is_taken(self, member: Value | None, instance: Value | None) -> bool:
        """Whether another incarnation has the name or the id."""
        other = None if member is None else self._store.keys.record(member)
        holder = None if instance is None else Holder.read(instance.content)
        has_name = other is not None and other.incarnation != self.record.incarnation
        has_id = instance is not None and (holder is None or holder.incarnation != self.record.incarnation)
        return has_name or has_id

    def _renew_id(self) -> None:
        """Renews the lease of the id. If that lease has expired the key is gone, which the check of the keys finds."""
        if time.monotonic() >= self._renew_id_at:
            self._store.call("lease/keepalive", {"ID": str(self._id_lease)})
            self._renew_id_at = time.monotonic() + _RENEW_ID_S

    def _repair_counter(self, found: Value | None) -> None:
        """Writes back a counter of ids that was deleted, overwritten or set back: else ids would be given twice."""
        ids = None if found is None else Ids.read(found.content)
        if ids is not None and ids.given >= self._counter.given_at_least(self._holder.given):
            return
        if found is None:
            why = "somebody has deleted the counter of ids in etcd"
        elif ids is None:
            why = self._store.keys.no_counter(found)
        else:
            why = f"somebody has set back the counter of ids in etcd, to {ids.given}"
        self._counter.write_back(found, self._birth if ids is None else ids.birth, self._holder.given)
        self._warn(f"{why}: it is put back")

    def _warn(self, why: str) -> None:
        _log.warning("%s: %s", self.record.name, why, extra=self.record._log_fields(why))

    def write(self, record: Member) -> None:
        """See Entry."""
        key = self._store.keys.member(record.name)
        answer = self._store.call("kv/txn", {
            "compare": [on_lease(key, self._lease)], "success": [put(key, record.to_bytes(), self._lease)],
        })  # fmt: skip
        if not answer.get("succeeded"):
            self._watcher.doubt = True
            raise Unreachable("the record is gone")
        self.record = record

    def enter_again(self, record: Member, *, lost: bool) -> int | None:
        """See Entry."""
        store, keys = self._store, self._store.keys
        self._gone |= self.renewer.gone()  # reads what the renewer says; unread, it would keep the loop awake
        record = dataclasses.replace(record, term=self.record.term + lost)
        member, instance, counted = store.read_at_once(
            keys.member(record.name), keys.instance(record.instance), keys.ids
        )
        if self._is_taken(member, instance):
            self.ended = True
            self._watcher.own = {}
            self.renewer.close()
            return None
        known = self._counter.given_at_least(self._holder.given)
        counter = None if counted is None else Ids.read(counted.content)
        ids = Ids.new(known) if counter is None else counter.raised(known)
        granted, id_lease = self._write_on_new_lease(record, member, instance, counted, ids, lost=lost)
        self.record = record
        self._start_leases(ids.birth, granted, id_lease)
        if lost:  # otherwise a pool may have just fenced itself: then "lost" and "regained" must follow
            self._lapsed = False
            self._dropped = ""
        return record.term

    def _write_on_new_lease(
        self,
        record: Member,
        member: Value | None,
        instance: Value | None,
        counted: Value | None,
        ids: Ids,
        *,
        lost: bool,
    ) -> tuple[GrantedLease, int]:
        """Writes record, id and counter, if all are as they were read. Returns the leases of the record and the id."""
        store, keys, watcher = self._store, self._store.keys, self._watcher
        name_key, id_key = keys.member(record.name), keys.instance(record.instance)
        dropped = keys.dropped(record.incarnation)
        has_id = instance is not None and instance.lease == self._id_lease
        granted = store.grant()
        before, fresh = watcher.own, [granted.id]
        try:
            id_lease = self._id_lease if has_id else store.grant_for_id()
            fresh += [] if has_id else [id_lease]
            watcher.own = self._own_keys(granted.id, id_lease)
            answer = store.call("kv/txn", {
                "compare": [
                    unchanged(name_key, member), unchanged(id_key, instance), unchanged(keys.ids, counted),
                    *([] if lost else [absent(dropped)]),
                ],
                "success": [
                    put(name_key, record.to_bytes(), granted.id),
                    put(id_key, self._holder.to_bytes(), id_lease),
                    put(keys.ids, ids.to_bytes()),
                    delete(dropped),
                ],
            })  # fmt: skip
            if not answer.get("succeeded"):
                raise Unreachable("another process has just changed it, or a peer has dropped this member")
        except Unreachable:
            watcher.own = before
            watcher.doubt = True
            for lease in fresh:
                store.revoke(lease)
            raise
        return granted, id_lease

    def leave(self, record: Member) -> None:
        """See Entry."""
        if self.ended:
            return
        self.ended = True
        key = self._store.keys.member(record.name)
        content = dataclasses.replace(record, state="left").to_bytes()
        ours = [on_lease(key, self._lease)]
        try:
            for change in (put(key, content, self._lease), delete(key)):
                self._store.call("kv/txn", {"compare": ours, "success": [change]}, _LEAVE_S)
        except Unreachable as error:
            _log.warning("%s cannot announce its leave: %s", record.name, error, extra=record._log_fields(str(error)))
        finally:
            self._watcher.own = {}
            self.renewer.close()  # which revokes the leases, and so gives back the id

    def abandon(self) -> None:
        """See Entry."""
        self.ended = True
        self.renewer.abandon()
