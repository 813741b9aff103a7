"""The files of a `DirectoryStore`: what touches the file system, and nothing that decides.

    PATH/kvpool-store          says that the folder is a store, and of which version
    PATH/3f/3fa9...c1.kv       blocks, in 256 folders by the first byte of their keys
    PATH/3f/.9b04...e7.new     a block that is being written; its writer has a lock on it (flock)

Every name is opened relative to its folder and without following links, so no link in the folder leads out of it. Files
have mode 0600 and folders 0700. A file counts as this store's if it is regular, has such a name, and has the owner of
the store's own folder, of its mark, or of this process.

Times are those of the file system: hosts that share a store need not agree on what time it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvpool.errors import ArgumentError, StateError
from kvpool.storage.files import (
    but_misplaced,
    has_no_writer,
    is_misplaced,
    made_ns,
    missing_if_stale,
    write_and_rename,
)

__all__ = ["FOLDERS", "Folders", "StoredFile"]

FOLDERS: Final = 256

_MARK: Final = "kvpool-store"
_MARK_TEXT: Final = b"kvpool store 1\n"
_BLOCK: Final = re.compile(r"[0-9a-f]{32,128}\.kv")
_UNDER_WAY: Final = re.compile(r"\.[0-9a-f]{32}\.new")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a FIFO in the place of a file must not hold the reader.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NOT_OURS_AT_ROOT: Final = ("lost+found",)  # that a file system has made there


@dataclass(frozen=True)
class StoredFile:
    """A block as a listing shows it.

    Attributes:
        folder: Its number.
        name: Of the file.
        size: Bytes, with the header.
        used_ns: When it was last used, by the clock of the file system.
    """

    folder: int
    name: str
    size: int
    used_ns: int


class Folders:
    """An open store folder. Thread-safe. All methods may raise OSError.

    Args:
        path: Is created if it does not exist.

    Raises:
        StateError: The folder has files and is no store, or a store of another version. Nothing was changed.
    """

    def __init__(self, path: str) -> None:
        if not path or "\0" in path:
            raise ArgumentError("the path of a store is empty or has a zero byte")
        os.makedirs(path, mode=0o700, exist_ok=True)
        self._path = path
        self._ahead_ns = 0  # of this host's clock: how far the file system's was when it was last seen
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._check_mark(path)
            mark = os.stat(_MARK, dir_fd=self._root, follow_symlinks=False)
            self._owners = {os.geteuid(), os.fstat(self._root).st_uid, mark.st_uid}
        except BaseException:
            os.close(self._root)
            raise

    def close(self) -> None:
        """Ends it; later calls fail."""
        os.close(self._root)
        self._root = -1

    @contextmanager
    def reading(self, key: bytes) -> Iterator[tuple[int, os.stat_result] | None]:
        """Opens the file of a block: its descriptor and status; None if a file could not be there.

        Raises:
            FileNotFoundError: It is not there.
        """
        number, name = _place(key)
        try:
            with self._folder(number) as folder, missing_if_stale():
                descriptor = os.open(name, _READ, dir_fd=folder)
        except OSError as error:
            if not is_misplaced(error):
                raise
            yield None
            return
        try:
            status = os.fstat(descriptor)
            yield (descriptor, status) if stat.S_ISREG(status.st_mode) else None
        finally:
            os.close(descriptor)

    def size_of(self, key: bytes) -> int | None:
        """How long the file of a block is; None without one."""
        number, name = _place(key)
        try:
            with self._folder(number) as folder, missing_if_stale():
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if isinstance(error, FileNotFoundError) or is_misplaced(error):
                return None
            raise
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def write(self, key: bytes, buffers: Sequence[memoryview | bytes]) -> None:
        """Writes a block beside its place, and moves it there when all of it is written.

        Raises:
            OSError: One of which `is_misplaced` holds, and not about permissions: it cannot be written to its place.
        """
        number, name = _place(key)
        with self._folder(number, make=True) as folder:
            for last in (False, True):
                try:
                    self._ahead_ns = write_and_rename(folder, name, buffers) - time.time_ns()
                    return
                except FileNotFoundError:  # a trim took the new file for one of a writer that died
                    if last:
                        raise

    def now_ns(self, *, exactly: bool = False) -> int:
        """What time it is by the clock of the file system.

        Args:
            exactly: Asks it, by a file that is made and removed again; else as far from this host's clock as it was
                when a block was last written.
        """
        if exactly:
            self._ahead_ns = made_ns(self._root) - time.time_ns()
        return time.time_ns() + self._ahead_ns

    def remove(self, key: bytes, only: os.stat_result | None = None) -> bool:
        """Removes the file of a block, if it is this store's; whether it was there.

        Args:
            key: Of the block.
            only: If it is still this file, and was not written anew.
        """
        number, name = _place(key)
        try:
            with self._folder(number) as folder:
                return self._remove(folder, name, only=only)
        except OSError as error:
            if isinstance(error, FileNotFoundError) or error.errno in (errno.ENOTDIR, errno.ELOOP):
                return False
            raise

    def remove_all(self, files: Sequence[StoredFile]) -> list[StoredFile]:
        """Removes files of a listing that are still there and were not used since; returns those."""
        removed = []
        for number in sorted({file.folder for file in files}):
            with but_misplaced(), self._folder(number) as folder:
                for file in files:
                    with but_misplaced():
                        if file.folder == number and self._remove(folder, file.name, file.used_ns):
                            removed.append(file)
        return removed

    def cleaned(self, number: int) -> tuple[list[StoredFile], int]:
        """Removes from a folder what writers that died have left; its blocks, and how many files were removed."""
        blocks, removed = [], 0
        for name, status in self._files(number):
            if _BLOCK.fullmatch(name):
                blocks.append(StoredFile(number, name, status.st_size, status.st_mtime_ns))
            elif _UNDER_WAY.fullmatch(name):
                removed += self._remove_leftover(number, name, status)
        return blocks, removed

    def _remove_leftover(self, number: int, name: str, status: os.stat_result) -> bool:
        with but_misplaced(), self._folder(number) as folder:
            if has_no_writer(folder, name, self.now_ns() - status.st_mtime_ns):
                os.unlink(name, dir_fd=folder)
                return True
        return False

    def _files(self, number: int) -> list[tuple[str, os.stat_result]]:
        """The regular files of the store's owner in a folder."""
        found = []
        with but_misplaced(), self._folder(number) as folder, os.scandir(folder) as entries:
            for entry in entries:
                with but_misplaced():
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and status.st_uid in self._owners:
                        found.append((entry.name, status))
        return found

    def _remove(self, folder: int, name: str, used_ns: int | None = None, only: os.stat_result | None = None) -> bool:
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in self._owners:
                return False
            if only is not None and (status.st_ino, status.st_mtime_ns) != (only.st_ino, only.st_mtime_ns):
                return False
            if used_ns is not None and status.st_mtime_ns > used_ns:
                return False
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return False
        return True

    @contextmanager
    def _folder(self, number: int, make: bool = False) -> Iterator[int]:
        name = f"{number:02x}"
        try:
            descriptor = self._opened(name, make)
        except OSError as error:
            gone = error.errno == errno.ESTALE or (error.errno == errno.ENOENT and os.fstat(self._root).st_nlink == 0)
            if not gone or not self._found_again():
                raise
            descriptor = self._opened(name, make)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _opened(self, name: str, make: bool) -> int:
        try:
            return os.open(name, _DIRECTORY, dir_fd=self._root)
        except FileNotFoundError:
            if not make:
                raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self._root)
        return os.open(name, _DIRECTORY, dir_fd=self._root)

    def _found_again(self) -> bool:
        """Whether another folder has the store's path by now, and is a store: it was made, or mounted, anew."""
        try:
            root = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            with contextlib.suppress(OSError):
                mark = os.open(_MARK, _READ, dir_fd=root)
                try:
                    same = os.read(mark, 256) == _MARK_TEXT
                finally:
                    os.close(mark)
                if same:
                    os.dup2(root, self._root, inheritable=False)  # in its place, for all threads at once
                return same
            return False
        finally:
            os.close(root)

    def _check_mark(self, path: str) -> None:
        try:
            mark = os.open(_MARK, _READ, dir_fd=self._root)
        except FileNotFoundError:
            pass
        else:
            try:
                found = os.read(mark, 256)
            finally:
                os.close(mark)
            if found == _MARK_TEXT:
                return
            if found:
                raise StateError(f"{path} is a store of another version: {found[:40]!r}, not {_MARK_TEXT!r}")
            # Empty: it was renamed before a loss of power, and its content was not yet on the medium.
        # Another process may be making the same store at this moment: what that has written so far is no foreign file.
        known = (_MARK, *_NOT_OURS_AT_ROOT)
        others = [name for name in os.listdir(self._root) if name not in known and not _UNDER_WAY.fullmatch(name)]
        if others and self._mark_is_missing():
            raise StateError(f"{path} is no store, and has files: {min(others)!r}. Name an empty folder")
        write_and_rename(self._root, _MARK, [_MARK_TEXT], flush=True)
        os.fsync(self._root)

    def _mark_is_missing(self) -> bool:
        try:
            os.stat(_MARK, dir_fd=self._root, follow_symlinks=False)
        except FileNotFoundError:
            return True
        return False


def _place(key: bytes) -> tuple[int, str]:
    return key[0], f"{key.hex()}.kv"
