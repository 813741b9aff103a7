"""Watches the members in etcd and updates the view. A broken watch resumes where it ended.

The watch resumes from the revision after the last one that was seen. The watcher reads all records again only at the
start, when etcd has compacted the missed revisions, and when etcd has lost its data.

A connection can be dead without an error: half-open, or through a proxy that no longer forwards. So the watcher checks
a watch that was silent for a lease through a second connection: whether its endpoint answers, and whether a key was
changed, added or deleted since. If so it reads all records again, and watches from there.

A missing record is a loss only if nothing else explains it: see unlisted.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvpool.cluster.directory import PeerLinks, Unreachable
from kvpool.cluster.etcd.gateway import AUTHENTICATE_S, Denied, Gateway, NoAnswer, Options, Stream, encode
from kvpool.cluster.etcd.keys import Ids, Keys, Value, absent, put, values
from kvpool.cluster.etcd.unlisted import Contact, Unlisted
from kvpool.cluster.membership_view import MembershipView
from kvpool.cluster.record import Member
from kvpool.waiting.threads import busy

__all__ = ["EtcdWatcher"]

_DROPPED_S: Final = 3600  # how long etcd keeps the note that a peer was dropped

_SOON_S: Final = 0.02
_EXPIRED: Final = "its lease has expired, or somebody has deleted its record"
_NOT_BACK: Final = "it has not come back after etcd lost its data"

_log = logging.getLogger("kvpool.cluster")


class EtcdWatcher:
    """A thread that reads the watch. Call `read_all` first, then `start`; any thread may call the rest.

    Attributes:
        lease_s: Seconds of a member's lease. A watch that is silent for longer is checked.
        given: How many ids were given: the highest count that the counter ever had.
        own: The keys of this process's member, and the lease of each; -1 for a key that must not exist.
        doubt: These keys may have been changed or lost, so the entry must read them.
        peer_links: The links of the attached pool, if there is one.
    """

    def __init__(self, options: Options, keys: Keys, view: MembershipView, heartbeat_s: float, lease_s: float) -> None:
        """Reads nothing yet."""
        self._gateway = Gateway(options)
        self._checker = Gateway(options)  # the second connection, for the membership loop
        self._keys = keys
        self._view = view
        self._heartbeat_s = heartbeat_s
        self.lease_s = lease_s
        self._birth: str | None = None
        self._revision = 0
        self._count = 0  # number of keys below the prefix
        self._has_missed = False
        self.given = 0
        self.own: Mapping[str, int] = {}
        self.doubt = False
        self.peer_links: PeerLinks | None = None
        self._contact = Contact(lease_s, heartbeat_s)
        self._unlisted = Unlisted()
        self._notice: int | None = None
        self._noticing = threading.Lock()  # so that the descriptor is not written to after it was closed
        self._heard = self._checked = time.monotonic()
        self._stream: Stream | None = None
        self._lock = threading.Lock()  # guards _stream
        self._dropping = threading.Lock()  # one thread drops members at a time: the watcher's or the loop's
        self._showing = threading.Lock()  # so that no record comes back between its check and the removal of its member
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-etcd", daemon=True)

    def read_all(self, timeout_s: float, authenticate_s: float = 0.0) -> None:
        """Reads every record into the view.

        Args:
            timeout_s: Seconds to wait for the answer.
            authenticate_s: See Gateway.call.

        Raises:
            NoAnswer: etcd does not answer in time.
            Denied: etcd refuses access.
        """
        all_keys = self._keys.everything() | {"count_only": True}
        ranges = ({"key": encode(self._keys.ids)}, self._keys.all_members(), all_keys)
        body = {"success": [{"request_range": one} for one in ranges]}  # all of one revision
        answer = self._gateway.call("kv/txn", body, timeout_s, authenticate_s=authenticate_s)
        found = [one.get("response_range", {}) for one in answer["responses"]]
        counted, seen = values(found[0]), values(found[1])
        before, revision = self._birth, int(answer["header"]["revision"])
        self._note_ids(counted[0].content if counted else b"")
        forgotten = before is not None and (self._birth != before or revision < self._revision)
        self._revision, self._count = revision, int(found[2].get("count", 0))
        self._contact.answered()
        own = self.own
        if not any(own.get(value.key) == value.lease for value in seen):
            self._raise_doubt()
        there = {self._keys.name_of(value.key) for value in seen}
        gone = [member.name for member in self._view.members() if member.name not in there]
        if forgotten:
            self._contact.forgive()
        for name in gone:
            self._note_missing(name, _NOT_BACK if forgotten else _EXPIRED)
        self._show(seen)

    def start(self) -> None:
        """Starts the thread."""
        self._notice = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread.start()

    def check(self) -> None:
        """Gives up members that did not come back, and closes a dead connection."""
        if self._contact.is_due():
            self._ask_for_sign_of_life()
        self._unlisted.give_up_expired(self._give_up)
        now = time.monotonic()
        with self._lock:
            stream = self._stream
        if stream is not None and now - max(self._heard, self._checked) > self.lease_s:
            self._checked = now
            why = self._silence_of(stream)
            if why:
                _log.warning("the watch of etcd is started again: %s", why, extra=self._log_fields(why))
                stream.stop()

    def set_lease(self, lease_s: float) -> None:
        """Sets the lease that etcd has granted, which can be longer than was asked for."""
        self.lease_s = self._contact.lease_s = lease_s

    def descriptor(self) -> int | None:
        """Becomes readable when `doubt` is set. None before the start and after the close."""
        return self._notice

    def clear_notice(self) -> None:
        """Resets the descriptor, before a check."""
        with busy, self._noticing, contextlib.suppress(BlockingIOError):
            if self._notice is not None:
                os.eventfd_read(self._notice)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._stopping.set()
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.stop()
        if self._thread.is_alive():
            self._thread.join()
        self._gateway.close()
        self._checker.close()
        with busy, self._noticing:
            if self._notice is not None:
                os.close(self._notice)
                self._notice = None

    def _ask_for_sign_of_life(self) -> None:
        body = {"key": encode(self._keys.ids), "count_only": True}
        with contextlib.suppress(NoAnswer, Denied):
            self._checker.call("kv/range", body, max(1.0, self._heartbeat_s), authenticate_s=AUTHENTICATE_S)
            self._contact.answered()

    def _note_missing(self, name: str, why: str) -> None:
        """Handles a missing record. Gives the member up at once if nothing else explains it."""
        if self._view.find(name) is None:
            return
        self._unlisted.add(name, self._contact.forgiven_until(), why)
        self._unlisted.give_up_expired(self._give_up)

    def _give_up(self, name: str, why: str) -> bool:
        """Removes a member without a record from the view. False: not now; it is tried again.

        A member to which this process had a link must learn that it was dropped, so a note in etcd comes first. If the
        record is back before the note is written, the member was not dropped.
        """
        member = self._view.find(name)
        if member is None:
            return True
        own = self._keys.member(name) in self.own
        if own or (self.peer_links is not None and self.peer_links.is_connected(member)):
            return False
        try:
            if self.peer_links is not None and self.peer_links.has_disconnected(member) and not self._drop(member):
                return not self._unlisted.has(name)
        except (NoAnswer, Unreachable):
            return False
        except Denied as error:  # this user may only read
            _log.warning("cannot tell %s that it was dropped: %s", name, error, extra=member._log_fields(str(error)))
        with busy, self._showing:
            if self._unlisted.has(name):  # otherwise its record has come back
                self._view.remove(name, "lost", why)
        return True

    def _drop(self, member: Member) -> bool:
        """Writes the note that a peer was dropped. False: there is a record of its name again."""
        key = self._keys.dropped(member.incarnation)
        timeout_s = max(1.0, self._heartbeat_s)
        still_missing = [absent(key), absent(self._keys.member(member.name))]
        with self._dropping:
            granted = self._checker.call("lease/grant", {"TTL": str(_DROPPED_S), "ID": "0"}, timeout_s)
            lease = int(granted["ID"])
            change = {
                "compare": still_missing,
                "success": [put(key, str(member.term).encode(), lease)],
                "failure": [{"request_range": {"key": encode(key)}}],
            }
            answer = self._checker.call("kv/txn", change, timeout_s, authenticate_s=AUTHENTICATE_S)
            if answer.get("succeeded"):
                return True
            self._checker.call("lease/revoke", {"ID": str(lease)}, timeout_s)
        return bool(values(answer["responses"][0].get("response_range", {})))

    def _silence_of(self, stream: Stream) -> str:
        """Why a watch that was silent for a lease is broken; "" if nothing happened that it should have reported.

        Asks the same endpoint through the second connection. Deletions show in the number of keys, other changes in
        the revisions.
        """
        heard, revision, count = self._heard, self._revision, self._count
        everything = self._keys.everything()
        newer = everything | {"min_mod_revision": str(revision + 1), "limit": "1", "keys_only": True}
        body = {"success": [{"request_range": one} for one in (newer, everything | {"count_only": True})]}
        try:
            timeout_s = max(1.0, self._heartbeat_s)
            endpoint = self._gateway.endpoint
            answer = self._checker.call("kv/txn", body, timeout_s, endpoint, authenticate_s=AUTHENTICATE_S)
            self._contact.answered()
        except (NoAnswer, Denied) as error:
            return f"etcd no longer answers: {error}"
        changed, there = (one.get("response_range", {}) for one in answer["responses"])
        missed = changed.get("kvs") or int(there.get("count", 0)) != count
        missed = missed or int(answer["header"]["revision"]) < revision  # etcd has lost its data
        if self._heard != heard or self._stream is not stream:
            return ""  # the watch has reported something meanwhile, or is a new one
        self._has_missed |= bool(missed)
        return "it is silent, although keys have changed" if missed else ""

    def _raise_doubt(self) -> None:
        """Makes the membership loop check this process's keys, if it has any."""
        if not self.own:
            return
        self.doubt = True
        with busy, self._noticing:
            if self._notice is not None:
                os.eventfd_write(self._notice, 1)

    def _log_fields(self, why: str) -> dict[str, object]:
        """The `extra` fields of a log record: which etcd, why, and this process's member and lease, or "" and 0."""
        own = ((self._keys.name_of(key), on) for key, on in self.own.items() if key.startswith(self._keys.members))
        name, lease = next(own, ("", 0))
        return {"address": self._gateway.address, "member": name, "lease": lease, "why": why}

    def _run(self) -> None:
        with busy:
            self._watch_until_stopped()

    def _watch_until_stopped(self) -> None:
        wait_s = 0.0
        while not self._stopping.wait(wait_s):
            heard = self._heard
            try:
                self._watch_once()
            except (NoAnswer, Denied) as error:
                if wait_s <= _SOON_S and not self._stopping.is_set():
                    _log.warning("the watch of etcd is broken: %s", error, extra=self._log_fields(str(error)))
            except Exception as error:
                _log.exception("the watch of etcd has failed; it is started again", extra=self._log_fields(str(error)))
                self._revision = 0
            wait_s = _SOON_S if self._heard != heard else min(2 * max(wait_s, _SOON_S), self._heartbeat_s)

    def _watch_once(self) -> None:
        timeout_s = max(self._heartbeat_s, 1.0)
        if self._revision == 0 or self._has_missed:
            self.read_all(timeout_s, AUTHENTICATE_S)
            self._has_missed = False
        else:
            birth, revision = self._read_birth(timeout_s)
            if birth != self._birth or revision < self._revision:
                why = "etcd has come back without its data"
                _log.warning(why, extra=self._log_fields(why))
                self.read_all(timeout_s, AUTHENTICATE_S)
        request = self._keys.everything() | {"start_revision": str(self._revision + 1), "progress_notify": True}
        stream = self._gateway.stream("watch", {"create_request": request}, timeout_s)
        with self._lock:
            self._stream = stream
        try:
            if not self._stopping.is_set():
                self._read(stream)
        finally:
            with self._lock:
                self._stream = None
            stream.close()

    def _read(self, stream: Stream) -> None:
        for message in stream:
            self._heard = time.monotonic()
            self._contact.answered()
            if message.get("canceled"):
                why = message.get("cancel_reason", "")
                _log.info(
                    "etcd has cancelled the watch (%s); all records are read again", why, extra=self._log_fields(why)
                )
                self._revision = 0
                return
            events = message.get("events", ())
            self._take_events(events)
            if not events and not message.get("created"):  # a progress notification of an idle etcd
                self._revision = max(self._revision, int(message.get("header", {}).get("revision", 0)))

    def _take_events(self, events: Iterable[dict[str, Any]]) -> None:
        """Updates the view from events.

        The view is up to date as of the revision of the last event, not of the message: etcd sends past events in
        portions, each under its current revision, which it also sends first of all.
        """
        for event in events:
            value = Value.read(event["kv"])
            deleted = event.get("type") == "DELETE"
            if deleted or event["kv"].get("version") == "1":
                self._count += -1 if deleted else 1
            if value.key == self._keys.ids:
                self._note_ids(value.content)
            elif value.key.startswith(self._keys.members) and deleted:
                self._note_missing(self._keys.name_of(value.key), _EXPIRED)
            elif value.key.startswith(self._keys.members):
                self._show([value])
            if self.own.get(value.key, value.lease) != value.lease:
                self._raise_doubt()
            self._revision = max(self._revision, value.revision)

    def _note_ids(self, content: bytes) -> None:
        """Notes the counter. If it is missing, unreadable or set back, the entry repairs it (entry.py)."""
        ids = Ids.read(content) if content else None
        if ids is None or ids.given < self.given:
            self._raise_doubt()
        if not content:
            self._birth = None
        elif ids is not None:
            self._birth = ids.birth
            self.given = max(self.given, ids.given)

    def _show(self, seen: Iterable[Value]) -> None:
        for value in seen:
            record = self._keys.record(value)
            if record is None:
                continue
            with busy, self._showing:
                self._unlisted.discard(record.name)
                self._apply(record)

    def _apply(self, record: Member) -> None:
        if record.state == "left":
            self._view.remove(record.name, "left", "it has announced its leave")
        elif record.state == "ended":
            self._view.remove(record.name, "lost", "its process has ended")
        else:
            self._view.show(record)

    def _read_birth(self, timeout_s: float) -> tuple[str | None, int]:
        """The mark of etcd's data, or None if it has none; and its revision."""
        body = {"key": encode(self._keys.ids)}
        answer = self._gateway.call("kv/range", body, timeout_s, authenticate_s=AUTHENTICATE_S)
        self._contact.answered()
        found = values(answer)
        ids = Ids.read(found[0].content) if found else None
        if ids is not None:
            birth: str | None = ids.birth
        else:
            birth = self._birth if found else None
        return birth, int(answer["header"]["revision"])
