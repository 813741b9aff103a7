"""What can be seen of the members in etcd, shown on a board: a watch that goes on where it was broken off.

The watch is resumed from the revision after the last that was seen. Everything is read again only at first, when
etcd has compacted what was missed, and when it has come back with nothing in it.

A connection can be dead without anybody being told: half-open, or through something that forwards nothing any more. So
a watch that has been silent for a lease is checked beside it: whether its endpoint answers, and whether a key has
changed, come or gone since. If so all is read again, and watched from there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

from kvpool.cluster.board import Board
from kvpool.cluster.etcd_keys import Ids, Keys, Value, values
from kvpool.cluster.gateway import AUTHENTICATE_S, Denied, Gateway, NoAnswer, Options, Stream, encode
from kvpool.waiting import busy

__all__ = ["EtcdView"]

_SOON_S: Final = 0.02
_RUN_OUT: Final = "its lease has run out, or somebody has deleted its record"
_NOT_BACK: Final = "it has not come back to an etcd that has lost its memory"

_log = logging.getLogger("kvpool.cluster")


class EtcdView:
    """A thread that reads the watch. `read_all` comes first, `start` then; any thread may call the rest.

    Attributes:
        lease_s: Of the members, and for how long a watch may be silent before it is checked.
        highest: The highest id that was given, as the counter has last said.
        own: The keys of this process's own member, and the lease on which they stand.
        doubt: Something has happened to those, or to all that etcd knew, that they may not have outlived.
        told_lost: The watch has told of the end of the member's own record: others were told that it is lost.
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
        self.highest = 0
        self.own: tuple[frozenset[str], int] = frozenset(), 0
        self.doubt = self.told_lost = False
        self._notice: int | None = None
        self._noticing = threading.Lock()  # it is not written to once it is closed
        self._heard = self._checked = time.monotonic()
        self._missing: dict[str, float] = {}  # until when each may come back, after etcd had lost its memory
        self._stream: Stream | None = None
        self._lock = threading.Lock()  # of the two above
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
        keys, lease = self.own
        if not any(value.key in keys and value.lease == lease for value in seen):
            self._raise_doubt()
        there = {self._keys.name_of(value.key) for value in seen}
        gone = [member.name for member in self._board.members() if member.name not in there]
        for name in gone:
            if forgotten:
                with self._lock:
                    self._missing.setdefault(name, time.monotonic() + 2 * self.lease_s)
            else:
                self.told_lost |= self._keys.member(name) in self.own[0]
                self._board.remove(name, "lost", _RUN_OUT)
        self._show(seen)

    def start(self) -> None:
        """Begins to watch."""
        self._notice = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread.start()

    def tend(self) -> None:
        """Gives up on who did not come back, and on a connection behind which there is nobody any more."""
        now = time.monotonic()
        with self._lock:
            late = [name for name, until in self._missing.items() if now >= until]
            for name in late:
                del self._missing[name]
            stream = self._stream
        for name in late:
            self._board.remove(name, "lost", _NOT_BACK)
        if stream is not None and now - max(self._heard, self._checked) > self.lease_s:
            self._checked = now
            why = self._silence_of(stream)
            if why:
                _log.warning("the watch of etcd is begun again: %s", why, extra=self._log_fields(why))
                stream.stop()

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
        if not self.own[0]:
            return
        self.doubt = True
        with busy, self._noticing:
            if self._notice is not None:
                os.eventfd_write(self._notice, 1)

    def _log_fields(self, why: str) -> dict[str, object]:
        """For `extra`: which etcd, why, and which member and lease of this process depend on it; or "" and 0."""
        keys, lease = self.own
        own = (self._keys.name_of(key) for key in keys if key.startswith(self._keys.members))
        return {"address": self._gateway.address, "member": next(own, ""), "lease": lease, "why": why}

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
                self._board.remove(self._keys.name_of(value.key), "lost", _RUN_OUT)
            elif value.key.startswith(self._keys.members):
                self._show([value])
            keys, lease = self.own
            if value.key in keys and value.lease != lease:
                self.told_lost |= deleted and value.key.startswith(self._keys.members)
                self._raise_doubt()
            self._revision = max(self._revision, value.revision)

    def _note_ids(self, content: bytes) -> None:
        before = self._birth
        if not content:
            self._birth = None
            self._raise_doubt()  # without it ids are given again
            return
        ids = Ids.read(content)
        self._birth = ids.birth
        # A counter that was begun anew knows less; one that goes on may have begun from 1 again.
        self.highest = ids.highest if ids.birth == before else max(self.highest, ids.highest)

    def _show(self, seen: Iterable[Value]) -> None:
        for value in seen:
            record = self._keys.record(value)
            if record is None:
                continue
            with self._lock:
                self._missing.pop(record.name, None)
            if record.state == "left":
                self._board.remove(record.name, "left", "it has said goodbye")
            else:
                self._board.show(record)

    def _read_birth(self, timeout_s: float) -> tuple[str | None, int]:
        """The mark of etcd's data, None when it has none; and its revision."""
        body = {"key": encode(self._keys.ids)}
        answer = self._gateway.call("kv/range", body, timeout_s, authenticate_s=AUTHENTICATE_S)
        found = values(answer)
        return (Ids.read(found[0].content).birth if found else None), int(answer["header"]["revision"])
