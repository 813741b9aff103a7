"""The folder of a local cluster: where it is, that it is ours, its lock, and what stands in its file `state`.

/dev/shm/kvpool-1000/NAME/    0700, of this user; if another user has that name, elsewhere (user_folder.py)
lock                      locked while a member enters
state                     0600: the highest id ever given, the secret
m.NODE.lock  m.NODE.json  of each member: its page (local_page.py), its record
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from kvpool.cluster.local_page import lock_file, unlock_file
from kvpool.cluster.record import INSTANCE_MAX
from kvpool.cluster.user_folder import check_owner, cluster_path, this_users_places
from kvpool.errors import AuthError, DeadlineExceeded, StateError

__all__ = ["Folder", "State", "folder_path", "member_file"]

_STATE: Final = "state"
_STATE_BYTES_MAX: Final = 16 << 10
_RETRY_S: Final = 0.003
_FILE_BYTES_MAX: Final = 150


def folder_path(name: str) -> str:
    """Where the cluster of that name is, for this user, or would be made. It may change when it is removed.

    Raises:
        StateError: Other users sit in every place.
    """
    return cluster_path(name, this_users_places())


def member_file(name: str) -> str:
    """The name of a member's files, without what comes behind the last dot."""
    quoted = urllib.parse.quote(name, safe="", errors="surrogatepass")
    if len(quoted) <= _FILE_BYTES_MAX:
        return "m." + quoted
    return "h." + hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


@dataclass(frozen=True)
class State:
    """What the cluster knows beside its members.

    Attributes:
        highest: The id given last.
        secret: Made by the first that joined; "" when it was given one, which is not written down.
        digest: Of the secret that was given, to tell another one.
    """

    highest: int
    secret: str
    digest: str

    @classmethod
    def new(cls, given: str | None) -> State:
        """Of a cluster that begins."""
        return cls(0, "" if given else secrets.token_hex(32), _digest(given) if given else "")

    def same_secret(self, other: State) -> bool:
        """Whether both are of one cluster."""
        return (self.secret, self.digest) == (other.secret, other.digest)

    def is_known_by(self, given: str | None) -> bool:
        """Whether one that was given this secret, or none, can be of the cluster."""
        return not self.digest if given is None else given == self.secret or _digest(given) == self.digest

    def secret_for(self, given: str | None, path: str) -> str:
        """The secret of the cluster in that folder, for one that was given this one or none.

        Raises:
            AuthError: It is another one.
        """
        if not self.is_known_by(given):
            if given is None:
                raise AuthError(f"the local cluster in {path} was made with a secret of its own: give it (secret=)")
            raise AuthError(f"the local cluster in {path} has another secret")
        return self.secret if given is None else given


class Folder:
    """The folder, open: it stays the same one when another is put in its place. Any thread may call."""

    def __init__(self, path: str) -> None:
        """Opens it, and makes it if it is not there.

        Raises:
            StateError: It cannot be made, or belongs to somebody else.
        """
        self.path = path
        try:
            for one in (os.path.dirname(path), path):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(one, 0o700)
                check_owner(one, os.getuid())
            self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise StateError(f"cluster: {path} cannot be used: {error.strerror}", errno=error.errno) from error

    def close(self) -> None:
        """Closes it, when nobody uses it any more. Idempotent."""
        if getattr(self, "descriptor", -1) >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        """Closes it with its last user: who is in the middle of something in another thread keeps it open."""
        self.close()

    def is_there(self) -> bool:
        """Whether the folder of that path is still this one."""
        try:
            return os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self.descriptor))
        except OSError:
            return False

    def is_whole(self) -> bool:
        """Whether it is there, with what all must know."""
        return self.is_there() and self.state() is not None

    def files(self, suffix: str) -> set[str]:
        """Names, without the suffix, of the files that have it."""
        return {name.removesuffix(suffix) for name in os.listdir(self.descriptor) if name.endswith(suffix)}

    @contextlib.contextmanager
    def locked(self, until: float) -> Iterator[None]:
        """Keeps out other processes and threads that want to change who is there.

        Raises:
            DeadlineExceeded: Another one has it until then (time.monotonic()).
            FileNotFoundError: The folder, or the lock, has been removed.
        """
        descriptor = os.open(
            "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self.descriptor
        )
        try:
            while not lock_file(descriptor):
                if time.monotonic() >= until:
                    raise DeadlineExceeded(f"cluster: somebody else is changing {self.path} all the time")
                time.sleep(_RETRY_S)
            there = os.stat("lock", dir_fd=self.descriptor, follow_symlinks=False)
            if not self.is_there() or not os.path.samestat(there, os.fstat(descriptor)):
                raise FileNotFoundError(self.path)
            yield
        finally:
            unlock_file(descriptor)  # closing does not, where a child has been forked meanwhile
            os.close(descriptor)

    def read(self, file: str, bytes_max: int) -> bytes | None:
        """The content of a file; None when there is none. Of one that is too long, one byte more than allowed."""
        try:
            descriptor = os.open(
                file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self.descriptor
            )
        except OSError:
            return None
        with open(descriptor, "rb") as stream:
            return stream.read(bytes_max + 1)

    def write(self, file: str, content: bytes) -> None:
        """Replaces a file, whole.

        Raises:
            OSError: It cannot be written; the file is as it was.
        """
        new = f"{file}.{os.getpid()}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(new, flags, 0o600, dir_fd=self.descriptor), "wb") as stream:
            stream.write(content)
        os.rename(new, file, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def unlink(self, file: str) -> None:
        """Removes a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file, dir_fd=self.descriptor)

    def has(self, file: str) -> bool:
        """Whether a file is there."""
        try:
            os.stat(file, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def state(self) -> State | None:
        """What stands in `state`; None when there is none, or what is no state."""
        try:
            fields = json.loads(self.read(_STATE, _STATE_BYTES_MAX) or b"null")
            highest, secret, digest = fields["highest"], fields["secret"], fields["digest"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if not (isinstance(highest, int) and isinstance(secret, str) and isinstance(digest, str)):
            return None
        return State(highest, secret, digest) if 0 <= highest <= INSTANCE_MAX else None

    def put_state(self, state: State) -> None:
        """Writes `state`. The caller has the lock."""
        fields = {"v": 1, "highest": state.highest, "secret": state.secret, "digest": state.digest}
        self.write(_STATE, json.dumps(fields).encode())

    def raise_highest(self, state: State) -> None:
        """Writes a state that was known before the folder was removed, unless another has; never lowers the highest."""
        there = self.state()
        if there is None:
            self.put_state(state)
        elif there.highest < state.highest:
            self.put_state(replace(there, highest=state.highest))


def _digest(secret: str) -> str:
    return hashlib.blake2b(
        secret.encode("utf-8", "surrogatepass"), digest_size=32, person=b"kvpool-cluster"
    ).hexdigest()
