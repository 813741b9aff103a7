"""The folder that holds this user's local clusters, and the alternatives if another user has taken its name.

All processes of a user on a machine must find the same folder, in a service as well as in a login shell. So they try
these paths in one order, which depends on no environment variable:

    /dev/shm/kvpool-UID           ends with the machine, needs no disk; every process has it
    /run/user/UID/kvpool          created by the system for the user; a service may lack it
    /tmp/kvpool-UID
    /dev/shm/kvpool-UID-SUFFIX    and below /tmp: a random suffix, stored in a file in the user's home

Any user can create the first and the third path before this user does. Paths that belong to another user are skipped.
An existing cluster is found on any path, so that files of other users do not split it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool.errors import StateError

__all__ = ["UserFolders", "check_owner", "cluster_path", "this_users_folders", "user_name"]

_SUFFIX: Final = re.compile(r"[0-9a-f]{16}")
_log = logging.getLogger("kvpool.cluster")
_told: set[str] = set()  # paths that were logged already


@dataclass(frozen=True)
class UserFolders:
    """The input of the choice of the folder. Tests construct one.

    Attributes:
        uid: The user id.
        shared: Folders in which every user may create folders, the best first; at least one.
        run: The folder that the system creates for this user, if it does.
        home: The user's home, or None.
        boot: The boot id of the machine, so that a home shared by several machines has a file for each.
    """

    uid: int
    shared: tuple[str, ...]
    run: str
    home: str | None
    boot: str

    def fixed(self) -> list[str]:
        """The paths with known names, the best first. Some may not be possible on this machine."""
        first, *others = (f"{root}/kvpool-{self.uid}" for root in self.shared)
        return [first, f"{self.run}/kvpool", *others]

    def agreed(self, *, make: bool) -> list[str]:
        """The paths with the suffix that this user's processes share; empty if there is no suffix.

        Args:
            make: Whether to choose a suffix if none was chosen before.
        """
        suffix = self._suffix(make=make)
        return [f"{root}/kvpool-{self.uid}-{suffix}" for root in self.shared] if suffix else []

    def _suffix(self, *, make: bool) -> str:
        if self.home is None:
            return ""
        folder = Path(self.home, ".cache", "kvpool")
        file = folder / f"local-{self.boot}"
        with contextlib.suppress(OSError):
            if make and not file.exists() and os.stat(self.home).st_uid == self.uid:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                mine = folder / f"local-{self.boot}.{secrets.token_hex(8)}"
                mine.touch(mode=0o600)  # the folder may be readable by others
                mine.write_text(secrets.token_hex(8))
                try:
                    os.link(mine, file)  # only one of several processes succeeds
                finally:
                    mine.unlink()
        with contextlib.suppress(OSError):
            if file.lstat().st_uid == self.uid:
                found = _SUFFIX.fullmatch(file.read_text())
                return found[0] if found else ""
        return ""


def this_users_folders() -> UserFolders:
    """The folders of the user that runs this process."""
    uid = os.getuid()
    try:
        home: str | None = pwd.getpwuid(uid).pw_dir  # not $HOME, which may differ between processes
    except KeyError:
        home = os.environ.get("HOME")
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return UserFolders(uid, ("/dev/shm", "/tmp"), f"/run/user/{uid}", home, boot)


def cluster_path(name: str, folders: UserFolders) -> str:
    """The path of the cluster of that name, existing or to be created.

    Raises:
        StateError: Every path belongs to another user, or cannot be created. The message names paths and users.
    """
    taken: dict[str, str] = {}
    usable: list[str] = []
    for roots in (folders.fixed(), folders.agreed(make=False)):
        for root in roots:
            why = _unusable(root, folders.uid)
            if why:
                taken[root] = why
                continue
            if os.path.lexists(os.path.join(root, name)):
                return os.path.join(root, name)
            usable.append(root)
    if not usable:
        usable = [root for root in folders.agreed(make=True) if not _unusable(root, folders.uid)]
    if not usable:
        where = "; ".join(f"{root} {why}" for root, why in taken.items())
        home = "there is no home" if folders.home is None else f"{folders.home} cannot be written"
        raise StateError(
            f"cluster: {user_name(folders.uid)} has no possible folder for local clusters: {where}; "
            f"{home}, which would store another name"
        )
    _tell(taken, usable[0], folders.fixed()[0])
    return os.path.join(usable[0], name)


def check_owner(path: str, uid: int) -> None:
    """Checks that only this user may open a folder.

    Raises:
        StateError: Others may, or it belongs to another user. The message names the user.
        OSError: It does not exist.
    """
    found = os.lstat(path)
    if found.st_uid != uid:
        raise StateError(f"cluster: {path} belongs to {user_name(found.st_uid)}, not to {user_name(uid)}")
    if not stat.S_ISDIR(found.st_mode):
        raise StateError(f"cluster: {path} is not a folder")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise StateError(f"cluster: {path} can be opened by other users (mode {mode:04o}): it must have mode 0700")


def user_name(uid: int) -> str:
    """The name and the id of a user, for messages."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _unusable(root: str, uid: int) -> str:
    """Why a path cannot hold clusters; "" if it can. Opening checks the mode of this user's own folders."""
    try:
        found = os.lstat(root)
    except FileNotFoundError:
        parent = os.path.dirname(root)
        if not os.path.isdir(parent):
            return "cannot be created: its parent does not exist"
        return "" if os.access(parent, os.W_OK | os.X_OK) else "cannot be created: permission denied"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if found.st_uid == uid else f"belongs to {user_name(found.st_uid)}"


def _tell(taken: dict[str, str], root: str, best: str) -> None:
    """Warns once in a process that another user has taken the best path."""
    why = taken.get(best, "")
    if why.startswith("belongs") and best not in _told:
        _told.add(best)
        _log.warning("%s %s; local clusters are in %s", best, why, root)
