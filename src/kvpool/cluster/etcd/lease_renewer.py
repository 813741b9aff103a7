"""The lease renewer: a small process that renews a member's lease in etcd, however busy the member's interpreter is.

It renews while the member's process lives (a pidfd) and sends heartbeats (word 0 of a shared page, written by a thread
of C++). When the member ends, in whatever way, the renewer marks its record as that of an ended process and revokes the
leases of record and id. So the others learn of it at once, and can tell it from a silence. Then the renewer ends, too.
It does not renew the lease of a stopped member.

    page    0 beat │ 1 lapses (cpp/kvpool/base/heartbeat.h)
            2 until when the lease is certainly held │ 3 when the renewer acts next │ 4 unanswered renewals:
            written by the renewer. If it is overdue it hangs or is stopped, which its member handles
    stdin   first a line of JSON; then {"lease": ID, "ttl_s": SECONDS, "key": KEY, "id_lease": ID} for each lease that
            replaces the former one. KEY is the key of the record on that lease, as in etcd's JSON
    stdout  first {"ready": true}; then {"gone": ID} if etcd does not know a lease

All times are CLOCK_MONOTONIC. The time until which the lease is held counts from before the renewal was sent: etcd
cannot have started to count earlier.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import sys
import time
from typing import Any, Final

from kvpool.cluster.etcd.gateway import Denied, Gateway, NoAnswer, Options, decode, encode

__all__ = ["DUE_WORD", "FAILED_WORD", "PAGE_BYTES", "UNTIL_WORD", "LeaseRenewer", "main"]

PAGE_BYTES: Final = 4096
BEAT_WORD: Final = 0
UNTIL_WORD: Final = 2
DUE_WORD: Final = 3
FAILED_WORD: Final = 4
_REVOKE_S: Final = 2.0
_AGAIN_S: Final = 0.2  # before a revocation that was not answered is tried again
_LINE_BYTES_MAX: Final = 1 << 16


class LeaseRenewer:
    """Renews one lease at a time."""

    def __init__(self, first: dict[str, Any]) -> None:
        """`first` is the first line from the member."""
        options = dict(first["options"])
        options["hosts"] = tuple((host, port) for host, port in options["hosts"])
        self._gateway = Gateway(Options(**options))
        self._heartbeat_s = float(first["heartbeat_s"])
        self._page = memoryview(mmap.mmap(int(first["page"]), PAGE_BYTES)).cast("q")
        self._parent = int(first["parent"])
        self._lease: int | None = None
        self._ttl_s = 0.0
        self._has_password = bool(options["user"])
        self._key = ""
        self._id_lease = 0
        self._next = 0.0
        self._line = b""

    def run(self) -> None:
        """Runs until the member ends or closes stdin."""
        try:
            parent = os.pidfd_open(self._parent)
        except ProcessLookupError:
            parent = -1
        if (
            parent < 0 or os.getppid() != self._parent
        ):  # the member has already ended, perhaps after it had sent a lease
            self._take_orders()
            self._revoke()
            return
        self._promise(self._heartbeat_s)
        os.write(sys.stdout.fileno(), b'{"ready": true}\n')
        poll = select.poll()
        poll.register(parent, select.POLLIN)
        poll.register(sys.stdin.fileno(), select.POLLIN)
        while True:
            wait_s = max(0.0, self._next - time.monotonic()) if self._lease else 3600.0
            self._promise(wait_s)
            ready = {descriptor for descriptor, _ in poll.poll(wait_s * 1000)}
            if parent in ready or (sys.stdin.fileno() in ready and not self._take_orders()):
                while poll_once(sys.stdin.fileno()) and self._take_orders():
                    pass  # a lease that the member sent just before its end
                self._revoke()
                return
            if self._lease and time.monotonic() >= self._next:
                self._next = time.monotonic() + self._renew(self._lease)

    def _take_orders(self) -> bool:
        """Reads orders from stdin. False at its end."""
        content = os.read(sys.stdin.fileno(), _LINE_BYTES_MAX)
        self._line += content
        *lines, self._line = self._line.split(b"\n")
        for line in lines:
            order = json.loads(line)
            self._lease, self._ttl_s, self._next = int(order["lease"]), float(order["ttl_s"]), 0.0
            self._key, self._id_lease = str(order["key"]), int(order["id_lease"])
        return bool(content)

    def _renew(self, lease: int) -> float:
        """Returns the seconds until the next renewal."""
        soon_s = self._heartbeat_s / 4
        sent_ns = time.monotonic_ns()
        if sent_ns - self._page[BEAT_WORD] > self._ttl_s / 2 * 1e9:
            return soon_s  # stopped; or delayed, and then half a lease is left for its next heartbeat
        try:
            # Long enough to be worth a try, but short enough to try the next endpoint before the lease expires.
            timeout_s = max(self._heartbeat_s, self._ttl_s / 3)
            self._promise_answer(timeout_s)
            answer = self._gateway.call("lease/keepalive", {"ID": str(lease)}, timeout_s, authenticate_s=self._ttl_s)
        except (NoAnswer, Denied):
            self._page[FAILED_WORD] += 1
            return soon_s
        ttl_s = int((answer.get("result") or {}).get("TTL", 0))
        if ttl_s > 0:
            self._page[UNTIL_WORD] = sent_ns + ttl_s * 1_000_000_000
            return self._heartbeat_s
        if self._has_key(lease):
            return soon_s
        self._lease = None
        os.write(sys.stdout.fileno(), json.dumps({"gone": lease}).encode() + b"\n")
        return 0.0

    def _has_key(self, lease: int) -> bool:
        """Whether the key is still on a lease that etcd has just reported as unknown, or etcd cannot tell.

        An etcd before 3.5.3 that has just started or become the leader reports leases as unknown that it has not loaded
        yet. It serves a key only after it has loaded everything, and deletes it with its lease.
        """
        try:
            timeout_s = max(self._heartbeat_s, self._ttl_s / 3)
            self._promise_answer(timeout_s)
            answer = self._gateway.call("kv/range", {"key": self._key}, timeout_s, authenticate_s=self._ttl_s)
        except NoAnswer:
            return True
        except Denied:
            return False
        return any(int(one.get("lease", 0)) == lease for one in answer.get("kvs", ()))

    def _promise(self, within_s: float) -> None:
        """Writes into the page that the renewer acts again within so many seconds, whatever etcd does."""
        self._page[DUE_WORD] = time.monotonic_ns() + int(within_s * 1e9)

    def _promise_answer(self, timeout_s: float) -> None:
        """The same, before a request with this timeout, plus the time to check a password."""
        self._promise(timeout_s + (self._ttl_s if self._has_password else 0.0))

    def _revoke(self) -> None:
        """Marks the record as ended and revokes the leases."""
        until = time.monotonic() + self._ttl_s  # then the lease has expired anyway
        leases = [lease for lease in (self._lease, self._id_lease) if lease]
        while leases and time.monotonic() < until:
            try:
                if self._lease:
                    self._mark_ended(until)
                while leases:
                    self._revoke_lease(leases[-1], until)
                    leases.pop()
            except Denied:
                return
            except NoAnswer:
                time.sleep(_AGAIN_S)

    def _revoke_lease(self, lease: int, until: float) -> None:
        try:
            self._ask("lease/revoke", {"ID": str(lease)}, until)
        except NoAnswer as error:
            if not error.is_missing:
                raise

    def _mark_ended(self, until: float) -> None:
        """Writes into the record that its process has ended, if the record is still on the lease."""
        found = self._ask("kv/range", {"key": self._key}, until).get("kvs", [])
        if not found or int(found[0].get("lease", 0)) != self._lease:
            return  # the member has left
        try:
            record = json.loads(decode(found[0]["value"])) | {"state": "ended"}
        except (ValueError, TypeError):
            return
        ours = {"key": self._key, "target": "LEASE", "result": "EQUAL", "lease": str(self._lease)}
        put = {"key": self._key, "value": encode(json.dumps(record)), "lease": str(self._lease)}
        self._ask("kv/txn", {"compare": [ours], "success": [{"request_put": put}]}, until)

    def _ask(self, path: str, body: dict[str, Any], until: float) -> dict[str, Any]:
        return self._gateway.call(path, body, _REVOKE_S, authenticate_s=until - time.monotonic())


def poll_once(descriptor: int) -> bool:
    """Whether there is something to read, or the end of the file."""
    return bool(select.select([descriptor], [], [], 0)[0])


def main() -> None:
    """The main function of the process, which renewer_process.py starts."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            return
        line += byte
    with contextlib.suppress(BrokenPipeError):  # the member has ended
        LeaseRenewer(json.loads(line)).run()
