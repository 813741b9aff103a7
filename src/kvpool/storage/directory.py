"""A store in a folder: on a local disk, or on a file system that hosts share, such as NFS."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from kvpool.arguments import int_from, seconds_from, shown
from kvpool.errors import ArgumentError, ArgumentTypeError, ClosedError, DeadlineExceeded, ForkError, StoreFailed
from kvpool.storage.block_file import HEADER_BYTES, Fault, content_fault, header_fault, header_of
from kvpool.storage.counting import Seldom, StoreCounter
from kvpool.storage.files import is_misplaced, missing_if_stale, read_all
from kvpool.storage.folders import FOLDERS, Folders, StoredFile
from kvpool.storage.store import Content, StoreStats, Trimmed, check_contents, check_keys, content_bytes, size_limit
from kvpool.storage.sweeping import Sweep, victims

__all__ = ["DirectoryStore"]

_log = logging.getLogger("kvpool.storage")

_TOUCH_NS: Final = 60 * 10**9  # a block's last use is written down at most this often
_RETRY_S: Final = 30.0  # after a write that the file system refused
_UNREADABLE: Final = (errno.EIO, errno.EUCLEAN, errno.EBADMSG)  # perhaps of one file: its sectors, or its checksums
_UNREADABLE_MAX: Final = 3  # one after the other: then it is the file system

_Item = TypeVar("_Item")


class DirectoryStore:
    """A `Store` in a folder that any number of processes and hosts share without a coordinator. Thread-safe.

    A block is one file. It is written beside its place and renamed, so a reader sees all of it or nothing, also when
    the writer is killed. Every read verifies the header, the size and a checksum; a file that fails is a miss, counted,
    and removed if it is this store's. Nothing is flushed to the medium: after a loss of power, a block that was not all
    written is such a miss.

    When the file system refuses a write (full, read-only, broken), the store warns once, goes on as read-only, and
    tries again after 30 seconds.

    Args:
        path: The folder. Created with mode 0700 if it does not exist; else it must be empty, or a store already.
        size_max: Bytes that all files together may have; None: no limit. While it is written to, the store removes the
            least recently used blocks by itself, a few for each that is written, and may be larger by a quarter. Uses
            count to the minute.
        age_max_s: Seconds since its last use after which a block is removed; None: never. Checked while the store is
            written to, and by `trim`.

    Raises:
        StateError: The folder has files and is no store, or a store of another version. Nothing was changed.
        StoreFailed: It cannot be created or opened.
        ArgumentError, ArgumentTypeError: A bad argument.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, size_max: int | None = None, age_max_s: float | None = None
    ) -> None:
        if size_max is not None and (size_max := int_from(size_max, "size_max")) < 1:
            raise ArgumentError(f"size_max is {size_max}; it must be at least 1", value=size_max)
        if not isinstance(path, str) and not isinstance(getattr(path, "__fspath__", bytes)(), str):
            raise ArgumentTypeError(f"path must be a str or a Path, not {type(path).__name__} ({shown(path)})")
        self.path: Final = os.path.abspath(os.fspath(path))
        self._size_max = size_max
        self._age_max_s = None if age_max_s is None else seconds_from(age_max_s, "age_max_s")
        self._counter = StoreCounter()
        self._bad = Seldom()
        self._refused = Seldom()
        self._unreadable = 0  # files since one could be read
        self._lock = threading.Lock()  # of the sweep and what follows
        self._sweep = Sweep(size_max, self._age_max_s, secrets.randbelow(FOLDERS))
        self._read_only_until = 0.0
        self._read_only_why: OSError | None = None
        self._running = 0
        self._process = os.getpid()
        self._closed = False
        self._ended = False
        try:
            self._folders = Folders(self.path)
        except OSError as error:
            raise _failed(f"cannot open the store {self.path}", error) from error

    # ---- reading

    def exists(self, keys: Sequence[bytes], *, timeout: float | None = None) -> list[bool]:
        """Whether a file is there under each key; see `Store.exists`."""
        check_keys(keys)
        with self._call("failed_reads", timeout) as deadline:
            return [
                size is not None and size > HEADER_BYTES for size in map(self._folders.size_of, deadline.each(keys))
            ]

    def get(self, keys: Sequence[bytes], into: Sequence[Content], *, timeout: float | None = None) -> list[bool]:
        """Reads blocks, each with one system call, and verifies them; see `Store.get`."""
        check_contents(keys, into)
        for position, content in enumerate(into):
            if any(piece.readonly for piece in content):
                raise ArgumentError(f"content {position} is read-only", position=position)
        found = [False] * len(keys)
        with self._call("failed_reads", timeout) as deadline, contextlib.suppress(DeadlineExceeded):
            for position, key in enumerate(deadline.each(keys)):
                found[position] = self._get(key, into[position])
        return found

    def _get(self, key: bytes, content: Content) -> bool:
        status: os.stat_result | None = None
        fault: Fault | None = None
        try:
            with self._folders.reading(key) as opened:
                if opened is None:
                    fault = "foreign"
                else:
                    descriptor, status = opened
                    with missing_if_stale():
                        fault = self._read(descriptor, status, key, content)
        except OSError as error:
            self._counter.add(misses=1)
            self._check_unreadable(error)
            return False
        self._unreadable = 0
        if fault is None:
            self._counter.add(hits=1, read_bytes=content_bytes(content))
            return True
        self._counter.add(misses=1, **{fault: 1})
        self._remove_bad(key, fault, status)
        return False

    def _read(self, descriptor: int, status: os.stat_result, key: bytes, content: Content) -> Fault | None:
        header = bytearray(HEADER_BYTES)
        read = read_all(descriptor, [memoryview(header), *content])
        fault = header_fault(bytes(header[:read]), key, content, status.st_size)
        if fault is None and read != status.st_size:
            fault = "torn"
        if fault is None:
            fault = content_fault(bytes(header), content)
        if fault is None and self._folders.now_ns() - status.st_mtime_ns > _TOUCH_NS:
            _touch(descriptor)
        return fault

    def _check_unreadable(self, error: OSError) -> None:
        """Goes on after a file that is not there, or cannot be read. The file system may be well, and so may the file.

        Raises:
            OSError: It is not about one file, or there were too many one after the other.
        """
        if isinstance(error, FileNotFoundError):
            return
        if error.errno not in _UNREADABLE:
            raise error
        self._counter.add(rotten=1)
        self._unreadable += 1
        if self._unreadable >= _UNREADABLE_MAX:
            raise error

    def _remove_bad(self, key: bytes, fault: Fault, status: os.stat_result | None) -> None:
        """Removes a file of which it is proved that it is bad, if nobody has written a good one meanwhile."""
        removed = False
        if status is not None:
            with contextlib.suppress(OSError):  # a disk that cannot be written to any more; the block stays a miss
                removed = self._folders.remove(key, only=status)
        if more := self._bad.due():
            _log.warning(
                "%s: block %s is %s%s; %d since the last such message", self.path, key.hex()[:16], fault,
                ", and was removed" if removed else "", more,
                extra={"store": self.path, "key": key.hex(), "fault": fault},
            )  # fmt: skip

    # ---- writing

    def put(self, keys: Sequence[bytes], contents: Sequence[Content], *, timeout: float | None = None) -> int:
        """Writes blocks that are not there yet; see `Store.put`."""
        check_contents(keys, contents)
        with self._call("failed_writes", timeout) as deadline, self._writing():
            return sum(self._put(key, content) for key, content in zip(deadline.each(keys), contents, strict=True))

    def _put(self, key: bytes, content: Content) -> bool:
        size = HEADER_BYTES + content_bytes(content)
        if self._folders.size_of(key) == size:
            self._counter.add(present=1)
            return False
        try:
            self._folders.write(key, [header_of(key, content), *content])
        except OSError as error:
            if not is_misplaced(error) or error.errno in (errno.EACCES, errno.EPERM):
                raise
            self._counter.add(foreign=1)
            self._say_refused(f"block {key.hex()[:16]} cannot be written to its place", error)
            return False
        self._counter.add(written=1, written_bytes=size - HEADER_BYTES)
        try:
            self._sweep_after(size)
        except OSError as error:  # the block is written all the same
            self._say_refused("what is too old or too much was not removed", error)
        return True

    def _say_refused(self, what: str, error: OSError) -> None:
        if more := self._refused.due():
            _log.warning(
                "%s: %s: %s; %d since the last such message", self.path, what, error.strerror, more,
                extra={"store": self.path, "errno": error.errno},
            )  # fmt: skip

    def delete(self, keys: Sequence[bytes], *, timeout: float | None = None) -> int:
        """Deletes blocks; see `Store.delete`."""
        check_keys(keys)
        with self._call("failed_writes", timeout) as deadline:
            deleted = sum(self._folders.remove(key) for key in deadline.each(keys))
            self._counter.add(deleted=deleted)
            return deleted

    def trim(
        self, *, size_max: int | None = None, age_max_s: float | None = None, timeout: float | None = None
    ) -> Trimmed:
        """Looks at all files, and removes what is too old or too much, the least recently used first.

        Also removes what writers that died have left. For a job that runs now and then; several may run at once.

        Args:
            size_max: Bytes that may stay; None: the store's.
            age_max_s: As in the class; None: the store's.
            timeout: Seconds.

        Raises:
            StoreFailed, DeadlineExceeded, ClosedError: As all methods of a Store.
        """
        size_max = self._size_max if size_max is None else size_limit(size_max)
        age_max_s = self._age_max_s if age_max_s is None else seconds_from(age_max_s, "age_max_s")
        with self._call("failed_writes", timeout) as deadline:
            files: list[StoredFile] = []
            leftovers = 0
            now = self._folders.now_ns(exactly=True)
            for number in deadline.each(range(FOLDERS)):
                found, removed = self._folders.cleaned(number)
                files += found
                leftovers += removed
            gone = self._folders.remove_all(victims(files, size_max, age_max_s, now))
        self._counter.add(deleted=len(gone), leftovers=leftovers)
        gone_bytes = sum(file.size for file in gone)
        return Trimmed(
            len(gone), gone_bytes, leftovers, len(files) - len(gone), sum(file.size for file in files) - gone_bytes
        )

    def _sweep_after(self, size: int) -> None:
        with self._lock:
            folders = self._sweep.written(size)
        found: list[list[StoredFile]] = []
        for number in folders:
            files, leftovers = self._folders.cleaned(number)
            self._counter.add(leftovers=leftovers)
            found.append(files)
            with self._lock:
                self._sweep.saw(number, files)
        for files in found:  # of the first few it is known only now how large the store is
            with self._lock:
                gone = self._sweep.gone(files, self._folders.now_ns())
            self._counter.add(deleted=len(self._folders.remove_all(gone)))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Refuses while the store is read-only, and makes it so when the file system refuses."""
        with self._lock:
            left, why = self._read_only_until - time.monotonic(), self._read_only_why
        if left > 0 and why is not None:
            raise _failed(f"the store {self.path} is read-only for {left:.0f} s more, after a write failed", why)
        try:
            yield
        except DeadlineExceeded:
            raise
        except OSError as error:
            with self._lock:
                first = self._read_only_until <= time.monotonic()
                self._read_only_until, self._read_only_why = time.monotonic() + _RETRY_S, error
            if first:
                _log.warning(
                    "%s is read-only for %.0f s: %s", self.path, _RETRY_S, error.strerror,
                    extra={"store": self.path, "errno": error.errno},
                )  # fmt: skip
            raise
        with self._lock:
            self._read_only_why = None

    # ---- the rest

    def stats(self) -> StoreStats:
        """What it has done so far, in this process."""
        self._check_process()
        with self._lock:
            read_only = self._read_only_why is not None and self._read_only_until > time.monotonic()
        return self._counter.read(read_only=read_only)

    def close(self) -> None:
        """Ends it; idempotent. Calls that are under way end as they would have."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            last = self._running == 0 and not self._ended
            self._ended = self._ended or last
        if last:
            self._folders.close()

    @contextmanager
    def _call(self, failures: str, timeout: float | None) -> Iterator[_Deadline]:
        deadline = _Deadline(timeout)
        self._check_process()
        with self._lock:
            if self._closed:
                raise ClosedError(f"the store {self.path} is closed")
            self._running += 1
        try:
            yield deadline
        except DeadlineExceeded:  # is an OSError, as a TimeoutError
            raise
        except OSError as error:
            self._counter.add(**{failures: 1})
            raise _failed(f"the store {self.path} failed", error) from error
        finally:
            self._leave()

    def _check_process(self) -> None:
        if os.getpid() != self._process:  # a thread of the parent may have had the lock, and is not there
            raise ForkError("this store belongs to the parent process: open one after the fork")

    def _leave(self) -> None:
        with self._lock:
            self._running -= 1
            closed = self._closed
        if closed:
            self.close()

    def __enter__(self) -> DirectoryStore:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()

    def __repr__(self) -> str:
        """Its path."""
        return f"DirectoryStore({self.path!r})"


class _Deadline:
    """The seconds of a call, looked at before each of its blocks."""

    def __init__(self, timeout: float | None) -> None:
        self._until = None if timeout is None else time.monotonic() + seconds_from(timeout, "timeout")

    def each(self, items: Sequence[_Item]) -> Iterator[_Item]:
        """The items; raises DeadlineExceeded in place of one for which no time is left."""
        for done, item in enumerate(items):
            if self._until is not None and time.monotonic() >= self._until:
                raise DeadlineExceeded(f"{done} of {len(items)} were done by the deadline")
            yield item


def _touch(descriptor: int) -> None:
    try:
        os.utime(descriptor)
    except OSError:
        return  # a file of another user, or a file system that is read-only: it then goes by the time it was written


def _failed(what: str, error: OSError) -> StoreFailed:
    return StoreFailed(f"{what}: {error.strerror or error}", errno=error.errno or 0)
