"""The files of a `DirectoryStore`: what touches the file system, and nothing that decides.

    PATH/kvpool-store          says that the folder is a store, and of which version
    PATH/3f/3fa9...c1.kv       blocks, in 256 folders by the first byte of their keys
    PATH/3f/.9b04...e7.new     a block that is being written; its writer has a lock on it (flock)

Every name is opened relative to its folder and without following links, so no link in the folder leads out of it. Files
have mode 0600 and folders 0700. A file counts as this store's if it is regular, has such a name, and has the owner of
the store's own folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvpool.errors import ArgumentError, StateError

__all__ = ["FOLDERS", "Folders", "StoredFile", "read_all"]

FOLDERS: Final = 256

_MARK: Final = "kvpool-store"
_MARK_TEXT: Final = b"kvpool store 1\n"
_BLOCK: Final = re.compile(r"[0-9a-f]{32,128}\.kv")
_UNDER_WAY: Final = re.compile(r"\.[0-9a-f]{32}\.new")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a FIFO in the place of a file must not hold the reader.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BUFFERS_MAX: Final = 1024  # IOV_MAX of Linux
_LEFT_AFTER_S: Final = 3600.0  # a file that is being written, where a file system has no locks


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
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._owner = os.fstat(self._root).st_uid
            self._check_mark(path)
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
        with self._folder(number) as folder:
            try:
                descriptor = os.open(name, _READ, dir_fd=folder)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # a link, a socket
                    yield None
                    return
                raise
        try:
            status = os.fstat(descriptor)
            yield (descriptor, status) if stat.S_ISREG(status.st_mode) else None
        finally:
            os.close(descriptor)

    def size_of(self, key: bytes) -> int | None:
        """How long the file of a block is; None without one."""
        number, name = _place(key)
        try:
            with self._folder(number) as folder:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def write(self, key: bytes, buffers: Sequence[memoryview | bytes]) -> None:
        """Writes a block beside its place, and moves it there when all of it is written."""
        number, name = _place(key)
        with self._folder(number, make=True) as folder:
            for last in (False, True):
                try:
                    _write_and_rename(folder, name, buffers)
                    return
                except FileNotFoundError:  # a trim took the new file for one of a writer that died
                    if last:
                        raise

    def remove(self, key: bytes) -> bool:
        """Removes the file of a block, if it is this store's; whether it was there."""
        number, name = _place(key)
        try:
            with self._folder(number) as folder:
                return self._remove(folder, name)
        except FileNotFoundError:
            return False

    def remove_all(self, files: Sequence[StoredFile]) -> list[StoredFile]:
        """Removes files of a listing that are still there and were not used since; returns those."""
        removed = []
        for number in sorted({file.folder for file in files}):
            with contextlib.suppress(FileNotFoundError), self._folder(number) as folder:
                for file in files:
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
        try:
            with self._folder(number) as folder:
                if not _has_no_writer(folder, name, status):
                    return False
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return False
        return True

    def _files(self, number: int) -> list[tuple[str, os.stat_result]]:
        """The regular files of the store's owner in a folder."""
        found = []
        try:
            with self._folder(number) as folder, os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode) and status.st_uid == self._owner:
                            found.append((entry.name, status))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            return []
        return found

    def _remove(self, folder: int, name: str, used_ns: int | None = None) -> bool:
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != self._owner:
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
            descriptor = os.open(name, _DIRECTORY, dir_fd=self._root)
        except FileNotFoundError:
            if not make:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._root)
            descriptor = os.open(name, _DIRECTORY, dir_fd=self._root)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

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
            if found != _MARK_TEXT:
                raise StateError(f"{path} is a store of another version: {found[:40]!r}, not {_MARK_TEXT!r}")
            return
        # Another process may be making the same store at this moment: what that has written so far is no foreign file.
        others = [name for name in os.listdir(self._root) if name != _MARK and not _UNDER_WAY.fullmatch(name)]
        if others and self._mark_is_missing():
            raise StateError(f"{path} is no store, and has files: {min(others)!r}. Name an empty folder")
        _write_and_rename(self._root, _MARK, [_MARK_TEXT])

    def _mark_is_missing(self) -> bool:
        try:
            os.stat(_MARK, dir_fd=self._root, follow_symlinks=False)
        except FileNotFoundError:
            return True
        return False


def read_all(descriptor: int, buffers: Sequence[memoryview]) -> int:
    """Reads from the beginning until the buffers are full or the file ends; returns how many bytes were read."""
    return _vectored(lambda left, done: os.preadv(descriptor, left, done), buffers)


def _write_and_rename(folder: int, name: str, buffers: Sequence[memoryview | bytes]) -> None:
    new = f".{secrets.token_hex(16)}.new"
    descriptor = os.open(new, _WRITE, 0o600, dir_fd=folder)
    try:
        with contextlib.suppress(OSError):  # a file system without locks; then age says whose writer has died
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        wanted = sum(memoryview(buffer).nbytes for buffer in buffers)
        written = _vectored(lambda left, done: os.pwritev(descriptor, left, done), [memoryview(b) for b in buffers])
        if written != wanted:
            raise OSError(errno.EIO, f"{written} of {wanted} bytes were written")
        # NFS sends what it holds, and says what failed, when a descriptor is closed. The lock stays with the other one.
        os.close(os.dup(descriptor))
        os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new, dir_fd=folder)
        raise
    finally:
        os.close(descriptor)


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


def _has_no_writer(folder: int, name: str, status: os.stat_result) -> bool:
    """Whether the writer of a new file has died: nobody has a lock on it."""
    if time.time() - status.st_mtime > _LEFT_AFTER_S:
        return True
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _place(key: bytes) -> tuple[int, str]:
    return key[0], f"{key.hex()}.kv"
