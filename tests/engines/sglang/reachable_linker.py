"""A linker in SGLang's scheduler process that a test can reach: it does what a file says before its next look-up."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpool import DRAM
from kvpool.engines.sglang.linker import KvpoolLinker


class ReachableLinker(KvpoolLinker):
    def __init__(self, *arguments: Any, extra_config: Mapping[str, Any], **more: Any) -> None:
        options = dict(extra_config)
        self._orders = Path(options.pop("orders"))
        super().__init__(*arguments, extra_config=options, **more)

    def lookup(self, rid: str, transfers: Any) -> list[int]:
        self._obey()
        return super().lookup(rid, transfers)

    def load(self, rid: str, transfers: Any) -> bool:
        order = self._obey("before a load: ")
        if order == "evict":
            self._lookups.clear()
            self._store.cache.evict(1 << 20)
        return super().load(rid, transfers)

    def _carry_out(self, index: int, loads: Any, ready: Any) -> None:
        if self._obey("before a copy: ") == "close":
            self._store.pool.close()
        super()._carry_out(index, loads, ready)

    def _obey(self, at: str = "") -> str:
        """Of several ranks the first that comes obeys."""
        try:
            order = self._orders.read_text()
            if not order.startswith(at) or (not at and order.startswith("before")):
                return ""
            self._orders.rename(self._orders.with_suffix(f".{os.getpid()}"))
        except FileNotFoundError:
            return ""
        order = order.removeprefix(at)
        if order == "poison":
            self._store.pool.tensor(DRAM).numpy()[:] ^= 0x55
        elif order == "lose":
            self._store.pool.close()
        return order
