"""What can be seen of the members in a local cluster's folder, shown on a board."""

from __future__ import annotations

import logging
import os

from kvpool.cluster.board import Board
from kvpool.cluster.local_folder import Folder, member_file
from kvpool.cluster.local_page import SeenPage
from kvpool.cluster.record import RECORD_BYTES_MAX, Member

__all__ = ["PAGE_SUFFIX", "RECORD_SUFFIX", "LocalView", "open_page"]

PAGE_SUFFIX = ".lock"
RECORD_SUFFIX = ".json"

_log = logging.getLogger("kvpool.cluster")


def open_page(folder: Folder, file: str) -> SeenPage | None:
    """The page of a member; None when there is none, or what is no page."""
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return SeenPage(os.open(file + PAGE_SUFFIX, flags, dir_fd=folder.descriptor))
    except (OSError, ValueError):
        return None


class _Seen:
    """A member that has been seen: its page, and its record as it was read last."""

    def __init__(self, page: SeenPage) -> None:
        self.page = page
        self.name = ""  # on the board, once there is a record
        self.stamp: tuple[int, ...] = ()
        self.record: Member | None = None


class LocalView:
    """Looks at files and tells a board. Used by one thread at a time.

    A member is there while its page is locked, its beat is young, and its record is of this incarnation and term.
    A page whose name was deleted is watched on: with the folder gone, the process may be well.
    """

    def __init__(self, board: Board) -> None:
        """Has seen nobody."""
        self._board = board
        self._seen: dict[str, _Seen] = {}

    def look(self, folder: Folder, file: str) -> None:
        """Looks at one member."""
        seen = self._current(folder, file)
        if seen is None:
            return
        page = seen.page
        if page.left or not page.alive():
            self._gone(seen)
            if not page.is_file(folder.descriptor, file + PAGE_SUFFIX):
                page.close()
                del self._seen[file]
            return
        record = self._record(folder, file, seen)
        if record is None:
            return
        if (record.epoch, record.instance) == (page.epoch, page.instance):
            seen.name = record.name
            if record.term == page.lapses:
                self._board.show(record)
            else:
                self._gone(seen)  # it was silent for too long, and has not come back yet

    def look_at_all(self, folder: Folder) -> None:
        """Looks at every member that is, or was."""
        for file in folder.files(PAGE_SUFFIX) | self._seen.keys():
            self.look(folder, file)

    def close(self) -> None:
        """Lets go of all pages."""
        for seen in self._seen.values():
            seen.page.close()
        self._seen.clear()

    def _current(self, folder: Folder, file: str) -> _Seen | None:
        """What is seen of a member, after looking whether its page is another one now."""
        seen = self._seen.get(file)
        if seen is not None and seen.page.is_file(folder.descriptor, file + PAGE_SUFFIX):
            return seen
        page = open_page(folder, file)
        if page is None:
            return seen
        fresh = _Seen(page)
        if seen is not None:
            if seen.page.epoch == page.epoch:
                fresh.name = seen.name
            else:
                self._gone(seen)
            seen.page.close()
        self._seen[file] = fresh
        return fresh

    def _gone(self, seen: _Seen) -> None:
        if seen.name:
            if seen.page.left:
                self._board.remove(seen.name, "left", "it has said goodbye")
            else:
                locked = seen.page.is_locked()
                why = "it was silent for longer than its lease" if locked else "its process has ended"
                self._board.remove(seen.name, "lost", why)

    def _record(self, folder: Folder, file: str, seen: _Seen) -> Member | None:
        """The record of a member, read again only when its file is another one."""
        try:
            found = os.stat(file + RECORD_SUFFIX, dir_fd=folder.descriptor, follow_symlinks=False)
        except OSError:
            return seen.record
        stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
        if stamp != seen.stamp:
            seen.stamp = stamp
            seen.record = _read(folder, file) or seen.record
        return seen.record


def _read(folder: Folder, file: str) -> Member | None:
    content = folder.read(file + RECORD_SUFFIX, RECORD_BYTES_MAX)
    if content is None:
        return None
    try:
        record = Member.from_bytes(content)
        if member_file(record.name) != file:
            raise ValueError(f"it is the record of {record.name}")
    except ValueError as error:
        _log.warning("%s/%s%s is left out: %s", folder.path, file, RECORD_SUFFIX, error)
        return None
    return record
