"""The counter of ids in etcd: how it is created, repaired, and protected from giving an id twice."""

from __future__ import annotations

import time
from typing import Final

from kvpool.cluster.cluster_url import ClusterUrl
from kvpool.cluster.directory import Unreachable
from kvpool.cluster.etcd.keys import Holder, Ids, Value, absent, put, unchanged, values
from kvpool.cluster.etcd.store import EtcdStore
from kvpool.cluster.etcd.watcher import EtcdWatcher
from kvpool.cluster.membership_view import MembershipView
from kvpool.errors import DeadlineExceeded, StateError

__all__ = ["IdCounter"]

_RETRY_S: Final = 0.05


class IdCounter:
    """How many ids were given, by everything that this process knows. Any thread may call."""

    def __init__(self, url: ClusterUrl, store: EtcdStore, watcher: EtcdWatcher, view: MembershipView) -> None:
        """Reads nothing yet."""
        self._url = url
        self._store = store
        self._watcher = watcher
        self._view = view

    def given_at_least(self, *more: int) -> int:
        """How many ids were given, as far as this process knows: by the counter, the members, and its own links.

        The last value of the counter counts as well as the members: a member that the others were told is lost may
        live, cut off, with an id that only the counter remembers.
        """
        links = self._watcher.peer_links
        connected = [] if links is None else links.connected_instances()
        return max([self._watcher.given, *more, *connected, *(member.instance for member in self._view.members())])

    def listed_ids(self) -> tuple[set[int], list[int]]:
        """The ids that are taken, and the counts of given ids, by all that etcd lists besides the counter."""
        store, keys = self._store, self._store.keys
        body = {"success": [{"request_range": one} for one in (keys.all_instances(), keys.all_members())]}
        answers = store.call("kv/txn", body)["responses"]
        instances, members = (values(one.get("response_range", {})) for one in answers)
        taken = {keys.number_of(value.key) for value in instances} - {0}
        records = [record for record in map(keys.record, members) if record is not None]
        taken |= {record.instance for record in records}
        holders = [Holder.read(value.content) for value in instances]
        return taken, [*taken, *(holder.given for holder in holders if holder is not None)]

    def write_back(self, found: Value | None, birth: str, given: int) -> None:
        """Writes the counter again with what this process knows, if it is still as it was found. Raises Unreachable."""
        keys, ids = self._store.keys, Ids(self.given_at_least(given), birth)
        self._store.call(
            "kv/txn", {"compare": [unchanged(keys.ids, found)], "success": [put(keys.ids, ids.to_bytes())]}
        )

    def wait(self, until: float) -> tuple[Ids, Value]:
        """Waits for a counter that can be read.

        If etcd has no counter, members may be about to come back with the ids that they have, so a newcomer waits for
        a lease before it creates one. A counter that cannot be read is repaired within a lease by any live member;
        no other member can know its value.

        Raises:
            StateError: No member has repaired it.
            DeadlineExceeded: There was none in time.
        """
        store, keys = self._store, self._store.keys
        began = time.monotonic()
        while True:
            value = store.read(keys.ids)
            ids = Ids.read(value.content) if value is not None else None
            if value is not None and ids is not None:
                return ids, value
            if time.monotonic() >= began + store.lease_s:
                if value is not None:
                    raise StateError(
                        f"register: {keys.no_counter(value)}, and no live member has repaired it; without it an id "
                        f"might be given twice. `kvpool cluster {self._url} --repair-ids` writes a counter above every "
                        "id that etcd lists",
                        shown=max(self.listed_ids()[1], default=0),
                    )
                fresh = Ids.new(self.given_at_least(*self.listed_ids()[1])).to_bytes()
                store.call("kv/txn", {"compare": [absent(keys.ids)], "success": [put(keys.ids, fresh)]})
            elif time.monotonic() >= until:
                if value is not None:
                    why = f"{keys.no_counter(value)}; live members have a lease's time to repair it"
                else:
                    why = "etcd is new; live members have a lease's time to come back"
                raise DeadlineExceeded(f"register: {why}")
            time.sleep(_RETRY_S)

    def repair(self) -> int:
        """See Cluster.repair_ids."""
        store, keys = self._store, self._store.keys
        try:
            found = store.read(keys.ids)
            given = self.given_at_least(*self.listed_ids()[1])
            ids = Ids.read(found.content) if found is not None else None
            if ids is not None and ids.given >= given:
                return ids.given
            ids = Ids.new(given) if ids is None else ids.raised(given)
            changed = {"compare": [unchanged(keys.ids, found)], "success": [put(keys.ids, ids.to_bytes())]}
            if not store.call("kv/txn", changed).get("succeeded"):
                raise DeadlineExceeded("repair_ids: a member has just changed the counter: try again")
        except Unreachable as error:
            raise DeadlineExceeded(f"repair_ids: etcd does not answer: {error}") from None
        return ids.given
