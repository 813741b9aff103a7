"""What can be seen of the members in etcd, shown on a board: a watch that goes on where it was broken off.

The watch is resumed from the revision after the last that was seen. Everything is read again only at first, when
etcd has compacted what was missed, and when it has come back with nothing in it.

A connection can be dead without anybody being told: half-open, or through something that forwards nothing any more. So
a watch that has been silent for a lease is checked beside it: whether its endpoint answers, and whether a key has
changed, come or gone since. If so all is read again, and watched from there.

A record that is gone is a loss only if nothing else explains it: see etcd_unlisted.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvpool.cluster.board import Board
from kvpool.cluster.directory import Unreachable, Witness
from kvpool.cluster.etcd_keys import Ids, Keys, Value, absent, put, values
from kvpool.cluster.etcd_unlisted import Contact, Unlisted
from kvpool.cluster.gateway import AUTHENTICATE_S, Denied, Gateway, NoAnswer, Options, Stream, encode
from kvpool.cluster.record import Member
from kvpool.waiting.threads import busy

__all__ = ["EtcdView"]

_DROPPED_S: Final = 3600  # for how long it is written down that a peer was dropped

_SOON_S: Final = 0.02
_RUN_OUT: Final = "its lease has run out, or somebody has deleted its record"
_NOT_BACK: Final = "it has not come back to an etcd that has lost its memory"

_log = logging.getLogger("kvpool.cluster")


class EtcdView:
    """A thread that reads the watch. `read_all` comes first, `start` then; any thread may call the rest.

    Attributes:
        lease_s: Of the members, and for how long a watch may be silent before it is checked.
        given: How many ids were given, as far as the counter has ever said.
        own: The keys of this process's own member, and the lease on which each stands; -1 for one that must not be.
        doubt: Something has happened to those, or to all that etcd knew, that they may not have outlived.
        witness: Of what direct links show of other members, where a pool is attached.
    """

    def __init__(self, options: Options, keys: Keys, board: Board, heartbeat_s: float, lease_s: float) -> None:
        """Has seen nothing."""
        self._gateway = Gateway(options)
        self._checker = Gateway(options)  # for the tender
        self._keys = keys
        self._board = board
        self._heartbeat_s = heartbeat_s
        self.lease_s = lease_s
        self._birth: str | None = None
        self._revision = 0
        self._count = 0  # of all keys below the prefix
        self._has_missed = False
        self.given = 0
        self.own: Mapping[str, int] = {}
        self.doubt = False
        self.witness: Witness | None = None
        self._contact = Contact(lease_s, heartbeat_s)
        self._unlisted = Unlisted()
        self._notice: int | None = None
        self._noticing = threading.Lock()  # it is not written to once it is closed
        self._heard = self._checked = time.monotonic()
        self._stream: Stream | None = None
        self._lock = threading.Lock()  # of the stream
        self._dropping = threading.Lock()  # one at a time: the watch's thread and the tender's
        self._showing = threading.Lock()  # so that no record comes back between a look at it and its member's loss
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-etcd", daemon=True)

    def read_all(self, timeout_s: float, authenticate_s: float = 0.0) -> None:
        """Reads every record, and shows them.

        Args:
            timeout_s: For an answer.
            authenticate_s: See Gateway.call.

        Raises:
            NoAnswer: etcd does not answer in time.
            Denied: It does not let us.
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
        gone = [member.name for member in self._board.members() if member.name not in there]
        if forgotten:
            self._contact.forgive()
        for name in gone:
            self._miss(name, _NOT_BACK if forgotten else _RUN_OUT)
        self._show(seen)

    def start(self) -> None:
        """Begins to watch."""
        self._notice = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread.start()

    def tend(self) -> None:
        """Gives up on members that did not come back, and on a connection that is dead."""
        if self._contact.is_due():
            self._ask_for_sign_of_life()
        self._unlisted.settle(self._give_up)
        now = time.monotonic()
        with self._lock:
            stream = self._stream
        if stream is not None and now - max(self._heard, self._checked) > self.lease_s:
            self._checked = now
            why = self._silence_of(stream)
            if why:
                _log.warning("the watch of etcd is begun again: %s", why, extra=self._log_fields(why))
                stream.stop()

    def note_lease(self, lease_s: float) -> None:
        """The lease as etcd has granted it, which can be longer than was asked for."""
        self.lease_s = self._contact.lease_s = lease_s

    def descriptor(self) -> int | None:
        """Readable when there is a doubt to look into. None before this is started, and when it is closed."""
        return self._notice

    def take_notice(self) -> None:
        """Before a look: from now on the descriptor tells of the next doubt."""
        with busy, self._noticing, contextlib.suppress(BlockingIOError):
            if self._notice is not None:
                os.eventfd_read(self._notice)

    def close(self) -> None:
        """Ends the watch. Idempotent."""
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

    def _miss(self, name: str, why: str) -> None:
        """A member's record is gone. It is given up at once if nothing else explains that."""
        if self._board.find(name) is None:
            return
        self._unlisted.add(name, self._contact.forgiven_until(), why)
        self._unlisted.settle(self._give_up)

    def _give_up(self, name: str, why: str) -> bool:
        """Takes a member off the board whose record is gone. False: not now; it is looked at again.

        A peer that this process had a link to must learn that it was dropped, so that is written down first. If the
        member is back before that, it was not dropped.
        """
        member = self._board.find(name)
        if member is None:
            return True
        own = self._keys.member(name) in self.own
        if own or (self.witness is not None and self.witness.is_linked(member)):
            return False
        try:
            if self.witness is not None and self.witness.has_parted(member) and not self._drop(member):
                return not self._unlisted.has(name)
        except (NoAnswer, Unreachable):
            return False
        except Denied as error:  # one that may only read tells nobody
            _log.warning("%s cannot be told that it was dropped: %s", name, error, extra=member._log_fields(str(error)))
        with busy, self._showing:
            if self._unlisted.has(name):  # else its record came back meanwhile
                self._board.remove(name, "lost", why)
        return True

    def _drop(self, member: Member) -> bool:
        """Writes down that a peer was dropped. False: its record is there again, or another one's of its name."""
        key = self._keys.dropped(member.epoch)
        timeout_s = max(1.0, self._heartbeat_s)
        by_nobody_yet = [absent(key), absent(self._keys.member(member.name))]
        with self._dropping:
            granted = self._checker.call("lease/grant", {"TTL": str(_DROPPED_S), "ID": "0"}, timeout_s)
            lease = int(granted["ID"])
            change = {
                "compare": by_nobody_yet,
                "success": [put(key, str(member.term).encode(), lease)],
                "failure": [{"request_range": {"key": encode(key)}}],
            }
            answer = self._checker.call("kv/txn", change, timeout_s, authenticate_s=AUTHENTICATE_S)
            if answer.get("succeeded"):
                return True
            self._checker.call("lease/revoke", {"ID": str(lease)}, timeout_s)
        return bool(values(answer["responses"][0].get("response_range", {})))

    def _silence_of(self, stream: Stream) -> str:
        """Why a watch that has been silent for a lease should have told something; "" if all is well.

        Asked beside it, of the same endpoint. What is deleted is told by the number of keys, all else by revisions.
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
            return f"etcd does not answer any more: {error}"
        changed, there = (one.get("response_range", {}) for one in answer["responses"])
        missed = changed.get("kvs") or int(there.get("count", 0)) != count
        missed = missed or int(answer["header"]["revision"]) < revision  # it is another one, that has forgotten all
        if self._heard != heard or self._stream is not stream:
            return ""  # it has told something just now, or is another one
        self._has_missed |= bool(missed)
        return "it is silent, although something has happened" if missed else ""

    def _raise_doubt(self) -> None:
        """Lets the tender look after this process's own keys, if it has any."""
        if not self.own:
            return
        self.doubt = True
        with busy, self._noticing:
            if self._notice is not None:
                os.eventfd_write(self._notice, 1)

    def _log_fields(self, why: str) -> dict[str, object]:
        """For `extra`: which etcd, why, and which member and lease of this process depend on it; or "" and 0."""
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
                _log.exception("the watch of etcd has failed; it begins anew", extra=self._log_fields(str(error)))
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
                why = "etcd has come back without what it knew"
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
                _log.info("the watch of etcd was cancelled (%s); all is read again", why, extra=self._log_fields(why))
                self._revision = 0
                return
            events = message.get("events", ())
            self._take_events(events)
            if not events and not message.get("created"):  # nothing is under way: a sign of life that etcd gives
                self._revision = max(self._revision, int(message.get("header", {}).get("revision", 0)))

    def _take_events(self, events: Iterable[dict[str, Any]]) -> None:
        """Shows what has happened.

        All is seen up to an event's own revision, not up to that of the message: etcd tells the past in portions, each
        under the revision that it has now; and says that one before all, when it begins.
        """
        for event in events:
            value = Value.read(event["kv"])
            deleted = event.get("type") == "DELETE"
            if deleted or event["kv"].get("version") == "1":
                self._count += -1 if deleted else 1
            if value.key == self._keys.ids:
                self._note_ids(value.content)
            elif value.key.startswith(self._keys.members) and deleted:
                self._miss(self._keys.name_of(value.key), _RUN_OUT)
            elif value.key.startswith(self._keys.members):
                self._show([value])
            if self.own.get(value.key, value.lease) != value.lease:
                self._raise_doubt()
            self._revision = max(self._revision, value.revision)

    def _note_ids(self, content: bytes) -> None:
        """A counter that is gone, cannot be read or has gone back is mended by a member that looks (etcd_entry.py)."""
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
                self._put_on_board(record)

    def _put_on_board(self, record: Member) -> None:
        if record.state == "left":
            self._board.remove(record.name, "left", "it has said goodbye")
        elif record.state == "ended":
            self._board.remove(record.name, "lost", "its process has ended")
        else:
            self._board.show(record)

    def _read_birth(self, timeout_s: float) -> tuple[str | None, int]:
        """The mark of etcd's data, None when it has none; and its revision."""
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
