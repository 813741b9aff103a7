"""Notifications of the kernel about a folder (inotify), through ctypes, because Python has no binding."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final

__all__ = ["FolderWatch"]

_CLOSE_WRITE: Final = 0x8
_MOVED_TO: Final = 0x80
_DELETE: Final = 0x200
_DELETE_SELF: Final = 0x400
_ONLYDIR: Final = 0x1000000
_OVERFLOW: Final = 0x4000
_IGNORED: Final = 0x8000
_HEADER: Final = struct.Struct("iIII")
_libc: Final = ctypes.CDLL(None, use_errno=True)


class FolderWatch:
    """Reports files of one folder that were renamed into it, deleted, or closed after writing.

    A process that ends closes its files, so its death is reported, too, within about a millisecond. Not thread-safe.
    """

    def __init__(self, path: str) -> None:
        """Starts to watch.

        Raises:
            OSError: The folder does not exist, or the kernel grants no more watches.
        """
        self.descriptor = self._checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        mask = _CLOSE_WRITE | _MOVED_TO | _DELETE | _DELETE_SELF | _ONLYDIR
        try:
            self._checked(_libc.inotify_add_watch(self.descriptor, os.fsencode(path), mask))
        except OSError:
            self.close()
            raise

    def take(self) -> tuple[set[str], bool]:
        """The changes since the last call.

        Returns:
            The names of the files, and whether there may be other changes, so that a full scan is needed.
        """
        names: set[str] = set()
        everything = False
        while content := self._read():
            at = 0
            while at < len(content):
                _, mask, _, length = _HEADER.unpack_from(content, at)
                at += _HEADER.size
                name = os.fsdecode(content[at : at + length].rstrip(b"\0"))
                at += length
                everything |= bool(mask & (_OVERFLOW | _IGNORED | _DELETE_SELF))
                names |= {name} if name else set()
        return names, everything

    def close(self) -> None:
        """Stops watching. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _read(self) -> bytes:
        try:
            return os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return b""

    @staticmethod
    def _checked(value: int) -> int:
        if value < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return value
