"""Removing what a local cluster that is over has left on its machine: a folder with a counter and a secret."""

from __future__ import annotations

import contextlib
import errno
import os
import urllib.parse

from kvpool.cluster.local import clear_dead
from kvpool.cluster.local_folder import Folder, folder_path
from kvpool.cluster.local_ids import held_ids
from kvpool.errors import Error, StateError

__all__ = ["forget_folder"]


def forget_folder(name: str, until: float) -> bool:
    """Removes the folder of a cluster without members.

    Args:
        name: Of the cluster.
        until: When to give up waiting for its lock (time.monotonic()).

    Returns:
        Whether there was one.

    Raises:
        StateError: Members live, of which none loses anything; or the folder is not ours, or cannot be removed.
        DeadlineExceeded: Somebody else is changing it all the time.
    """
    path = folder_path(name)
    if not os.path.lexists(path):
        return False
    folder = Folder(path)
    try:
        with contextlib.suppress(FileNotFoundError), folder.locked(until):  # gone: somebody else has removed it
            _check_that_nobody_lives(folder, name)
            # The lock last: until then it keeps others out.
            for file in sorted(os.listdir(folder.descriptor), key="lock".__eq__):
                folder.unlink(file)
            _remove_unless_used(path)
    except OSError as error:
        if isinstance(error, Error):  # a deadline is a TimeoutError, too
            raise
        raise StateError(f"forget: {path} cannot be removed: {error.strerror}", errno=error.errno) from error
    return True


def _remove_unless_used(path: str) -> None:
    """The folder. Who watches it looks at once, and may have begun another one there: all of the old one is gone."""
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _check_that_nobody_lives(folder: Folder, name: str) -> None:
    """Also one that is stopped lives, and one whose files were removed: the kernel knows its id."""
    alive = clear_dead(folder, "")
    ids = held_ids(name) | set(alive.values())
    if ids:
        names = ", ".join(sorted(urllib.parse.unquote(file.partition(".")[2]) for file in alive)) or "unknown by name"
        raise StateError(f"forget: {len(ids)} members of {folder.path} live: {names}")
