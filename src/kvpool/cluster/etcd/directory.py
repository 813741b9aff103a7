"""The directory of a cluster of many machines: keys in etcd that expire with their leases (ADR 0012)."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Final

from kvpool.cluster.cluster_url import ClusterUrl
from kvpool.cluster.directory import Directory, Entry, PeerLinks, Unreachable
from kvpool.cluster.etcd.entry import EtcdEntry
from kvpool.cluster.etcd.gateway import Denied, NoAnswer, Options
from kvpool.cluster.etcd.id_counter import IdCounter
from kvpool.cluster.etcd.keys import Holder, Ids, Keys, Value, absent, put, unchanged
from kvpool.cluster.etcd.renewer_process import RenewerProcess
from kvpool.cluster.etcd.store import EtcdStore
from kvpool.cluster.etcd.watcher import EtcdWatcher
from kvpool.cluster.membership_view import MembershipView
from kvpool.cluster.record import INSTANCE_MAX, Member
from kvpool.errors import ArgumentError, AuthError, DeadlineExceeded, StateError

__all__ = ["EtcdDirectory"]

_log = logging.getLogger("kvpool.cluster")

_RETRY_S: Final = 0.05
# etcd reports TTLs in whole seconds, and looks for expired leases twice a second.
_EXPIRY_SLACK_S: Final = 2.0


class EtcdDirectory(Directory):
    """Keys under a prefix, watched by another thread (watcher.py)."""

    def __init__(self, url: ClusterUrl) -> None:
        """Reads the TLS files, and connects to nothing yet.

        Raises:
            ArgumentError: A TLS file cannot be used.
        """
        self.secret = ""  # etcd has none: it is a setting of the pools
        self._url = url
        self._entry: EtcdEntry | None = None
        options = Options(url.hosts, url.tls, url.tls_ca, url.tls_cert, url.tls_key, url.user, url.password)
        try:
            self.store = EtcdStore(options, Keys(url.name), url.heartbeat_s, url.lease_s)
            self._watch(MembershipView())
        except OSError as error:
            raise ArgumentError(f"cluster: the TLS files cannot be used: {error}") from error

    def _watch(self, view: MembershipView) -> None:
        store = self.store
        self.view = view
        self.watcher = EtcdWatcher(store.options, store.keys, view, store.heartbeat_s, store.lease_s)
        self.watcher.peer_links = self.peer_links
        self._counter = IdCounter(self._url, store, self.watcher, view)

    @property
    def lease_s(self) -> float:
        """See Directory."""
        return self.store.lease_s

    def open(self, view: MembershipView, timeout_s: float) -> None:
        """See Directory."""
        until = time.monotonic() + timeout_s
        self._watch(view)
        while True:
            try:
                self.watcher.read_all(max(0.001, until - time.monotonic()))
                break
            except Denied as error:
                raise AuthError(f"cluster: etcd refuses access: {error}") from None
            except NoAnswer as error:
                if time.monotonic() + _RETRY_S >= until:
                    raise DeadlineExceeded(f"cluster: etcd does not answer: {error}") from None
            time.sleep(_RETRY_S)
        self.watcher.start()

    def use_links(self, links: PeerLinks) -> None:
        """See Directory."""
        self.peer_links = self.watcher.peer_links = links

    def enter(self, record: Member, timeout_s: float) -> Entry:
        """See Directory."""
        until = time.monotonic() + timeout_s
        renewer = RenewerProcess(self.store.options, self.store.heartbeat_s, self.lease_s)
        try:
            renewer.wait_ready(until)
            self._entry = self._enter(record, renewer, until)
        except BaseException:
            renewer.close()
            raise
        return self._entry

    def _enter(self, record: Member, renewer: RenewerProcess, until: float) -> EtcdEntry:
        while True:
            try:
                entry = self._enter_once(record, renewer, until)
                if entry is not None:
                    return entry
                why = "other members keep changing the counter of ids"
            except Unreachable as error:
                why = f"etcd does not answer: {error}"
            if time.monotonic() >= until:
                raise DeadlineExceeded(f"register: {why}")
            time.sleep(_RETRY_S)

    def _enter_once(self, record: Member, renewer: RenewerProcess, until: float) -> EtcdEntry | None:
        """Tries once, on new leases that are not renewed yet. None: another member was faster."""
        self._wait_for_name(record.name, until)
        ids = self._counter.wait(until)
        leases: list[int] = []
        entry: EtcdEntry | None = None
        try:
            granted = self.store.grant()
            leases.append(granted.id)
            leases.append(self.store.grant_for_id())
            entered = self._try_to_enter(record, ids, leases[0], leases[1])
            if entered is not None:
                holder = Holder(record.incarnation, entered[1])
                entry = EtcdEntry(
                    self.store, self.watcher, self._counter, renewer, entered[0], holder, ids[0].birth, granted,
                    leases[1],
                )  # fmt: skip
            return entry
        finally:
            if entry is None:
                for lease in leases:
                    self.store.revoke(lease)

    def _wait_for_name(self, name: str, until: float) -> None:
        """Waits until no member has the name. A member lives if its lease outlasts the time that it had left."""
        lease, ends = 0, 0.0
        while (value := self.store.read(self.store.keys.member(name))) is not None:
            now = time.monotonic()
            if lease == 0 or value.lease != lease:
                left_s = float(self.store.call("lease/timetolive", {"ID": str(value.lease)}).get("TTL", 0))
                lease, ends = value.lease, now + left_s + _EXPIRY_SLACK_S
            elif now >= ends:
                raise StateError(f"register: a live member has the name {name}")
            if now >= until:
                raise DeadlineExceeded(f"register: the name {name} is held; its lease may expire in {ends - now:.1f} s")
            time.sleep(_RETRY_S)

    def _try_to_enter(
        self, record: Member, ids: tuple[Ids, Value], lease: int, id_lease: int
    ) -> tuple[Member, int] | None:
        """Writes the record with the next free id.

        Returns:
            The record, and how many ids were given including its own. None: another member was faster, or the answer
            was lost.
        """
        counted, keys = ids[1], self.store.keys
        taken, listed = self._counter.listed_ids()
        known = self._counter.given_at_least(*listed)
        found = ids[0].raised(known).next_free(taken | {member.instance for member in self.view.members()})
        if found is None:
            raise StateError(f"register: all {INSTANCE_MAX} ids are taken", needed=1)
        counter, number = found
        record = dataclasses.replace(record, instance=number)
        answer = self.store.call("kv/txn", {
            "compare": [
                absent(keys.member(record.name)), absent(keys.instance(number)),
                unchanged(keys.ids, counted),
            ],
            "success": [
                put(keys.member(record.name), record.to_bytes(), lease),
                put(keys.instance(number), Holder(record.incarnation, counter.given).to_bytes(), id_lease),
                put(keys.ids, counter.to_bytes()),
            ],
        })  # fmt: skip
        if answer.get("succeeded"):
            if known > ids[0].given:
                _log.warning("the counter of ids in etcd said %d, but %d ids were given", ids[0].given, known)
            return record, counter.given
        mine = self.store.read(keys.member(record.name))
        if mine is not None and mine.lease == lease:  # an earlier try succeeded, but its answer was lost
            written = keys.record(mine)
            return None if written is None else (written, counter.given)
        return None

    def repair_ids(self) -> int:
        """See Cluster.repair_ids."""
        return self._counter.repair()

    def descriptors(self) -> tuple[int, ...]:
        """See Directory."""
        entry, notice = self._entry, self.watcher.descriptor()
        found = () if notice is None else (notice,)
        if entry is None or entry.ended:
            return found
        try:
            return (*found, entry.renewer.descriptor())
        except ValueError:  # it is just being closed
            return found

    def update(self) -> None:
        """See Directory."""
        self.watcher.clear_notice()
        self.watcher.check()

    def close(self) -> None:
        """See Directory."""
        self.watcher.close()
        self.store.close()

    def abandon(self) -> None:
        """See Directory: connections keep nothing alive."""
