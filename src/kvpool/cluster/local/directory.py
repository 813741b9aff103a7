"""The directory of a cluster on one machine: a locked file for each member, unlocked by its death (ADR 0012)."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator
from typing import Final

from kvpool.cluster.cluster_url import ClusterUrl
from kvpool.cluster.directory import Directory, Entry
from kvpool.cluster.local.entry import LocalEntry
from kvpool.cluster.local.folder import Folder, State, folder_path, member_file
from kvpool.cluster.local.ids import IdLock, held_ids
from kvpool.cluster.local.inotify import FolderWatch
from kvpool.cluster.local.scanner import PAGE_SUFFIX, RECORD_SUFFIX, FolderScanner, clear_dead
from kvpool.cluster.membership_view import MembershipView
from kvpool.cluster.record import INSTANCE_MAX, Member
from kvpool.errors import AuthError, DeadlineExceeded, Error, StateError

__all__ = ["LocalDirectory"]

_log = logging.getLogger("kvpool.cluster")

_LOCK_S: Final = 0.5  # to wait for the folder's lock, where the caller tries again
_SURVIVORS_S: Final = 0.01  # between two checks whether the members have written the state back


class LocalDirectory(Directory):
    """A folder, watched by inotify. Each heartbeat scans it whole, because inotify does not report silent members."""

    def __init__(self, url: ClusterUrl) -> None:
        """Touches nothing yet."""
        self._lease_s = url.lease_s
        self.heartbeat_s = url.heartbeat_s
        self._name = url.name
        self._scan_at = 0.0
        self._view = MembershipView()
        self._scanner = FolderScanner(self._view)
        self._watch: FolderWatch | None = None
        self._entry: LocalEntry | None = None
        self._opened = False

    @property
    def lease_s(self) -> float:
        """See Directory."""
        return self._lease_s

    @property
    def _path(self) -> str:
        """Where the folder is, or will be created. It changes if another user has taken the former path."""
        return folder_path(self._name)

    def open(self, view: MembershipView, timeout_s: float) -> None:
        """See Directory."""
        self._view = view
        self._scanner = FolderScanner(view)
        self._state = self._read_or_write_state(time.monotonic() + timeout_s, None)
        self.secret = self._state.secret
        self.folder = Folder(self._path)
        self._opened = True
        self._watch = _watch(self.folder.path)
        self._scanner.scan_all(self.folder)

    def _read_or_write_state(self, until: float, known: State | None) -> State:
        """The state in the folder. If the folder has no state, writes the one that this process knows, or a new one.

        If the folder has no state although members live, it was removed under them. A process that knows
        no state waits for these members, which are about to write it back with their ids and their secret.

        Raises:
            DeadlineExceeded: The lock was not free in time, or the folder is removed again and again.
            StateError: The folder cannot be written.
        """
        while True:
            folder = Folder(self._path)
            with contextlib.suppress(FileNotFoundError), _typed_errors(folder.path), folder.locked(until):
                state = self._try_state(folder, known, late=time.monotonic() >= until)
                if state is not None:
                    return state
            if time.monotonic() >= until + _LOCK_S:
                raise DeadlineExceeded(f"cluster: {folder.path} is removed again and again")
            time.sleep(_SURVIVORS_S)

    def _try_state(self, folder: Folder, known: State | None, *, late: bool) -> State | None:
        """None: live members must come back first. The caller has the lock."""
        state = folder.state()
        survivors = held_ids(self._name) if state is None else set()
        if state is None and (known or not survivors or late):
            state = known or State.new(highest=max(survivors, default=0))
            folder.put_state(state)
        return state

    def enter(self, record: Member, timeout_s: float) -> Entry:
        """See Directory."""
        until = time.monotonic() + timeout_s
        while True:
            self._read_or_write_state(until, self.known_state())
            folder = Folder(self._path)
            # The folder may be removed at this moment.
            with contextlib.suppress(FileNotFoundError), _typed_errors(folder.path), folder.locked(until):
                self._entry = self._enter(folder, record)
                return self._entry
            if time.monotonic() >= until:
                raise DeadlineExceeded(f"cluster: {folder.path} is removed again and again")

    def _enter(self, folder: Folder, record: Member) -> LocalEntry:
        file = member_file(record.name)
        taken = clear_dead(folder, file)
        if file in taken:
            raise StateError(f"register: a live member has the name {record.name}", instance=taken[file])
        state = folder.state() or self.known_state()
        if state.secret != self._state.secret:
            raise AuthError(f"register: {folder.path} was removed and created again, with another secret; join again")
        number, id_lock = self._next_id(state.highest, set(taken.values()))
        try:
            folder.put_state(dataclasses.replace(state, highest=number))
            return LocalEntry(self, folder, dataclasses.replace(record, instance=number), id_lock)
        except BaseException:
            id_lock.close()
            raise

    def _next_id(self, highest: int, taken: set[int]) -> tuple[int, IdLock]:
        taken = taken | held_ids(self._name)
        for step in range(INSTANCE_MAX):
            number = (highest + step) % INSTANCE_MAX + 1
            if number not in taken:
                with contextlib.suppress(FileExistsError):
                    return number, IdLock(self._name, number)
        raise StateError(f"register: all {INSTANCE_MAX} ids are taken", needed=1)

    def descriptors(self) -> tuple[int, ...]:
        """See Directory."""
        return () if self._watch is None else (self._watch.descriptor,)

    def update(self) -> None:
        """See Directory."""
        names, everything = (set(), False) if self._watch is None else self._watch.take()
        if not self.folder.is_whole():
            everything = self._create_again() or everything
        if everything or time.monotonic() >= self._scan_at:
            self._scan_at = time.monotonic() + self.heartbeat_s
            self._scanner.scan_all(self.folder)
            return
        for file in {name.removesuffix(PAGE_SUFFIX).removesuffix(RECORD_SUFFIX) for name in names}:
            self._scanner.scan(self.folder, file)

    def known_state(self) -> State:
        """What this process knows of the cluster without the folder."""
        ids = [member.instance for member in self._view.members()]
        own = [] if self._entry is None else [self._entry.record.instance]
        return dataclasses.replace(self._state, highest=max([self._state.highest, *ids, *own]))

    def _create_again(self) -> bool:
        """Creates the folder and its state again, after either was removed."""
        try:
            folder = Folder(self._path)
            with folder.locked(time.monotonic() + _LOCK_S):
                folder.raise_highest(self.known_state())
            watch = _watch(folder.path)
        except (OSError, Error) as error:
            _log.warning("%s was removed and cannot be created again yet: %s", self.folder.path, error)
            return False
        _log.warning("%s was removed; it is created again, as %s", self.folder.path, folder.path)
        if self._watch is not None:
            self._watch.close()
        self.folder, self._watch = folder, watch
        return True

    def close(self) -> None:
        """See Directory."""
        self._scanner.close()
        if self._watch is not None:
            self._watch.close()
        if self._opened:
            self.folder.close()

    def abandon(self) -> None:
        """See Directory: nothing here holds a lock."""


@contextlib.contextmanager
def _typed_errors(path: str) -> Iterator[None]:
    """Turns a full or read-only disk into a StateError. FileNotFoundError is left to the caller."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if isinstance(error, Error):
            raise
        raise StateError(f"cluster: {path} cannot be used: {error.strerror}", errno=error.errno) from error


def _watch(path: str) -> FolderWatch | None:
    try:
        return FolderWatch(path)
    except OSError as error:  # the user's watches are used up (fs.inotify.max_user_instances)
        _log.warning("%s cannot be watched (%s); changes are noticed at each heartbeat", path, error)
        return None
