"""Removes the folder of a local cluster that has ended, with its counter and its secret."""

from __future__ import annotations

import contextlib
import errno
import os
import urllib.parse

from kvpool.cluster.local.folder import Folder, folder_path
from kvpool.cluster.local.ids import held_ids
from kvpool.cluster.local.scanner import clear_dead
from kvpool.errors import Error, StateError

__all__ = ["forget_folder"]


def forget_folder(name: str, until: float) -> bool:
    """Removes the folder of a cluster without members.

    Args:
        name: The name of the cluster.
        until: When to stop waiting for its lock (time.monotonic()).

    Returns:
        Whether there was such a folder.

    Raises:
        StateError: Members live, and keep everything; or the folder belongs to another user, or cannot be removed.
        DeadlineExceeded: Other processes kept changing it.
    """
    path = folder_path(name)
    if not os.path.lexists(path):
        return False
    folder = Folder(path)
    try:
        with contextlib.suppress(FileNotFoundError), folder.locked(until):  # another process has removed it
            _check_no_member_lives(folder, name)
            # The lock last: until then it keeps others out.
            for file in sorted(os.listdir(folder.descriptor), key="lock".__eq__):
                folder.unlink(file)
            _remove_unless_used(path)
    except OSError as error:
        if isinstance(error, Error):  # a DeadlineExceeded is a TimeoutError, and so an OSError
            raise
        raise StateError(f"forget: {path} cannot be removed: {error.strerror}", errno=error.errno) from error
    return True


def _remove_unless_used(path: str) -> None:
    """Removes the folder, unless a watching process has already put a new state there. The old files are gone."""
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _check_no_member_lives(folder: Folder, name: str) -> None:
    """Also counts stopped members, and members without files, whose ids the kernel knows."""
    alive = clear_dead(folder, "")
    ids = held_ids(name) | set(alive.values())
    if ids:
        names = ", ".join(sorted(urllib.parse.unquote(file.partition(".")[2]) for file in alive)) or "unknown by name"
        raise StateError(f"forget: {len(ids)} members of {folder.path} live: {names}")
