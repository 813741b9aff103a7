"""What one member has in etcd: a record and an id, on leases (ADR 0012, 0020, 0022)."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Final

from kvpool.cluster.directory import Entry, Hold, Unreachable
from kvpool.cluster.etcd_keys import Holder, Ids, Value, absent, delete, on_lease, put, unchanged
from kvpool.cluster.record import Member

if TYPE_CHECKING:
    from kvpool.cluster.etcd import EtcdDirectory
    from kvpool.cluster.keeper_process import KeeperProcess

__all__ = ["EtcdEntry"]

_log = logging.getLogger("kvpool.cluster")

_LEAVE_S: Final = 2.0
_RENEW_ID_S: Final = 600.0  # of the hour that an id is held for


class EtcdEntry(Entry):
    """A record and an id on leases. A process of its own keeps the record's; this one the id's, which lasts an hour.

    A lease that is renewed says nothing of the keys on it, which anybody may delete who can write there. So they are
    looked at whenever the watch has told of one of them, when a write finds the record gone, and once a lease. What is
    missing is put back in silence, unless etcd shows that a peer has dropped this member (ADR 0022).
    """

    def __init__(
        self,
        directory: EtcdDirectory,
        record: Member,
        holder: Holder,
        birth: str,
        granted: tuple[int, int, int],
        id_lease: int,
        keeper: KeeperProcess,
    ) -> None:
        """Starts to keep the leases, on which record and id stand already."""
        self.record = record
        self.over = False
        self._directory = directory
        self.keeper = keeper
        self._holder = holder
        self._lapsed = False
        self._dropped = ""  # why
        self._renew_id_at = 0.0
        self._hold(birth, granted, id_lease)

    def _hold(self, birth: str, granted: tuple[int, int, int], id_lease: int) -> None:
        """Record and id stand on these leases from now on."""
        directory, keys = self._directory, self._directory.keys
        member = keys.member(self.record.name)
        self._birth = birth
        self._lease, self._id_lease = granted[0], id_lease
        self._gone = False
        self._lapses = self.keeper.beacon.lapses
        self._look_at = time.monotonic() + directory.lease_s
        directory.view.doubt = False  # of what stood there before
        directory.view.own = self._own(granted[0], id_lease)
        self.keeper.keep(*granted, member, id_lease)

    def _own(self, lease: int, id_lease: int) -> dict[str, int]:
        keys, record = self._directory.keys, self.record
        member, instance, dropped = keys.member(record.name), keys.instance(record.instance), keys.dropped(record.epoch)
        return {member: lease, instance: id_lease, dropped: -1}

    def valid(self) -> bool:
        """See Entry."""
        return time.monotonic_ns() < self.keeper.valid_until_ns and not self._directory.view.doubt

    def lapsed(self) -> bool:
        """See Entry: the keeper has been silent for longer than the lease, and has not renewed it before."""
        if not self._lapsed and time.monotonic_ns() >= self.keeper.valid_until_ns:
            self._lapsed = not self.over and self.keeper.silent_s() > self._directory.lease_s
        return self._lapsed

    def dropped(self, why: str) -> None:
        """See Entry."""
        self._dropped = why

    def renewals_failed(self) -> int:
        """See Entry."""
        return self.keeper.failed

    def hold(self) -> Hold:
        """See Entry."""
        if self.lapsed():
            return "lost"
        if self._dropped:
            self._warn(self._dropped)
            return "lost"
        self._gone |= self.keeper.gone()
        if self._gone or self._directory.view.doubt or time.monotonic() >= self._look_at:
            return self._look()
        return "held"

    def _look(self) -> Hold:
        """Whether the record and the id still stand on their leases, and nobody has taken anything from this member."""
        directory, keys, view = self._directory, self._directory.keys, self._directory.view
        doubted, view.doubt = view.doubt, False  # what happens while this looks is looked at next time
        try:
            member, instance, ids, dropped = directory.read_at_once(
                keys.member(self.record.name), keys.instance(self.record.instance), keys.ids,
                keys.dropped(self.record.epoch),
            )  # fmt: skip
            stands = member is not None and member.lease == self._lease and not self._gone
            self._renew_id()
            if stands:
                self._mend_ids(ids)
        except Unreachable:
            view.doubt |= doubted
            raise
        self._look_at = time.monotonic() + directory.lease_s
        if dropped is not None:
            self._warn("a peer had dropped it: its record had run out, and the link to it had ended")
        elif stands and instance is not None and instance.lease == self._id_lease:
            return "held"
        view.doubt = True  # until they stand there again
        if dropped is not None or self._is_taken(member, instance):
            return "lost"
        if not stands and self.keeper.beacon.lapses != self._lapses:
            self._warn("it was stopped for longer than its lease")
            return "lost"
        what = "id" if stands else "record"
        self._warn(f"its {what} does not stand in etcd any more, or not on its lease; it is put back")
        return "forgotten"

    def _is_taken(self, member: Value | None, instance: Value | None) -> bool:
        """Whether the name or the id is another incarnation's."""
        other = None if member is None else self._directory.keys.record(member)
        holder = None if instance is None else Holder.read(instance.content)
        has_name = other is not None and other.epoch != self.record.epoch
        return has_name or (instance is not None and (holder is None or holder.epoch != self.record.epoch))

    def _renew_id(self) -> None:
        """The lease of the id. One that has run out is found by the key, which is gone then."""
        if time.monotonic() >= self._renew_id_at:
            self._directory.call("lease/keepalive", {"ID": str(self._id_lease)})
            self._renew_id_at = time.monotonic() + _RENEW_ID_S

    def _mend_ids(self, there: Value | None) -> None:
        """The counter of ids that somebody has deleted, overwritten or set back: ids would be given again."""
        directory = self._directory
        ids = None if there is None else Ids.read(there.content)
        if ids is not None and ids.given >= directory.given_at_least(self._holder.given):
            return
        if there is None:
            why = "somebody has deleted the counter of ids in etcd"
        elif ids is None:
            why = directory.keys.no_counter(there)
        else:
            why = f"somebody has set back the counter of ids in etcd, to {ids.given}"
        directory.mend_ids(there, self._birth if ids is None else ids.birth, self._holder.given)
        self._warn(f"{why}: it is put back")

    def _warn(self, why: str) -> None:
        _log.warning("%s: %s", self.record.name, why, extra=self.record._log_fields(why))

    def write(self, record: Member) -> None:
        """See Entry."""
        key = self._directory.keys.member(record.name)
        answer = self._directory.call("kv/txn", {
            "compare": [on_lease(key, self._lease)], "success": [put(key, record.to_bytes(), self._lease)],
        })  # fmt: skip
        if not answer.get("succeeded"):
            self._directory.view.doubt = True
            raise Unreachable("the record is not there any more")
        self.record = record

    def enter_again(self, record: Member, *, lost: bool) -> int | None:
        """See Entry."""
        directory, keys = self._directory, self._directory.keys
        self._gone |= self.keeper.gone()  # what it says must be read, or the tender never sleeps
        record = dataclasses.replace(record, term=self.record.term + lost)
        member, instance, dropped = keys.member(record.name), keys.instance(record.instance), keys.dropped(record.epoch)
        there, holder, counted = directory.read_at_once(member, instance, keys.ids)
        if self._is_taken(there, holder):
            self.over = True
            directory.view.own = {}
            self.keeper.close()
            return None
        known = directory.given_at_least(self._holder.given)
        counter = None if counted is None else Ids.read(counted.content)
        ids = Ids.new(known) if counter is None else counter.raised(known)
        has_id = holder is not None and holder.lease == self._id_lease
        granted = directory.grant()
        before, fresh = directory.view.own, [granted[0]]
        try:
            id_lease = self._id_lease if has_id else directory.grant_for_id()
            fresh += [] if has_id else [id_lease]
            directory.view.own = self._own(granted[0], id_lease)
            answer = directory.call("kv/txn", {
                "compare": [
                    unchanged(member, there), unchanged(instance, holder), unchanged(keys.ids, counted),
                    *([] if lost else [absent(dropped)]),
                ],
                "success": [
                    put(member, record.to_bytes(), granted[0]),
                    put(instance, self._holder.to_bytes(), id_lease),
                    put(keys.ids, ids.to_bytes()),
                    delete(dropped),
                ],
            })  # fmt: skip
            if not answer.get("succeeded"):
                raise Unreachable("somebody else has changed it just now, or a peer has dropped this member")
        except Unreachable:
            directory.view.own = before
            directory.view.doubt = True
            for lease in fresh:
                directory.revoke(lease)
            raise
        self.record = record
        self._hold(ids.birth, granted, id_lease)
        if lost:  # else a pool may have fenced itself just now: then "lost" and "regained" must follow
            self._lapsed = False
            self._dropped = ""
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
            for change in (put(key, content, self._lease), delete(key)):
                self._directory.call("kv/txn", {"compare": ours, "success": [change]}, _LEAVE_S)
        except Unreachable as error:
            _log.warning("%s cannot say goodbye: %s", record.name, error, extra=record._log_fields(str(error)))
        finally:
            self._directory.view.own = {}
            self.keeper.close()  # which revokes the leases, and with them the id

    def abandon(self) -> None:
        """See Entry."""
        self.over = True
        self.keeper.abandon()
