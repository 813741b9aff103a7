"""The page of a local member: a file of 4 KiB that its process has locked, with the heartbeat.

    word 0  beat        CLOCK_MONOTONIC in ns, written by a thread of C++ (cpp/kvpool/base/heartbeat.h)
    word 1  lapses      how often it was silent for longer than its lease
    word 2  lease       in ns
    word 3  incarnation to tell its record from that of another incarnation
    word 4  instance    its id
    word 5  left        1: it has announced its leave
    word 6  magic

The lock belongs to an open file description: the kernel releases it when the process ends, in whatever way.
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
_WORDS: Final = struct.Struct("@qqqQqqq")  # native: each word is copied at once, never byte by byte
_LEFT: Final = struct.Struct("@q")
_LEFT_AT: Final = 5 * 8
_FLOCK: Final = struct.Struct("@hhqqi4x")
_BEATS_A_HEARTBEAT: Final = 2


def lock_file(descriptor: int) -> bool:
    """Locks a file for its open file description. False: another one holds the lock."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except BlockingIOError:
        return False
    return True


def unlock_file(descriptor: int) -> None:
    """Releases the lock of its open file description, which forked children share."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))


def locked_by_another(descriptor: int) -> bool:
    """Whether another open file description holds the lock. Takes no lock."""
    asked = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    return bool(_FLOCK.unpack(asked)[0] != fcntl.F_UNLCK)


class OwnPage:
    """The page of a member in this process. Its heartbeat starts with its creation."""

    def __init__(
        self,
        folder: int,
        file: str,
        *,
        incarnation: int,
        instance: int,
        lapses: int,
        heartbeat_s: float,
        lease_s: float,
    ) -> None:
        """Creates the file under a temporary name; `publish` renames it once it is complete.

        Raises:
            OSError: It cannot be created.
            Unsupported: The heartbeat thread cannot be started.
        """
        self._folder = folder
        self._file = file
        self.incarnation = incarnation
        self.instance = instance
        self._descriptor = os.open(
            file + NEW_SUFFIX, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder
        )
        try:
            os.ftruncate(self._descriptor, _BYTES)
            words = (time.monotonic_ns(), lapses, int(lease_s * 1e9), incarnation, instance, 0, _MAGIC)
            os.pwrite(self._descriptor, _WORDS.pack(*words), 0)
            lock_file(self._descriptor)
            self._heartbeat: _core.Heartbeat | None = _core.Heartbeat(
                self._descriptor, heartbeat_s / _BEATS_A_HEARTBEAT, lease_s
            )
        except BaseException:
            os.close(self._descriptor)
            os.unlink(file + NEW_SUFFIX, dir_fd=folder)
            raise

    def publish(self) -> None:
        """Renames the file to its name, replacing an earlier file."""
        os.rename(self._file + NEW_SUFFIX, self._file, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def is_at(self, folder: int) -> bool:
        """Whether a folder has this file under its name."""
        try:
            there = os.stat(self._file, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    @property
    def fresh(self) -> bool:
        """Whether the last heartbeat is younger than the lease. False after `close`."""
        heartbeat = self._heartbeat
        return heartbeat is not None and heartbeat.fresh

    @property
    def lapses(self) -> int:
        """How often it was silent for longer than the lease."""
        heartbeat = self._heartbeat
        return 0 if heartbeat is None else heartbeat.lapses

    def announce_leave(self) -> None:
        """Marks the page, so that others see a leave and not a death."""
        os.pwrite(self._descriptor, _LEFT.pack(1), _LEFT_AT)

    def close(self) -> None:
        """Releases the lock, which notifies all watching processes. Idempotent."""
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
        del heartbeat  # its mapping keeps the file open
        self.abandon()

    def abandon(self) -> None:
        """In a forked child: closes the file, so that the lock ends with the parent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SeenPage:
    """The page of a member as other processes see it. It stays readable after the file was removed."""

    def __init__(self, descriptor: int) -> None:
        """Takes ownership of the descriptor.

        Raises:
            ValueError: The file is not a page.
        """
        self.descriptor = descriptor
        try:
            if os.fstat(descriptor).st_size != _BYTES:
                raise ValueError("it does not have the length of a page")
            self._map = mmap.mmap(descriptor, _BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            os.close(descriptor)
            raise
        self._map.madvise(mmap.MADV_DONTFORK)
        _, _, self.lease_ns, self.incarnation, self.instance, _, magic = self._words()
        if magic != _MAGIC:
            self.close()
            raise ValueError("it is not a page")

    @property
    def lapses(self) -> int:
        """How often the member was silent for longer than its lease."""
        return self._words()[1]

    @property
    def left(self) -> bool:
        """Whether the member has announced its leave."""
        return self._words()[5] != 0

    def alive(self) -> bool:
        """Whether its process holds the lock and was not silent for longer than its lease."""
        now = time.monotonic_ns()  # before the beat is read: see heartbeat.h
        return now - self._words()[0] <= self.lease_ns and self.is_locked()

    def is_locked(self) -> bool:
        """Whether its process exists, running or stopped."""
        return locked_by_another(self.descriptor)

    def is_file(self, folder: int, file: str) -> bool:
        """Whether the file of that name is this page."""
        try:
            there = os.stat(file, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self.descriptor))

    def close(self) -> None:
        """Closes the page. Idempotent."""
        if self.descriptor >= 0:
            self._map.close()
            os.close(self.descriptor)
            self.descriptor = -1

    def _words(self) -> tuple[int, int, int, int, int, int, int]:
        words: tuple[int, int, int, int, int, int, int] = _WORDS.unpack_from(self._map)
        return words
