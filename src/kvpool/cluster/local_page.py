"""The page of a local member: a file of 4 KiB that its process has locked, and in which it says that it runs.

    word 0  beat      CLOCK_MONOTONIC in ns, written by a thread of C++ (cpp/kvpool/base/beacon.h)
    word 1  lapses    how often it was silent for longer than its lease
    word 2  lease     in ns
    word 3  epoch     of the incarnation, to tell its record from another's
    word 4  instance  its id
    word 5  left      1: it has said goodbye
    word 6  magic

The lock is an open file description's: the kernel lets go of it when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from typing import Final

from kvpool import _core

__all__ = ["NEW_SUFFIX", "OwnPage", "SeenPage", "lock_file", "locked_by_another", "unlock_file"]

NEW_SUFFIX: Final = ".new"
_BYTES: Final = 4096
_MAGIC: Final = 0x6B76_706F_6F6C_0001
_WORDS: Final = struct.Struct("@qqqQqqq")  # native: words are copied whole, never byte by byte
_LEFT: Final = struct.Struct("@q")
_LEFT_AT: Final = 5 * 8
_FLOCK: Final = struct.Struct("@hhqqi4x")
_BEATS_A_HEARTBEAT: Final = 2


def lock_file(descriptor: int) -> bool:
    """Locks a file for its open file description. False: another one has it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except BlockingIOError:
        return False
    return True


def unlock_file(descriptor: int) -> None:
    """Lets go of the lock of its open file description, which forked children share."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))


def locked_by_another(descriptor: int) -> bool:
    """Whether another open file description has the lock. Nothing is locked by asking."""
    asked = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    return bool(_FLOCK.unpack(asked)[0] != fcntl.F_UNLCK)


class OwnPage:
    """The page of a member in this process. It beats from the moment it is made."""

    def __init__(
        self, folder: int, file: str, *, epoch: int, instance: int, lapses: int, heartbeat_s: float, lease_s: float
    ) -> None:
        """Makes the file, whole before anybody can see it: `publish` gives it its name.

        Raises:
            OSError: It cannot be made.
            Unsupported: Its thread cannot be started.
        """
        self._folder = folder
        self._file = file
        self.epoch = epoch
        self.instance = instance
        self._descriptor = os.open(
            file + NEW_SUFFIX, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder
        )
        try:
            os.ftruncate(self._descriptor, _BYTES)
            words = (time.monotonic_ns(), lapses, int(lease_s * 1e9), epoch, instance, 0, _MAGIC)
            os.pwrite(self._descriptor, _WORDS.pack(*words), 0)
            lock_file(self._descriptor)
            self._beacon: _core.Beacon | None = _core.Beacon(
                self._descriptor, heartbeat_s / _BEATS_A_HEARTBEAT, lease_s
            )
        except BaseException:
            os.close(self._descriptor)
            os.unlink(file + NEW_SUFFIX, dir_fd=folder)
            raise

    def publish(self) -> None:
        """Gives the file its name, in place of what has it."""
        os.rename(self._file + NEW_SUFFIX, self._file, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def is_at(self, folder: int) -> bool:
        """Whether the file of its name in a folder is this one."""
        try:
            there = os.stat(self._file, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    @property
    def fresh(self) -> bool:
        """Whether it has beaten within the lease. False when it is closed."""
        beacon = self._beacon
        return beacon is not None and beacon.fresh

    @property
    def lapses(self) -> int:
        """How often it was silent for longer than the lease."""
        beacon = self._beacon
        return 0 if beacon is None else beacon.lapses

    def say_goodbye(self) -> None:
        """What follows is a leave, not a death."""
        os.pwrite(self._descriptor, _LEFT.pack(1), _LEFT_AT)

    def close(self) -> None:
        """Lets go of the lock, which tells all that watch. Idempotent."""
        beacon, self._beacon = self._beacon, None
        if beacon is not None:
            beacon.stop()
        del beacon  # its mapping keeps the file open
        self.abandon()

    def abandon(self) -> None:
        """In a forked child: the lock is the parent's, and ends with it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SeenPage:
    """The page of a member, as others see it. It stays readable when the file's name is gone."""

    def __init__(self, descriptor: int) -> None:
        """Takes the descriptor over.

        Raises:
            ValueError: It is no page.
        """
        self.descriptor = descriptor
        try:
            if os.fstat(descriptor).st_size != _BYTES:
                raise ValueError("it has not the length of a page")
            self._map = mmap.mmap(descriptor, _BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            os.close(descriptor)
            raise
        self._map.madvise(mmap.MADV_DONTFORK)
        _, _, self.lease_ns, self.epoch, self.instance, _, magic = self._words()
        if magic != _MAGIC:
            self.close()
            raise ValueError("it is no page")

    @property
    def lapses(self) -> int:
        """How often the member was silent for longer than its lease."""
        return self._words()[1]

    @property
    def left(self) -> bool:
        """Whether it has said goodbye."""
        return self._words()[5] != 0

    def alive(self) -> bool:
        """Whether its process has the lock and was not silent for longer than its lease."""
        now = time.monotonic_ns()  # before the beat is read: see beacon.h
        return now - self._words()[0] <= self.lease_ns and self.is_locked()

    def is_locked(self) -> bool:
        """Whether its process is there, running or not."""
        return locked_by_another(self.descriptor)

    def is_file(self, folder: int, file: str) -> bool:
        """Whether the file of that name is this one."""
        try:
            there = os.stat(file, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self.descriptor))

    def close(self) -> None:
        """Lets go of it. Idempotent."""
        if self.descriptor >= 0:
            self._map.close()
            os.close(self.descriptor)
            self.descriptor = -1

    def _words(self) -> tuple[int, int, int, int, int, int, int]:
        words: tuple[int, int, int, int, int, int, int] = _WORDS.unpack_from(self._map)
        return words
