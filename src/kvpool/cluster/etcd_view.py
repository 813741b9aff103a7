"""What can be seen of the members in etcd, shown on a board: a watch that goes on where it was broken off.

The watch is resumed from the revision after the last that was seen. Everything is read again only at first, when
etcd has compacted what was missed, and when it has come back with nothing in it.
"""

from __future__ import annotations

import logging
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

_log = logging.getLogger("kvpool.cluster")


class EtcdView:
    """A thread that reads the watch. `read_all` comes first, `start` then; any thread may call the rest."""

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
        ranges = ({"key": encode(self._keys.ids)}, self._keys.all_members())
        body = {"success": [{"request_range": one} for one in ranges]}  # both of one revision
        answer = self._gateway.call("kv/txn", body, timeout_s, authenticate_s=authenticate_s)
        counted, seen = (values(one.get("response_range", {})) for one in answer["responses"])
        birth = Ids.read(counted[0].content).birth if counted else None
        revision = int(answer["header"]["revision"])
        forgotten = self._birth is not None and (birth != self._birth or revision < self._revision)
        self._birth, self._revision = birth, revision
        there = {self._keys.name_of(value.key) for value in seen}
        gone = [member.name for member in self._board.members() if member.name not in there]
        for name in gone:
            if forgotten:
                with self._lock:
                    self._missing.setdefault(name, time.monotonic() + 2 * self.lease_s)
            else:
                self._board.remove(name, "lost")
        self._show(seen)

    def start(self) -> None:
        """Begins to watch."""
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
            self._board.remove(name, "lost")
        if stream is not None and now - max(self._heard, self._checked) > self.lease_s:
            self._checked = now
            try:
                body = {"key": encode(self._keys.ids)}
                timeout_s = max(1.0, self._heartbeat_s)
                endpoint = self._gateway.endpoint
                self._checker.call("kv/range", body, timeout_s, endpoint, authenticate_s=AUTHENTICATE_S)
            except (NoAnswer, Denied) as error:
                _log.warning("etcd does not answer any more: %s", error)
                stream.stop()

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
                    _log.warning("the watch of etcd is broken: %s", error)
            except Exception:
                _log.exception("the watch of etcd has failed; it begins anew")
                self._revision = 0
            wait_s = _SOON_S if self._heard != heard else min(2 * max(wait_s, _SOON_S), self._heartbeat_s)

    def _watch_once(self) -> None:
        timeout_s = max(self._heartbeat_s, 1.0)
        if self._revision == 0:
            self.read_all(timeout_s, AUTHENTICATE_S)
        else:
            birth, revision = self._read_birth(timeout_s)
            if birth != self._birth or revision < self._revision:
                _log.warning("etcd has come back without what it knew")
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
                _log.info("the watch of etcd was cancelled (%s); all is read again", message.get("cancel_reason", ""))
                self._revision = 0
                return
            self._take_events(message.get("events", ()))
            self._revision = max(self._revision, int(message.get("header", {}).get("revision", 0)))

    def _take_events(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            value = Value.read(event["kv"])
            if value.key == self._keys.ids:
                self._birth = Ids.read(value.content).birth if value.content else None
            elif not value.key.startswith(self._keys.members):
                continue
            elif event.get("type") == "DELETE":
                self._board.remove(self._keys.name_of(value.key), "lost")
            else:
                self._show([value])

    def _show(self, seen: Iterable[Value]) -> None:
        for value in seen:
            record = self._keys.record(value)
            if record is None:
                continue
            with self._lock:
                self._missing.pop(record.name, None)
            if record.state == "left":
                self._board.remove(record.name, "left")
            else:
                self._board.show(record)

    def _read_birth(self, timeout_s: float) -> tuple[str | None, int]:
        """The mark of etcd's data, None when it has none; and its revision."""
        body = {"key": encode(self._keys.ids)}
        answer = self._gateway.call("kv/range", body, timeout_s, authenticate_s=AUTHENTICATE_S)
        found = values(answer)
        return (Ids.read(found[0].content).birth if found else None), int(answer["header"]["revision"])
