"""The folder in which this user's local clusters live, and what happens when another user has taken its name.

All processes of a user on a machine must come to the same folder, a service as well as a login shell. So the places are
tried in one order, which depends on no environment variable:

    /dev/shm/kvpool-UID           ends with the machine, needs no disk; every process has it
    /run/user/UID/kvpool          made by the system for the user; a service may lack it
    /tmp/kvpool-UID
    /dev/shm/kvpool-UID-SUFFIX    and below /tmp: a random suffix, which a file in the user's home says

Anybody can make the first and the third name before the user does. A place that belongs to somebody else is left out.
A cluster that is there already is found in any of the places, so that a stranger who comes or goes does not split it.
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

__all__ = ["UserPlaces", "check_owner", "cluster_path", "this_users_places", "user_name"]

_SUFFIX: Final = re.compile(r"[0-9a-f]{16}")
_log = logging.getLogger("kvpool.cluster")
_told: set[str] = set()  # what was logged already


@dataclass(frozen=True)
class UserPlaces:
    """What the choice depends on. Tests make one up.

    Attributes:
        uid: The user.
        shared: Folders in which every user may make folders, the best first; at least one.
        run: The folder that the system makes for this user, if it does.
        home: The user's home; None: there is none.
        boot: Of the machine, so that a home that several machines share says something of each.
    """

    uid: int
    shared: tuple[str, ...]
    run: str
    home: str | None
    boot: str

    def fixed(self) -> list[str]:
        """The places whose names are known beforehand, the best first. Some cannot be made here."""
        first, *others = (f"{root}/kvpool-{self.uid}" for root in self.shared)
        return [first, f"{self.run}/kvpool", *others]

    def agreed(self, *, make: bool) -> list[str]:
        """The places with a suffix that this user's processes agree on; empty when there is none.

        Args:
            make: Whether to choose a suffix, if none was chosen before.
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
                mine.touch(mode=0o600)  # the folder may be one that others can read
                mine.write_text(secrets.token_hex(8))
                try:
                    os.link(mine, file)  # of several processes, one
                finally:
                    mine.unlink()
        with contextlib.suppress(OSError):
            if file.lstat().st_uid == self.uid:
                found = _SUFFIX.fullmatch(file.read_text())
                return found[0] if found else ""
        return ""


def this_users_places() -> UserPlaces:
    """Those of the user that runs this process."""
    uid = os.getuid()
    try:
        home: str | None = pwd.getpwuid(uid).pw_dir  # not $HOME, in which processes may differ
    except KeyError:
        home = os.environ.get("HOME")
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return UserPlaces(uid, ("/dev/shm", "/tmp"), f"/run/user/{uid}", home, boot)


def cluster_path(name: str, places: UserPlaces) -> str:
    """Where the cluster of that name is, or would be made.

    Raises:
        StateError: Every place belongs to somebody else, or cannot be made. It says which, and to whom.
    """
    taken: dict[str, str] = {}
    usable: list[str] = []
    for roots in (places.fixed(), places.agreed(make=False)):
        for root in roots:
            why = _unusable(root, places.uid)
            if why:
                taken[root] = why
                continue
            if os.path.lexists(os.path.join(root, name)):
                return os.path.join(root, name)
            usable.append(root)
    if not usable:
        usable = [root for root in places.agreed(make=True) if not _unusable(root, places.uid)]
    if not usable:
        where = "; ".join(f"{root} {why}" for root, why in taken.items())
        home = "there is no home" if places.home is None else f"{places.home} cannot be written"
        raise StateError(
            f"cluster: there is no folder for the local clusters of {user_name(places.uid)}: {where}; "
            f"{home}, where another name would be kept"
        )
    _tell(taken, usable[0], places.fixed()[0])
    return os.path.join(usable[0], name)


def check_owner(path: str, uid: int) -> None:
    """Checks that a folder is one that only this user may open.

    Raises:
        StateError: It is not. It says whose it is.
        OSError: It is not there.
    """
    found = os.lstat(path)
    if found.st_uid != uid:
        raise StateError(f"cluster: {path} belongs to {user_name(found.st_uid)}, not to {user_name(uid)}")
    if not stat.S_ISDIR(found.st_mode):
        raise StateError(f"cluster: {path} is no folder")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise StateError(f"cluster: {path} can be opened by other users (mode {mode:04o}): it must have mode 0700")


def user_name(uid: int) -> str:
    """For messages: the name and the number of a user."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _unusable(root: str, uid: int) -> str:
    """Why no cluster can be in a place; "" when it can. One that is ours and is wrong is refused when it is opened."""
    try:
        found = os.lstat(root)
    except FileNotFoundError:
        parent = os.path.dirname(root)
        if not os.path.isdir(parent):
            return "cannot be made: there is no such folder"
        return "" if os.access(parent, os.W_OK | os.X_OK) else "cannot be made: permission denied"
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    return "" if found.st_uid == uid else f"belongs to {user_name(found.st_uid)}"


def _tell(taken: dict[str, str], root: str, best: str) -> None:
    """That another user sits in the first place is something that a person should know; once in a process."""
    why = taken.get(best, "")
    if why.startswith("belongs") and best not in _told:
        _told.add(best)
        _log.warning("%s %s; local clusters are in %s", best, why, root)
