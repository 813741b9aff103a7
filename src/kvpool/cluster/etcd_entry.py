"""What one member has in etcd: a record and an id, on a lease that a process of its own keeps (ADR 0012, ADR 0020)."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Final

from kvpool.cluster.directory import Entry, Hold, Unreachable
from kvpool.cluster.etcd_keys import Ids, Value, absent, on_lease, put, unchanged
from kvpool.cluster.gateway import encode
from kvpool.cluster.record import Member

if TYPE_CHECKING:
    from kvpool.cluster.etcd import EtcdDirectory
    from kvpool.cluster.keeper_process import KeeperProcess

__all__ = ["EtcdEntry"]

_log = logging.getLogger("kvpool.cluster")

_LEAVE_S: Final = 2.0


class EtcdEntry(Entry):
    """A record and an id on a lease, which a process of its own keeps.

    A lease that is renewed says nothing of the keys on it, which anybody may delete who can write there. So they are
    looked at whenever the watch has told of one of them, when a write finds the record gone, and once a lease.
    """

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
        self.keeper = keeper
        self._lapsed = False
        self._hold(birth, granted)

    def _hold(self, birth: str, granted: tuple[int, int, int]) -> None:
        """The record stands on this lease from now on."""
        directory, keys = self._directory, self._directory.keys
        member = keys.member(self.record.name)
        self._birth = birth
        self._lease = granted[0]
        self._gone = False
        self._lapses = self.keeper.beacon.lapses
        self._look_at = time.monotonic() + directory.lease_s
        directory.view.doubt = directory.view.told_lost = False  # of what stood there before
        directory.view.own = frozenset({member, keys.instance(self.record.instance)}), self._lease
        self.keeper.keep(*granted, member)

    def valid(self) -> bool:
        """See Entry."""
        return time.monotonic_ns() < self.keeper.valid_until_ns and not self._directory.view.doubt

    def lapsed(self) -> bool:
        """See Entry: the keeper has been silent for longer than the lease, and has not renewed it before."""
        if not self._lapsed and time.monotonic_ns() >= self.keeper.valid_until_ns:
            self._lapsed = not self.over and self.keeper.silent_s() > self._directory.lease_s
        return self._lapsed

    def renewals_failed(self) -> int:
        """See Entry."""
        return self.keeper.failed

    def hold(self) -> Hold:
        """See Entry."""
        if self.lapsed():
            return "lost"
        self._gone |= self.keeper.gone()
        if self._gone:
            return "forgotten" if self._is_forgotten(self._directory.read(self._directory.keys.ids)) else "lost"
        if self._directory.view.doubt or time.monotonic() >= self._look_at:
            return self._look()
        return "held"

    def _is_forgotten(self, ids: Value | None) -> bool:
        """Whether etcd has lost its memory, and nobody can have been told anything of this member."""
        is_new = ids is None or Ids.read(ids.content).birth != self._birth
        return is_new and not self._directory.view.told_lost and self.keeper.beacon.lapses == self._lapses

    def _look(self) -> Hold:
        """Whether the record and the id still stand on the lease, which lives as far as is known."""
        directory, keys, view = self._directory, self._directory.keys, self._directory.view
        doubted, view.doubt = view.doubt, False  # what happens while this looks is looked at next time
        try:
            member, instance, ids = directory.read_at_once(
                keys.member(self.record.name), keys.instance(self.record.instance), keys.ids
            )
            has_record = member is not None and member.lease == self._lease
            if has_record and ids is None:
                self._put_back_ids()
        except Unreachable:
            view.doubt |= doubted
            raise
        self._look_at = time.monotonic() + directory.lease_s
        if has_record and instance is not None and instance.lease == self._lease:
            view.told_lost = False  # it was the end of one before
            return "held"
        view.doubt = True  # until they stand there again
        if not has_record and self._is_forgotten(ids):
            return "forgotten"
        found: Hold = "forgotten" if has_record and instance is None else "lost"
        why = f"its {'id' if has_record else 'record'} does not stand in etcd any more, or not on its lease"
        _log.warning("%s: %s", self.record.name, why, extra=self.record._log_fields(why))
        return found

    def _put_back_ids(self) -> None:
        """Somebody has deleted the counter alone; without it ids would be given again."""
        directory, keys = self._directory, self._directory.keys
        ids = Ids(directory.highest_known(self.record.instance), self._birth)
        directory.call("kv/txn", {"compare": [absent(keys.ids)], "success": [put(keys.ids, ids.to_bytes())]})
        why = "somebody has deleted the counter of ids in etcd"
        _log.warning("%s puts it back: %s", self.record.name, why, extra=self.record._log_fields(why))

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
        member, instance = keys.member(record.name), keys.instance(record.instance)
        there, holder, counted = directory.read_at_once(member, instance, keys.ids)
        other = keys.record(there) if there is not None else None
        taken = other is not None and other.epoch != record.epoch
        if taken or (holder is not None and holder.content != str(record.epoch).encode()):
            self.over = True
            directory.view.own = frozenset(), 0
            self.keeper.close()
            return None
        known = directory.highest_known(record.instance)
        ids = Ids.new(known) if counted is None else Ids.read(counted.content).raised(known)
        granted = directory.grant()
        before, directory.view.own = directory.view.own, (frozenset({member, instance}), granted[0])
        try:
            answer = directory.call("kv/txn", {
                "compare": [unchanged(member, there), unchanged(instance, holder), unchanged(keys.ids, counted)],
                "success": [
                    put(member, record.to_bytes(), granted[0]),
                    put(instance, str(record.epoch).encode(), granted[0]),
                    put(keys.ids, ids.to_bytes()),
                ],
            })  # fmt: skip
            if not answer.get("succeeded"):
                raise Unreachable("somebody else has changed it just now")
        except Unreachable:
            directory.view.own = before
            directory.revoke(granted[0])
            raise
        self.record = record
        self._hold(ids.birth, granted)
        if lost:  # else a pool may have fenced itself just now: then "lost" and "regained" must follow
            self._lapsed = False
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
            _log.warning("%s cannot say goodbye: %s", record.name, error, extra=record._log_fields(str(error)))
        finally:
            self._directory.view.own = frozenset(), 0
            self.keeper.close()  # which revokes the lease, and with it the id

    def abandon(self) -> None:
        """See Entry."""
        self.over = True
        self.keeper.abandon()
