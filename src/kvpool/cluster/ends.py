"""What becomes of clusters that nobody has closed: when they are dropped, when the process ends, and after a fork."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from kvpool.cluster.membership_loop import MembershipLoop
from kvpool.waiting.threads import reset

__all__ = ["Abandoned", "end_with_process", "stop"]


class Abandoned(Protocol):
    """A cluster, as a forked child sees it."""

    def _abandon(self) -> None: ...


_clusters: weakref.WeakSet[Abandoned] = weakref.WeakSet()
_loops: weakref.WeakSet[MembershipLoop] = weakref.WeakSet()  # also of dropped clusters: their threads keep them alive


def end_with_process(cluster: Abandoned, loop: MembershipLoop) -> None:
    """Closes the loop when the process ends, and abandons the cluster in forked children. Keeps neither alive."""
    _clusters.add(cluster)
    _loops.add(loop)


def stop(loop: MembershipLoop, process: int) -> None:
    """Stops the loop of a dropped cluster. Does not wait, because the garbage collector may call it."""
    if os.getpid() == process:
        loop.stop()


def _close_all() -> None:
    """At the end of the process, so that the others see a leave and not a loss."""
    reset()
    loops = list(_loops)
    for loop in loops:  # all first, so that a slow one does not delay the others
        loop.stop()
    for loop in loops:
        loop.close()


def _abandon_all() -> None:
    """A forked child must not keep its parent's membership alive after the parent's death."""
    _loops.clear()
    for cluster in list(_clusters):
        cluster._abandon()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
