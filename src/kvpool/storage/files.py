"""One file of a `DirectoryStore`: written, read, and told from what else may lie in its place.

A file is written beside its place and renamed, under a lock that says that its writer lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

__all__ = [
    "but_misplaced",
    "has_no_writer",
    "is_misplaced",
    "made_ns",
    "missing_if_stale",
    "read_all",
    "write_and_rename",
]

_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BUFFERS_MAX: Final = 1024  # IOV_MAX of Linux
_LEFT_AFTER_NS: Final = 600 * 10**9  # a new file without a lock: locks may be seen by the writer's host alone
_LEFT_WITHOUT_LOCKS_NS: Final = 3600 * 10**9
_MISPLACED: Final = (
    errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ENXIO, errno.EACCES, errno.EPERM
)  # fmt: skip


def is_misplaced(error: OSError) -> bool:
    """Whether it says that something else lies in one place of a store, and nothing about the others."""
    return error.errno in _MISPLACED


def read_all(descriptor: int, buffers: Sequence[memoryview]) -> int:
    """Reads from the beginning until the buffers are full or the file ends; returns how many bytes were read."""
    return _vectored(lambda left, done: os.preadv(descriptor, left, done), buffers)


@contextmanager
def but_misplaced() -> Iterator[None]:
    """Goes on after what it does about a file that is gone, or no file of a store."""
    try:
        yield
    except OSError as error:
        if not (is_misplaced(error) or error.errno in (errno.ENOENT, errno.ESTALE)):
            raise


@contextmanager
def missing_if_stale() -> Iterator[None]:
    """On NFS a file may be removed by another host while this one opens it."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise FileNotFoundError(errno.ENOENT, "removed meanwhile") from error
        raise


def write_and_rename(folder: int, name: str, buffers: Sequence[memoryview | bytes], flush: bool = False) -> int:
    """Writes a file; the time of the file system when it did."""
    new = f".{secrets.token_hex(16)}.new"
    descriptor = os.open(new, _WRITE, 0o600, dir_fd=folder)
    try:
        with contextlib.suppress(OSError):  # a file system without locks; then age says whose writer has died
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        wanted = sum(memoryview(buffer).nbytes for buffer in buffers)
        written = _vectored(lambda left, done: os.pwritev(descriptor, left, done), [memoryview(b) for b in buffers])
        if written != wanted:
            raise OSError(errno.EIO, f"{written} of {wanted} bytes were written")
        if flush:
            os.fsync(descriptor)
        # NFS sends what it holds, and says what failed, when a descriptor is closed. The lock stays with the other one.
        os.close(os.dup(descriptor))
        written_ns = os.fstat(descriptor).st_mtime_ns
        os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
        return written_ns
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new, dir_fd=folder)
        raise
    finally:
        os.close(descriptor)


def made_ns(folder: int) -> int:
    """The time of a file system, by a file that is made in a folder and removed again."""
    name = f".{secrets.token_hex(16)}.new"
    descriptor = os.open(name, _WRITE, 0o600, dir_fd=folder)
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)
        os.unlink(name, dir_fd=folder)


def _vectored(call: Callable[[list[memoryview], int], int], buffers: Sequence[memoryview]) -> int:
    left = [buffer for buffer in buffers if buffer.nbytes]
    done = 0
    while left:
        moved = call(left[:_BUFFERS_MAX], done)
        if moved == 0:
            break
        done += moved
        while moved and left:
            taken = min(moved, left[0].nbytes)
            moved -= taken
            if taken == left[0].nbytes:
                left.pop(0)
            else:
                left[0] = left[0][taken:]
    return done


def has_no_writer(folder: int, name: str, age_ns: int) -> bool:
    """Whether the writer of a new file has died: nobody has a lock on it, and nobody has written to it for a while."""
    if age_ns <= _LEFT_AFTER_NS:
        return False
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return age_ns > _LEFT_WITHOUT_LOCKS_NS
    else:
        return True
    finally:
        os.close(descriptor)
