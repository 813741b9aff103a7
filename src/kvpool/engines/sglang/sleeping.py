"""SGLang's ``release_memory_occupation``: before its pages are unmapped the linkers over them wait for their copies.

SGLang has no call for linkers there. It unmaps first and flushes its cache then, and its idea of being idle leaves out
what a linker still saves. So its memory saver is told to ask the linkers of the process first, and to tell them when
the pages are back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.utils import torch_memory_saver_adapter

__all__ = ["follow"]


class _Sleeper(Protocol):
    def suspend(self) -> None: ...
    def resume(self) -> None: ...


_sleepers: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process: the memory saver is one for the process


def follow(sleeper: _Sleeper) -> None:
    """From now on it is suspended before the pages are unmapped, and resumed when they are mapped again."""
    _sleepers.add(sleeper)
    saver = torch_memory_saver_adapter._TorchMemorySaverAdapterReal
    if not hasattr(saver.pause, "of_kvpool"):
        saver.pause, saver.resume = _pausing(saver.pause), _resuming(saver.resume)


def _pausing(pause: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def told(self: Any, tag: str) -> Any:
        if tag == GPU_MEMORY_TYPE_KV_CACHE:
            for sleeper in list(_sleepers):
                sleeper.suspend()
        return pause(self, tag)

    told.of_kvpool = True  # type: ignore[attr-defined]
    return told


def _resuming(resume: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def told(self: Any, tag: str) -> Any:
        result = resume(self, tag)
        if tag == GPU_MEMORY_TYPE_KV_CACHE:
            for sleeper in list(_sleepers):
                sleeper.resume()
        return result

    return told
