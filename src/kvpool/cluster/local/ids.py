"""The ids of live local members, where they cannot be deleted: names of abstract Unix sockets.

The kernel keeps such a name while the process lives. So the id of a live member is known even if someone has removed
the folder of the cluster with its counter. Nothing listens on these sockets.

Any user can give a socket any name. So each name ends with a random number, which no one can take in advance, and a
name counts only if the kernel says that this user created the socket.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Iterator

from kvpool.cluster.local.unix_sockets import socket_names
from kvpool.cluster.record import INSTANCE_MAX

__all__ = ["IdLock", "held_ids"]


class IdLock:
    """An id that this process has locked."""

    def __init__(self, cluster: str, instance: int) -> None:
        """Locks it: binds a name first, then checks for other names. Of two processes at the same time both fail.

        Raises:
            FileExistsError: A live process of this user has the id.
        """
        self._name = _prefix(cluster) + f"{instance}-{secrets.token_hex(8)}".encode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind(self._name)
            if any(number == instance and name != self._name for name, number in _id_locks(cluster)):
                raise FileExistsError(f"the id {instance} is held")
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Releases it; in a forked child, only the child's copy. Idempotent."""
        self._socket.close()


def held_ids(cluster: str) -> set[int]:
    """The ids that processes of this user have locked in a cluster of this machine (or network namespace)."""
    return {number for _, number in _id_locks(cluster) if 1 <= number <= INSTANCE_MAX}


def _id_locks(cluster: str) -> Iterator[tuple[bytes, int]]:
    """Name and id of each lock. Nothing if the kernel does not tell the owner of a socket; then the folder decides."""
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
