"""The member's side of its lease renewer: starts the process, sends it leases, and reads which are gone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from kvpool import _core
from kvpool.cluster.directory import Unreachable
from kvpool.cluster.etcd.gateway import Options, encode
from kvpool.cluster.etcd.lease_renewer import DUE_WORD, FAILED_WORD, PAGE_BYTES, UNTIL_WORD
from kvpool.errors import DeadlineExceeded, Unsupported

__all__ = ["RenewerProcess"]

# Skips the __init__.py of the packages, which import NumPy and the core: half a second, and 40 MiB.
_BOOT: Final = """
import sys, types
for name, path in (("kvpool", sys.argv[1]), ("kvpool.cluster", sys.argv[1] + "/cluster")):
    package = types.ModuleType(name)
    package.__path__ = [path]
    sys.modules[name] = package
from kvpool.cluster.etcd.lease_renewer import main
main()
"""
_END_S: Final = 4.0
_START_S: Final = 10.0  # for a new process to start on a busy machine


class RenewerProcess:
    """A lease renewer that runs, or is being started again. For one thread, unless a method says otherwise."""

    def __init__(self, options: Options, heartbeat_s: float, lease_s: float) -> None:
        """Starts the process.

        Raises:
            Unsupported: It cannot be started.
        """
        if not sys.executable:
            raise Unsupported("register: sys.executable names no Python that could run the lease renewer")
        self._options = options
        self._heartbeat_s = heartbeat_s
        self._line = b""
        self._lease: tuple[int, float, str, int] | None = None
        self._patient_until = 0.0  # for a process that was started again
        try:
            self._page = os.memfd_create("kvpool-renewer", os.MFD_CLOEXEC)
        except OSError as error:
            raise _cannot_start(error) from error
        try:
            os.ftruncate(self._page, PAGE_BYTES)
            self._map = mmap.mmap(self._page, PAGE_BYTES)
            self._words = memoryview(self._map).cast("q")
            self.heartbeat = _core.Heartbeat(self._page, heartbeat_s / 2, lease_s)
        except BaseException:
            os.close(self._page)
            raise
        try:
            self._process = self._start()
        except BaseException:
            self._drop_page()
            raise

    @property
    def valid_until_ns(self) -> int:
        """Until when the lease is certainly held (CLOCK_MONOTONIC); 0 after `close`. Any thread."""
        try:
            return self._words[UNTIL_WORD]
        except ValueError:  # it was released
            return 0

    @property
    def failed(self) -> int:
        """How many renewals etcd did not answer; 0 after `close`. Any thread."""
        try:
            return self._words[FAILED_WORD]
        except ValueError:
            return 0

    def silent_s(self) -> float:
        """For how long it is overdue: then it hangs, is stopped, or has ended. Any thread."""
        try:
            return max(0.0, (time.monotonic_ns() - self._words[DUE_WORD]) / 1e9)
        except ValueError:
            return 0.0

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def descriptor(self) -> int:
        """Becomes readable when the process has written a line or ended. Raises ValueError after `close`."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def wait_ready(self, until: float) -> None:
        """Waits until the process runs. A lease granted before might expire while a busy machine starts a process.

        Raises:
            DeadlineExceeded: It does not run by then (time.monotonic()).
            Unsupported: The process has ended.
        """
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout.fileno(), select.POLLIN)
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            raise DeadlineExceeded("register: the lease renewer did not start in time")
        self._line = os.read(self._process.stdout.fileno(), 1 << 16)
        if not self._line:
            raise Unsupported("register: the lease renewer ended at once")

    def keep(self, lease: int, ttl_s: float, granted_ns: int, key: str, id_lease: int) -> None:
        """Renews this lease from now on. It was asked for at `granted_ns`, and `key` is the record on it.

        The renewer does not renew the lease of the id, but revokes both leases when the member has ended.
        """
        self._lease = (lease, ttl_s, encode(key), id_lease)
        self._words[UNTIL_WORD] = granted_ns + int(ttl_s * 1e9)
        # An idle renewer has to act now, and an overdue one gets no more time.
        self._words[DUE_WORD] = min(self._words[DUE_WORD], time.monotonic_ns() + int(self._heartbeat_s * 1e9))
        self._order()

    def gone(self) -> bool:
        """Whether etcd does not know the lease. Starts the process again if it has ended or hangs.

        Raises:
            Unreachable: The process cannot be started again now; call again.
        """
        assert self._process.stdout is not None
        try:
            content = os.read(self._process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            content = None
        if content == b"" or self._hangs():
            self._start_again()
            return False
        *lines, self._line = (self._line + (content or b"")).split(b"\n")
        return any(self._lease is not None and json.loads(line).get("gone") == self._lease[0] for line in lines)

    def close(self) -> None:
        """Ends the process, which revokes the lease. Idempotent."""
        _hang_up(self._process)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._drop_page()

    def abandon(self) -> None:
        """In a forked child: the pipes are the parent's."""
        _hang_up(self._process)
        self._process.returncode = 0  # the process is no child of this one, so it cannot be waited for

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, str(Path(__file__).parents[2])],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[self._page], bufsize=0,
                start_new_session=True,  # so that Ctrl-C reaches only the member
            )  # fmt: skip
        except OSError as error:
            raise _cannot_start(error) from error
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        first = {
            "options": dataclasses.asdict(self._options),
            "heartbeat_s": self._heartbeat_s,
            "page": self._page,
            "parent": os.getpid(),
        }
        _tell(process, first)
        return process

    def _hangs(self) -> bool:
        """Whether it is so overdue that a new process must take over, before the lease is lost."""
        if self._lease is None or time.monotonic() < self._patient_until:
            return False
        return self.silent_s() > self._lease[1] / 2

    def _start_again(self) -> None:
        """Replaces the process. The old one stays until a new one runs, so that `gone` tries again if that fails."""
        time.sleep(self._heartbeat_s / 8)  # so that a process that cannot run is not started in a busy loop
        try:
            fresh = self._start()
        except Unsupported as error:
            raise Unreachable(str(error)) from error
        old, self._process = self._process, fresh
        self._line, self._patient_until = b"", time.monotonic() + _START_S
        old.kill()  # before closing its stdin: if it woke up then, it would end normally and revoke the lease
        _hang_up(old)
        if self._lease is not None:
            self._order()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel; subprocess reaps it later
            old.wait(_END_S)

    def _order(self) -> None:
        assert self._lease is not None
        _tell(self._process, dict(zip(("lease", "ttl_s", "key", "id_lease"), self._lease, strict=True)))

    def _drop_page(self) -> None:
        self.heartbeat.stop()
        if self._page >= 0:
            self._words.release()
            self._map.close()
            os.close(self._page)
            self._page = -1


def _cannot_start(error: OSError) -> Unsupported:
    return Unsupported(f"register: the lease renewer cannot be started: {error.strerror}", errno=error.errno)


def _tell(process: subprocess.Popen[bytes], order: dict[str, object]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the process has ended, which `gone` notices
        process.stdin.write(json.dumps(order).encode() + b"\n")


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
