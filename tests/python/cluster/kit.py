"""Shared by the tests of membership: clusters of both kinds, and members in processes that are killed and stopped."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cluster.etcd_server import EtcdServer
from transfer.kit import Child
from transfer.kit import wait_for as _wait_for

import kvpool
from kvpool.cluster.etcd.gateway import encode
from kvpool.cluster.etcd.keys import Ids
from kvpool.cluster.local.folder import folder_path

__all__ = ["LEASE", "EtcdPlace", "Events", "LocalPlace", "Place", "free_name", "wait_for"]

LEASE = 2.0  # a machine that is busy with other things must not make one run out
_incarnations = itertools.count(1)


def wait_for(look: Callable[[], Any], seconds: float = 60) -> Any:
    """The first true value of `look`. A minute, unless said otherwise: a busy machine starts processes slowly."""
    return _wait_for(look, seconds)


def free_name() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


class Events:
    """The events of a cluster, in order."""

    def __init__(self, cluster: kvpool.Cluster) -> None:
        self.all: list[kvpool.MemberEvent] = []
        self.handle = cluster.on_change(self.all.append)

    def of(self, name: str) -> list[str]:
        return [event.kind for event in list(self.all) if event.member.name == name]

    def wait(self, name: str, *kinds: str, seconds: float = 60) -> None:
        """Waits for these events of a member, in this order, with any others in between."""

        def there() -> bool:
            told = iter(self.of(name))
            return all(kind in told for kind in kinds)

        try:
            wait_for(there, seconds)
        except AssertionError:
            raise AssertionError(f"{name} was told as {self.of(name)}, not as {list(kinds)}") from None


class MemberProcess:
    """A member in a separate process. `words`: the events of its lease."""

    def __init__(self, url: str, name: str, options: dict[str, Any], **fields: Any) -> None:
        self.incarnation = next(_incarnations)
        self.name = name
        self._child = Child()
        self("words = []")
        self(f"cluster = kvpool.Cluster.join({url!r}, **options)", options=options)
        arguments = {"role": "both", "incarnation": self.incarnation} | fields
        try:
            self.instance = self(
                f"reg = cluster.register(name={name!r}, **arguments); reg.on_lease(words.append); reg.instance",
                arguments=arguments,
            )
        except BaseException:
            self.close()
            raise

    def __call__(self, code: str, **values: Any) -> Any:
        return self._child(code, **values)

    @property
    def pid(self) -> int:
        return self._child.process.pid

    @property
    def words(self) -> list[str]:
        return self("list(words)")

    def kill(self) -> None:
        self._child.kill()

    def stop(self) -> None:
        self._child.kill(signal.SIGSTOP)

    def wake(self) -> None:
        self._child.kill(signal.SIGCONT)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        self._child.kill()
        self._child.close()


class Place(ABC):
    """The cluster of one test."""

    url: str

    def __init__(self, **options: Any) -> None:
        """`options` of every join."""
        self._ends = contextlib.ExitStack()
        self._options = {"lease": LEASE} | options

    def join(self, **options: Any) -> kvpool.Cluster:
        return self._ends.enter_context(kvpool.Cluster.join(self.url, **self._options | options))

    def register(self, cluster: kvpool.Cluster, name: str, **fields: Any) -> kvpool.Registration:
        return cluster.register(name=name, **{"role": "both", "incarnation": next(_incarnations)} | fields)

    def member(self, name: str, **fields: Any) -> MemberProcess:
        lease = fields.pop("lease", LEASE)
        one = MemberProcess(self.url, name, self._options | {"lease": lease}, **fields)
        self._ends.callback(one.close)
        return one

    @abstractmethod
    def put_garbage(self, name: str, content: bytes) -> None:
        """Where the record of a member of that name would stand."""

    def close(self) -> None:
        self._ends.close()


class LocalPlace(Place):
    def __init__(self) -> None:
        super().__init__()
        self.name = free_name()
        self.url = f"local://{self.name}"
        self.folder = Path(folder_path(self.name))

    def put_garbage(self, name: str, content: bytes) -> None:
        (self.folder / f"m.{name}.lock").write_bytes(content)
        (self.folder / f"m.{name}.json").write_bytes(content)

    def close(self) -> None:
        super().close()
        for folder in self.folder.parent.glob(f"{self.name}*"):  # also one that was moved
            shutil.rmtree(folder, ignore_errors=True)


class EtcdPlace(Place):
    """`new`: with no counter of ids, so that the first member waits for a lease, as in an etcd without members.

    All others save that wait, and begin with the counter that such a member writes.
    """

    def __init__(self, server: EtcdServer, *, new: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.server = server
        self.prefix = free_name()
        self.url = f"etcd://127.0.0.1:{server.port}/{self.prefix}"
        if not new:
            self._put("ids", Ids.new(0).to_bytes())

    def put_garbage(self, name: str, content: bytes) -> None:
        self._put(f"members/{name}", content)

    def _put(self, key: str, content: bytes) -> None:
        self.server.call("kv/put", {"key": encode(f"{self.prefix}/{key}"), "value": encode(content)})


@contextlib.contextmanager
def in_thread(work: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield thread
    thread.join(60)
    assert not thread.is_alive()
