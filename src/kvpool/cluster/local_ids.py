"""The ids of local members that live, in a place that nobody can delete: names of abstract Unix sockets.

The kernel keeps such a name for as long as the process lives, so an id that a survivor has is known even when the
folder of the cluster, with its counter, was removed under it. Nothing ever listens on these sockets.

Any user can give a socket any name. So each name ends with a random number, which nobody can take beforehand, and names
count only if the kernel says that this user made the socket.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Iterator

from kvpool.cluster.record import INSTANCE_MAX
from kvpool.cluster.unix_sockets import socket_names

__all__ = ["IdHold", "held_ids"]


class IdHold:
    """One id, held by this process."""

    def __init__(self, cluster: str, instance: int) -> None:
        """Takes it: says so first, and looks then who else has said so. Of two who do so at once none has it.

        Raises:
            FileExistsError: A process of this user that lives has it.
        """
        self._name = _prefix(cluster) + f"{instance}-{secrets.token_hex(8)}".encode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind(self._name)
            if any(number == instance and name != self._name for name, number in _holds(cluster)):
                raise FileExistsError(f"the id {instance} is held")
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Lets go of it; in a forked child, of the child's share. Idempotent."""
        self._socket.close()


def held_ids(cluster: str) -> set[int]:
    """The ids that processes of this user hold in a cluster of this machine (of this network namespace)."""
    return {number for _, number in _holds(cluster) if 1 <= number <= INSTANCE_MAX}


def _holds(cluster: str) -> Iterator[tuple[bytes, int]]:
    """Name and id of each. None where the kernel does not say whose a socket is: then the folder alone tells."""
    prefix = _prefix(cluster)
    uid = os.getuid()
    try:
        for name, owner in socket_names(prefix):
            number = name.removeprefix(prefix).partition(b"-")[0]
            if owner == uid and number.isdigit():
                yield name, int(number)
    except OSError:
        return


def _prefix(cluster: str) -> bytes:
    digest = hashlib.blake2b(os.fsencode(cluster), digest_size=12).hexdigest()
    return b"\0" + f"kvpool-{os.getuid()}-{digest}-".encode()
