"""The members of one machine, kept by its kernel: a locked file for each, which its death unlocks (ADR 0012)."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator
from typing import Final

from kvpool.cluster.board import Board
from kvpool.cluster.directory import Directory, Entry, Hold, Unreachable
from kvpool.cluster.inotify import FolderWatch
from kvpool.cluster.local_folder import Folder, State, folder_path, member_file
from kvpool.cluster.local_ids import IdHold, held_ids
from kvpool.cluster.local_page import NEW_SUFFIX, OwnPage
from kvpool.cluster.local_view import PAGE_SUFFIX, RECORD_SUFFIX, LocalView, open_page
from kvpool.cluster.place import Place
from kvpool.cluster.record import INSTANCE_MAX, Member
from kvpool.errors import AuthError, DeadlineExceeded, Error, StateError

__all__ = ["LocalDirectory", "clear_dead"]

_log = logging.getLogger("kvpool.cluster")

_LOCK_S: Final = 0.5  # for the folder's lock, where the caller will try again
_LEAVE_S: Final = 10.0
_SURVIVORS_S: Final = 0.01  # between two looks whether they have brought the folder's state back


class LocalDirectory(Directory):
    """A folder, watched by inotify; a look at everything each heartbeat, for what that does not tell: silence."""

    def __init__(self, place: Place) -> None:
        """Touches nothing yet."""
        self.lease_s = place.lease_s
        self._heartbeat_s = place.heartbeat_s
        self._given = place.secret
        self._name = place.name
        self._look_at = 0.0
        self._board = Board()
        self._view = LocalView(self._board)
        self._watch: FolderWatch | None = None
        self._entry: LocalEntry | None = None
        self._opened = False

    @property
    def _path(self) -> str:
        """Where the folder is, or is made next; another place than before, if another user has taken that one."""
        return folder_path(self._name)

    def open(self, board: Board, timeout_s: float) -> None:
        """See Directory."""
        self._board = board
        self._view = LocalView(board)
        self._state = self._settled_state(time.monotonic() + timeout_s, None)
        self.secret = self._state.secret_for(self._given, self._path)
        self.folder = Folder(self._path)
        self._opened = True
        self._watch = _watch(self.folder.path)
        self._view.look_at_all(self.folder)

    def _settled_state(self, until: float, known: State | None) -> State:
        """What stands in the folder; written there if nothing does, as this process knows it.

        Where nothing is written although members live, the folder was removed under them. Who knows nothing waits for
        them: they will be back in a moment, with their ids and their secret.

        Where no member lives the secret that a newcomer was given replaces the one that stands there.

        Raises:
            DeadlineExceeded: The lock was not free in time, or the folder is removed again and again.
            StateError: The folder cannot be written.
        """
        while True:
            folder = Folder(self._path)
            with contextlib.suppress(FileNotFoundError), _typed_errors(folder.path), folder.locked(until):
                state = self._settle(folder, known, late=time.monotonic() >= until)
                if state is not None:
                    return state
            if time.monotonic() >= until + _LOCK_S:
                raise DeadlineExceeded(f"cluster: {folder.path} is removed again and again")
            time.sleep(_SURVIVORS_S)

    def _settle(self, folder: Folder, known: State | None, *, late: bool) -> State | None:
        """None: members live who must come back first. The caller has the lock."""
        state = folder.state()
        survivors = held_ids(self._name) if state is None else set()
        if state is None and (known or not survivors or late):
            fresh = dataclasses.replace(State.new(self._given), highest=max(survivors, default=0))
            state = known or fresh
            folder.put_state(state)
        elif state is not None and known is None and self._replaces_secret(folder, state):
            state = dataclasses.replace(State.new(self._given), highest=state.highest)
            folder.put_state(state)
        return state

    def _replaces_secret(self, folder: Folder, state: State) -> bool:
        if self._given is None or state.is_known_by(self._given):
            return False
        return not held_ids(self._name) and not clear_dead(folder, "")

    def enter(self, record: Member, timeout_s: float) -> Entry:
        """See Directory."""
        until = time.monotonic() + timeout_s
        while True:
            self._settled_state(until, self.known_state())
            folder = Folder(self._path)
            # The folder may be removed just now.
            with contextlib.suppress(FileNotFoundError), _typed_errors(folder.path), folder.locked(until):
                self._entry = self._enter(folder, record)
                return self._entry
            if time.monotonic() >= until:
                raise DeadlineExceeded(f"cluster: {folder.path} is removed again and again")

    def _enter(self, folder: Folder, record: Member) -> LocalEntry:
        file = member_file(record.name)
        taken = clear_dead(folder, file)
        if file in taken:
            raise StateError(f"register: a member that lives has the name {record.name}", instance=taken[file])
        state = folder.state() or self.known_state()
        if not state.same_secret(self._state):
            raise AuthError(f"register: {folder.path} was removed and made anew, with another secret; join again")
        number, hold = self._next_id(state.highest, set(taken.values()))
        try:
            folder.put_state(dataclasses.replace(state, highest=number))
            return LocalEntry(self, folder, dataclasses.replace(record, instance=number), hold)
        except BaseException:
            hold.close()
            raise

    def _next_id(self, highest: int, taken: set[int]) -> tuple[int, IdHold]:
        taken = taken | held_ids(self._name)
        for step in range(INSTANCE_MAX):
            number = (highest + step) % INSTANCE_MAX + 1
            if number not in taken:
                with contextlib.suppress(FileExistsError):
                    return number, IdHold(self._name, number)
        raise StateError(f"register: all {INSTANCE_MAX} ids are taken", needed=1)

    def descriptors(self) -> tuple[int, ...]:
        """See Directory."""
        return () if self._watch is None else (self._watch.descriptor,)

    def tend(self) -> None:
        """See Directory."""
        names, everything = (set(), False) if self._watch is None else self._watch.take()
        if not self.folder.is_whole():
            everything = self._make_again() or everything
        if everything or time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + self._heartbeat_s
            self._view.look_at_all(self.folder)
            return
        for file in {name.removesuffix(PAGE_SUFFIX).removesuffix(RECORD_SUFFIX) for name in names}:
            self._view.look(self.folder, file)

    def known_state(self) -> State:
        """What this process knows of the cluster without the folder."""
        ids = [member.instance for member in self._board.members()]
        own = [] if self._entry is None else [self._entry.record.instance]
        return dataclasses.replace(self._state, highest=max([self._state.highest, *ids, *own]))

    def _make_again(self) -> bool:
        """The folder, or what is in it, was removed. Who sees it makes it again, with what all must know."""
        try:
            folder = Folder(self._path)
            with folder.locked(time.monotonic() + _LOCK_S):
                folder.raise_highest(self.known_state())
            watch = _watch(folder.path)
        except (OSError, Error) as error:
            _log.warning("%s was removed and cannot be made again yet: %s", self.folder.path, error)
            return False
        _log.warning("%s was removed; it is made again, as %s", self.folder.path, folder.path)
        if self._watch is not None:
            self._watch.close()
        self.folder, self._watch = folder, watch
        return True

    def close(self) -> None:
        """See Directory."""
        self._view.close()
        if self._watch is not None:
            self._watch.close()
        if self._opened:
            self.folder.close()

    def abandon(self) -> None:
        """See Directory: nothing here keeps a lock."""


class LocalEntry(Entry):
    """A page that beats, a record beside it, and an id that is held."""

    def __init__(self, directory: LocalDirectory, folder: Folder, record: Member, hold: IdHold) -> None:
        """Writes them. The caller has the folder's lock."""
        self.record = record
        self._directory = directory
        self._file = member_file(record.name)
        self._hold = hold
        self._page = self._put(folder, record)
        self._former: list[tuple[float, OwnPage]] = []  # of folders that were removed, and until when they are kept

    def valid(self) -> bool:
        """See Entry."""
        return self._page.fresh and self._page.lapses == self.record.term

    def lapsed(self) -> bool:
        """See Entry: the kernel asks nobody, so what is not valid is lost."""
        return not self.valid()

    def dropped(self, why: str) -> None:
        """See Entry. The kernel has told the peer, and tells this process by itself."""

    def hold(self) -> Hold:
        """See Entry."""
        while self._former and time.monotonic() >= self._former[0][0]:
            self._former.pop(0)[1].close()
        if not self.valid():
            return "lost"
        folder = self._directory.folder
        if not folder.is_there():
            raise Unreachable(f"{folder.path} was removed")
        whole = self._page.is_at(folder.descriptor) and folder.has(self._file + RECORD_SUFFIX)
        if not self.valid():
            return "lost"  # it was stopped while it looked, and others may have what is not its own any more
        return "held" if whole else "forgotten"

    def write(self, record: Member) -> None:
        """See Entry."""
        try:
            self._directory.folder.write(self._file + RECORD_SUFFIX, record.to_bytes())
        except OSError as error:
            raise Unreachable(str(error)) from error
        self.record = record

    def enter_again(self, record: Member, *, lost: bool) -> int | None:
        """See Entry."""
        if not self._page.fresh:
            raise Unreachable("this process has not beaten yet since it was stopped")
        folder = self._directory.folder
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
            ours = self._directory.known_state()
            if self._file in taken or record.instance in taken.values() or not (state or ours).same_secret(ours):
                return None
            folder.raise_highest(ours)
            old, self._page = self._page, self._put(folder, record)
            # Whoever has not noticed yet that the folder was removed still looks at the old page: it lives on for as
            # long as that may take.
            self._former.append((time.monotonic() + self._directory.lease_s, old))
        else:
            folder.write(self._file + RECORD_SUFFIX, record.to_bytes())
        self.record = record
        return record.term

    def _put(self, folder: Folder, record: Member) -> OwnPage:
        page = OwnPage(
            folder.descriptor, self._file + PAGE_SUFFIX,
            epoch=record.epoch, instance=record.instance, lapses=record.term,
            heartbeat_s=self._directory._heartbeat_s, lease_s=self._directory.lease_s,
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
        folder = self._directory.folder
        try:
            for _, page in self._former:
                page.say_goodbye()
            self._page.say_goodbye()
            with folder.locked(time.monotonic() + _LEAVE_S):
                if self._page.is_at(folder.descriptor):
                    folder.unlink(self._file + RECORD_SUFFIX)
                    folder.unlink(self._file + PAGE_SUFFIX)
        except (OSError, Error) as error:
            _log.warning("%s leaves its files behind: %s", record.name, error)
        finally:
            for _, page in self._former:
                page.close()
            self._former.clear()
            self._page.close()
            self._hold.close()

    def abandon(self) -> None:
        """See Entry."""
        for _, page in self._former:
            page.abandon()
        self._page.abandon()
        self._hold.close()


@contextlib.contextmanager
def _typed_errors(path: str) -> Iterator[None]:
    """A full or read-only disk is told as a StateError. That a file is gone is the caller's."""
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
        _log.warning("%s cannot be watched (%s); changes are seen each heartbeat", path, error)
        return None


def clear_dead(folder: Folder, wanted: str) -> dict[str, int]:
    """Removes what dead members have left, and a silent one's page of the wanted name. The caller has the lock.

    Returns:
        The ids of those that live, by file.
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
