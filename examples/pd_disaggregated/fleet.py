"""The processes of a run: starts them, reads their messages, notices when one ends, and starts it again.

They form a cluster, which is made for the run: it tells who has joined, and has them find each other. The pipe to a
process tells when it ends. Everything here runs in one asyncio loop, but for a thread for each process that waits at
its pipe, and those of the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Final, Protocol

import kvpool
from pd_disaggregated import messages

if TYPE_CHECKING:
    from pd_disaggregated.worker import Plan

_log = logging.getLogger("pd_disaggregated")

_START_S: Final = 90.0  # until a process is up, on a machine that is busy with other things
_END_S: Final = 5.0
_STARTS_MAX: Final = 3  # in a row that fail


class InstanceFailed(RuntimeError):
    """An instance does not come up, however often it is started."""


class Listener(Protocol):
    """What happens to instances is reported here. Called in the loop."""

    def joined(self, instance: Instance) -> None: ...
    def lost(self, instance: Instance) -> None: ...
    def said(self, instance: Instance, message: messages.FromInstance) -> None: ...
    def failed(self, error: BaseException) -> None: ...


class Instance:
    """An instance, through all its incarnations.

    Attributes:
        name: Its name, which stays.
        prefills: Whether prompts are sent to it.
        decodes: Whether it decodes.
        joined: Whether it serves: it has joined the cluster, and not ended since.
        joins: How often it has joined.
        heard: When it last said something, or had nothing to do (time.monotonic).
    """

    def __init__(self, name: str, *, prefills: bool, decodes: bool) -> None:
        """Not started yet."""
        self.name = name
        self.prefills = prefills
        self.decodes = decodes
        self.joined = False
        self.joins = 0
        self.heard = time.monotonic()
        self.starts_failed = 0
        self.process: multiprocessing.process.BaseProcess | None = None
        self.pipe: Connection | None = None

    def tell(self, message: messages.ToInstance) -> None:
        """Sends it a message. One that has ended does not get it, and `Listener.lost` is called soon.

        A message is smaller than what a pipe holds, and admission bounds how many are unread: this does not wait.
        """
        with contextlib.suppress(OSError):
            if self.pipe is not None:
                self.pipe.send(message)

    def kill(self) -> None:
        """Does a kill -9."""
        if self.process is not None:
            self.process.kill()


class Fleet:
    """All instances of a run."""

    def __init__(self, plan: Plan, listener: Listener, patience_s: float) -> None:
        """Starts none yet.

        Args:
            plan: What each process is started with.
            listener: Who is told.
            patience_s: An instance that has work and says nothing for so long is killed, and started again.
        """
        self._plan = plan
        self._listener = listener
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        # A process is forked from one that has imported PyTorch and done nothing else: it is up in a moment.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "kvpool"])
        self._closing = False
        self._cluster: kvpool.Cluster | None = None
        colocated = plan.setting.colocated
        self.instances = {
            name: Instance(name, prefills=not name.startswith("decode"), decodes=colocated or name.startswith("decode"))
            for name in plan.setting.instances
        }

    def start(self) -> None:
        """Starts all. `Listener.joined` tells of each that has joined the cluster."""
        self._cluster = kvpool.Cluster.join(self._plan.cluster, lease=self._plan.lease_s)
        self._cluster.on_change(self._hear)
        for instance in self.instances.values():
            self._start(instance)

    def watch(self, busy: Callable[[Instance], bool]) -> None:
        """Kills those that are stuck. To be called every now and then.

        Args:
            busy: Says whether an instance has something to do.
        """
        now = time.monotonic()
        for instance in self.instances.values():
            if instance.joined and not busy(instance):
                instance.heard = now  # who has nothing to do may be silent
            if now - instance.heard > (self._patience_s if instance.joined else _START_S):
                _log.warning("%s has said nothing for %.1f s: it is killed", instance.name, now - instance.heard)
                instance.heard = now
                instance.kill()

    async def close(self) -> None:
        """Ends all, kindly at first, and removes the cluster. Idempotent."""
        self._closing = True
        processes = [instance.process for instance in self.instances.values() if instance.process is not None]
        for instance in self.instances.values():
            instance.tell(messages.Stop())
        until = time.monotonic() + _END_S
        while any(process.is_alive() for process in processes) and time.monotonic() < until:
            await asyncio.sleep(0.005)
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        if self._cluster is not None:
            self._cluster.close()
            with contextlib.suppress(kvpool.Error):  # somebody who was asked to look on has joined it
                kvpool.Cluster.forget(self._plan.cluster)

    # ---- the cluster

    def _hear(self, event: kvpool.MemberEvent) -> None:
        """Called in a thread of the cluster."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing reads this any more
            self._loop.call_soon_threadsafe(self._changed, event)

    def _changed(self, event: kvpool.MemberEvent) -> None:
        """One that has lost its lease and come back joins a second time, and was never away: its process lives."""
        instance = self.instances.get(event.member.name)
        if self._closing or event.kind != "joined" or instance is None or instance.joined or instance.pipe is None:
            return
        instance.joined, instance.starts_failed = True, 0
        instance.joins += 1
        try:
            self._listener.joined(instance)
        except Exception as error:
            self._listener.failed(error)

    # ---- one process

    def _start(self, instance: Instance) -> None:
        from pd_disaggregated.worker import main

        ours, theirs = self._context.Pipe()
        instance.pipe = ours
        instance.heard = time.monotonic()
        instance.process = self._context.Process(
            target=main, args=(instance.name, self._plan, theirs), name=instance.name, daemon=True
        )
        instance.process.start()
        theirs.close()
        threading.Thread(
            target=self._listen, args=(instance, ours), name=f"pipe of {instance.name}", daemon=True
        ).start()

    def _listen(self, instance: Instance, pipe: Connection) -> None:
        """What the thread of a process does: hands on what it says, until it ends."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing reads this any more
            with pipe, contextlib.suppress(EOFError, OSError):
                while True:
                    self._loop.call_soon_threadsafe(self._heard, instance, pipe, pipe.recv())
            self._loop.call_soon_threadsafe(self._ended, instance, pipe)

    def _heard(self, instance: Instance, pipe: Connection, message: messages.FromInstance) -> None:
        if instance.pipe is not pipe:
            return  # an incarnation that is over
        instance.heard = time.monotonic()
        try:
            self._listener.said(instance, message)
        except Exception as error:
            self._listener.failed(error)

    def _ended(self, instance: Instance, pipe: Connection) -> None:
        if self._closing or instance.pipe is not pipe:
            return
        instance.pipe = None
        was_up, instance.joined = instance.joined, False
        try:
            if was_up:
                self._listener.lost(instance)
            else:
                instance.starts_failed += 1
                if instance.starts_failed >= _STARTS_MAX:
                    raise InstanceFailed(f"{instance.name} did not come up, {instance.starts_failed} times in a row")
            self._start(instance)
        except Exception as error:
            self._listener.failed(error)
