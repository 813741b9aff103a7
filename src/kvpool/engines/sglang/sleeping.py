"""SGLang's ``release_memory_occupation``: before its pages are unmapped the linkers over them wait for their copies.

SGLang has no call for linkers there. It unmaps first and flushes its cache then, and its idea of being idle leaves out
what a linker still saves. So its memory saver is told to ask the linkers of the process first, and to tell them when
the pages are back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.utils import torch_memory_saver_adapter

from kvpool.engines.sleep import Sleeper, Sleepers, check_routes

__all__ = ["follow"]

_sleepers = Sleepers()


def follow(sleeper: Sleeper, routes: tuple[str, ...], saver_in_use: bool) -> None:
    """From now on it is suspended before the pages are unmapped, and resumed when they are mapped again.

    Args:
        sleeper: A linker.
        routes: Of its pool.
        saver_in_use: SGLang's ``--enable-memory-saver``.

    Raises:
        Unsupported: The memory saver is in use, and the route ucx keeps writing to memory that was unmapped.
    """
    if saver_in_use:
        check_routes(routes, "--enable-memory-saver", "SGLang")
    _sleepers.add(sleeper)
    saver = torch_memory_saver_adapter._TorchMemorySaverAdapterReal
    if not hasattr(saver.pause, "of_kvpool"):
        saver.pause, saver.resume = _pausing(saver.pause), _resuming(saver.resume)


def _pausing(pause: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def told(self: Any, tag: str) -> Any:
        with _sleepers.asleep() if tag == GPU_MEMORY_TYPE_KV_CACHE else nullcontext():
            return pause(self, tag)

    told.of_kvpool = True  # type: ignore[attr-defined]
    return told


def _resuming(resume: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def told(self: Any, tag: str) -> Any:
        result = resume(self, tag)
        if tag == GPU_MEMORY_TYPE_KV_CACHE:
            _sleepers.resume()
        return result

    return told
