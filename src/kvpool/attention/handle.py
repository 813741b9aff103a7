"""The handle of `Pool.attend`, and how its work is shared out.

C++ defines the handle. This adds what coroutines need, and the plan as a dataclass, when the package is imported.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from kvpool._core import Attend, PartialAttention
from kvpool.types import AttendPlan, SequencePlan
from kvpool.waiting.coroutines import until_done

__all__ = ["Attend"]


def _explain(self: Attend) -> AttendPlan:
    """How the call is carried out. Does not wait."""
    kernel, gpu_kernel, threads, sequences = self._plan()
    return AttendPlan(kernel, gpu_kernel, threads, tuple(SequencePlan(*item) for item in sequences))


def _await(self: Attend) -> Generator[Any, None, PartialAttention]:
    """Waits in a coroutine, and gives what wait() returns. Cancelling the task ends the waiting, not the attention."""
    return _computed(self).__await__()


async def _computed(attend: Attend) -> PartialAttention:
    await until_done(attend)
    return attend.wait()


Attend.explain = _explain  # type: ignore[method-assign]
Attend.__await__ = _await  # type: ignore[method-assign]
