"""Scans the folder of a local cluster for members, and updates the view."""

from __future__ import annotations

import logging
import os

from kvpool.cluster.local.folder import Folder, member_file
from kvpool.cluster.local.page import NEW_SUFFIX, SeenPage
from kvpool.cluster.membership_view import MembershipView
from kvpool.cluster.record import RECORD_BYTES_MAX, Member

__all__ = ["PAGE_SUFFIX", "RECORD_SUFFIX", "FolderScanner", "clear_dead", "open_page"]

PAGE_SUFFIX = ".lock"
RECORD_SUFFIX = ".json"

_log = logging.getLogger("kvpool.cluster")


def open_page(folder: Folder, file: str) -> SeenPage | None:
    """Opens the page of a member; None if there is no valid page."""
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return SeenPage(os.open(file + PAGE_SUFFIX, flags, dir_fd=folder.descriptor))
    except (OSError, ValueError):
        return None


def clear_dead(folder: Folder, wanted: str) -> dict[str, int]:
    """Removes the files of dead members, and of a silent member of the wanted name. The caller has the lock.

    Returns:
        The ids of live members, by file.
    """
    alive = {}
    for file in folder.files(PAGE_SUFFIX):
        page = open_page(folder, file)
        if page is None or not page.is_locked():
            dead = True
        else:
            dead = file == wanted and not page.alive()
            if not dead:
                alive[file] = page.instance
        if page is not None:
            page.close()
        if dead:
            folder.unlink(file + RECORD_SUFFIX)
            folder.unlink(file + PAGE_SUFFIX)
    for file in folder.files(PAGE_SUFFIX + NEW_SUFFIX):
        folder.unlink(file + PAGE_SUFFIX + NEW_SUFFIX)
    return alive


class _Seen:
    """A member found in the folder: its page, and its record as last read."""

    def __init__(self, page: SeenPage) -> None:
        self.page = page
        self.name = ""  # in the view, once there is a record
        self.stamp: tuple[int, ...] = ()
        self.record: Member | None = None


class FolderScanner:
    """Reads the files and updates a view. Used by one thread at a time.

    A member lives while its page is locked, its heartbeat is recent, and its record has the page's incarnation and
    term. A removed page is still observed, because its process may live although the folder was removed.
    """

    def __init__(self, view: MembershipView) -> None:
        """Reads nothing yet."""
        self._view = view
        self._seen: dict[str, _Seen] = {}

    def scan(self, folder: Folder, file: str) -> None:
        """Reads the files of one member."""
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
        if (record.incarnation, record.instance) == (page.incarnation, page.instance):
            seen.name = record.name
            if record.term == page.lapses:
                self._view.show(record)
            else:
                self._gone(seen)  # it was silent for longer than its lease, and has not come back yet

    def scan_all(self, folder: Folder) -> None:
        """Reads the files of all present and former members."""
        for file in folder.files(PAGE_SUFFIX) | self._seen.keys():
            self.scan(folder, file)

    def close(self) -> None:
        """Closes all pages."""
        for seen in self._seen.values():
            seen.page.close()
        self._seen.clear()

    def _current(self, folder: Folder, file: str) -> _Seen | None:
        """The member of a file, after checking whether its page was replaced."""
        seen = self._seen.get(file)
        if seen is not None and seen.page.is_file(folder.descriptor, file + PAGE_SUFFIX):
            return seen
        page = open_page(folder, file)
        if page is None:
            return seen
        fresh = _Seen(page)
        if seen is not None:
            if seen.page.incarnation == page.incarnation:
                fresh.name = seen.name
            else:
                self._gone(seen)
            seen.page.close()
        self._seen[file] = fresh
        return fresh

    def _gone(self, seen: _Seen) -> None:
        if seen.name:
            if seen.page.left:
                self._view.remove(seen.name, "left", "it has announced its leave")
            else:
                locked = seen.page.is_locked()
                why = "it was silent for longer than its lease" if locked else "its process has ended"
                self._view.remove(seen.name, "lost", why)

    def _record(self, folder: Folder, file: str, seen: _Seen) -> Member | None:
        """The record of a member, read again only if its file was replaced."""
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
        _log.warning("%s/%s%s is ignored: %s", folder.path, file, RECORD_SUFFIX, error)
        return None
    return record
