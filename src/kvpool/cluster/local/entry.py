"""What one member of a local cluster has: a page that beats, a record, and an id."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Final, Protocol

from kvpool.cluster.directory import Entry, LeaseState, Unreachable
from kvpool.cluster.local.folder import Folder, State, member_file
from kvpool.cluster.local.ids import IdLock
from kvpool.cluster.local.page import OwnPage
from kvpool.cluster.local.scanner import PAGE_SUFFIX, RECORD_SUFFIX, clear_dead
from kvpool.cluster.record import Member
from kvpool.errors import DeadlineExceeded, Error

__all__ = ["LocalEntry"]

_log = logging.getLogger("kvpool.cluster")

_LOCK_S: Final = 0.5  # to wait for the folder's lock, where the caller tries again
_LEAVE_S: Final = 10.0


class FolderOwner(Protocol):
    """What an entry needs of its directory, which creates the folder again if it was removed."""

    heartbeat_s: float
    folder: Folder

    @property
    def lease_s(self) -> float:
        """Seconds of a member's lease."""

    def known_state(self) -> State:
        """What this process knows of the cluster without the folder."""


class LocalEntry(Entry):
    """A page with a heartbeat, a record beside it, and a locked id."""

    def __init__(self, owner: FolderOwner, folder: Folder, record: Member, id_lock: IdLock) -> None:
        """Writes page and record. The caller has the folder's lock."""
        self.record = record
        self._owner = owner
        self._file = member_file(record.name)
        self._id_lock = id_lock
        self._page = self._write_page(folder, record)
        self._former: list[tuple[float, OwnPage]] = []  # pages of removed folders, and until when each is kept

    def valid(self) -> bool:
        """See Entry."""
        return self._page.fresh and self._page.lapses == self.record.term

    def lapsed(self) -> bool:
        """See Entry: this process alone decides, so a lease that is not valid is lost."""
        return not self.valid()

    def dropped(self, why: str) -> None:
        """See Entry. Nothing to do: the kernel told the peer, and this process sees the same lapse in its page."""

    def check_lease(self) -> LeaseState:
        """See Entry."""
        while self._former and time.monotonic() >= self._former[0][0]:
            self._former.pop(0)[1].close()
        if not self.valid():
            return "lost"
        folder = self._owner.folder
        if not folder.is_there():
            raise Unreachable(f"{folder.path} was removed")
        whole = self._page.is_at(folder.descriptor) and folder.has(self._file + RECORD_SUFFIX)
        if not self.valid():
            return "lost"  # it was stopped during the check, and others may have taken its name or id
        return "held" if whole else "forgotten"

    def write(self, record: Member) -> None:
        """See Entry."""
        try:
            self._owner.folder.write(self._file + RECORD_SUFFIX, record.to_bytes())
        except OSError as error:
            raise Unreachable(str(error)) from error
        self.record = record

    def enter_again(self, record: Member, *, lost: bool) -> int | None:
        """See Entry."""
        if not self._page.fresh:
            raise Unreachable("this process has sent no heartbeat yet since it was stopped")
        folder = self._owner.folder
        try:
            with folder.locked(time.monotonic() + _LOCK_S):
                if not lost and not self.valid():  # its pool may have fenced itself: "lost" must be told first
                    raise Unreachable("this process was stopped meanwhile")
                return self._enter_again(folder, dataclasses.replace(record, term=self._page.lapses))
        except (OSError, DeadlineExceeded) as error:
            raise Unreachable(str(error)) from error

    def _enter_again(self, folder: Folder, record: Member) -> int | None:
        if not self._page.is_at(folder.descriptor):
            taken = clear_dead(folder, self._file)
            state = folder.state()
            ours = self._owner.known_state()
            if self._file in taken or record.instance in taken.values() or (state or ours).secret != ours.secret:
                return None
            folder.raise_highest(ours)
            old, self._page = self._page, self._write_page(folder, record)
            # Processes that have not noticed yet that the folder was removed still read the old page. Keep it for as
            # long as noticing may take.
            self._former.append((time.monotonic() + self._owner.lease_s, old))
        else:
            folder.write(self._file + RECORD_SUFFIX, record.to_bytes())
        self.record = record
        return record.term

    def _write_page(self, folder: Folder, record: Member) -> OwnPage:
        page = OwnPage(
            folder.descriptor, self._file + PAGE_SUFFIX,
            incarnation=record.incarnation, instance=record.instance, lapses=record.term,
            heartbeat_s=self._owner.heartbeat_s, lease_s=self._owner.lease_s,
        )  # fmt: skip
        try:
            folder.write(self._file + RECORD_SUFFIX, record.to_bytes())
            page.publish()
        except BaseException:
            page.close()
            raise
        return page

    def leave(self, record: Member) -> None:
        """See Entry."""
        folder = self._owner.folder
        try:
            for _, page in self._former:
                page.announce_leave()
            self._page.announce_leave()
            with folder.locked(time.monotonic() + _LEAVE_S):
                if self._page.is_at(folder.descriptor):
                    folder.unlink(self._file + RECORD_SUFFIX)
                    folder.unlink(self._file + PAGE_SUFFIX)
        except (OSError, Error) as error:
            _log.warning("%s leaves its files in the folder: %s", record.name, error)
        finally:
            for _, page in self._former:
                page.close()
            self._former.clear()
            self._page.close()
            self._id_lock.close()

    def abandon(self) -> None:
        """See Entry."""
        for _, page in self._former:
            page.abandon()
        self._page.abandon()
        self._id_lock.close()
