"""The ids of local members that live, in a place that nobody can delete: names of abstract Unix sockets.

The kernel keeps such a name for as long as the process lives, so an id that a survivor has is known even when the
folder of the cluster, with its counter, was removed under it. Nothing ever listens on these sockets.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from pathlib import Path

from kvpool.cluster.record import INSTANCE_MAX

__all__ = ["IdHold", "held_ids"]


class IdHold:
    """One id, held by this process."""

    def __init__(self, folder: str, instance: int) -> None:
        """Takes it.

        Raises:
            FileExistsError: A process that lives has it.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind("\0" + _prefix(folder) + str(instance))
        except OSError as error:
            self._socket.close()
            if error.errno == errno.EADDRINUSE:
                raise FileExistsError(error.errno, "the id is held") from None
            raise

    def close(self) -> None:
        """Lets go of it; in a forked child, of the child's share. Idempotent."""
        self._socket.close()


def held_ids(folder: str) -> set[int]:
    """The ids that processes of this machine (of this network namespace) hold in the cluster of a folder."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    marked = "@" + _prefix(folder)
    names = (line.rpartition(" ")[2] for line in lines)
    numbers = (name.removeprefix(marked) for name in names if name.startswith(marked))
    ids = {int(number) for number in numbers if number.isdecimal()}
    return {one for one in ids if 1 <= one <= INSTANCE_MAX}  # any process can make any name


def _prefix(folder: str) -> str:
    return f"kvpool-{os.getuid()}-{hashlib.blake2b(os.fsencode(folder), digest_size=12).hexdigest()}-"
