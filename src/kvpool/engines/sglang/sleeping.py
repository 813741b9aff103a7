"""SGLang's ``release_memory_occupation``: before its pages are unmapped the linkers over them wait for their copies.

SGLang has no call for linkers there. It unmaps first and flushes its cache then, and its idea of being idle leaves out
what a linker still saves. So its memory saver is told to ask the linkers of the process first, and to tell them when
the pages are back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.utils import torch_memory_saver_adapter

from kvpool.errors import Unsupported

__all__ = ["follow"]


class _Sleeper(Protocol):
    def suspend(self) -> bool: ...  # whether it was awake before
    def resume(self) -> None: ...


_sleepers: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process: the memory saver is one for the process


def follow(sleeper: _Sleeper, routes: tuple[str, ...], saver_in_use: bool) -> None:
    """From now on it is suspended before the pages are unmapped, and resumed when they are mapped again.

    Args:
        sleeper: A linker.
        routes: Of its pool.
        saver_in_use: SGLang's ``--enable-memory-saver``.

    Raises:
        Unsupported: The memory saver is in use, and the route ucx keeps writing to memory that was unmapped.
    """
    if "ucx" in routes and saver_in_use:
        raise Unsupported(
            "SGLang's memory saver does not work with the route ucx: network adapters keep writing to memory that "
            "SGLang has unmapped. Leave ucx out of KVPOOL_ROUTES, or --enable-memory-saver off"
        )
    _sleepers.add(sleeper)
    saver = torch_memory_saver_adapter._TorchMemorySaverAdapterReal
    if not hasattr(saver.pause, "of_kvpool"):
        saver.pause, saver.resume = _pausing(saver.pause), _resuming(saver.resume)


def _pausing(pause: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def told(self: Any, tag: str) -> Any:
        with _asleep() if tag == GPU_MEMORY_TYPE_KV_CACHE else nullcontext():
            return pause(self, tag)

    told.of_kvpool = True  # type: ignore[attr-defined]
    return told


@contextmanager
def _asleep() -> Iterator[None]:
    """Suspends all for good if the body, which unmaps the pages, ends well. Otherwise those sleep that slept before."""
    suspended = []
    try:
        for sleeper in list(_sleepers):
            if sleeper.suspend():
                suspended.append(sleeper)
        yield
    except BaseException:
        for sleeper in suspended:
            sleeper.resume()
        raise


def _resuming(resume: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def told(self: Any, tag: str) -> Any:
        result = resume(self, tag)
        if tag == GPU_MEMORY_TYPE_KV_CACHE:
            for sleeper in list(_sleepers):
                sleeper.resume()
        return result

    return told
