"""The names of LoRA adapters that the router knows, and the namespaces of their prompts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from kvpool.index.adapters import ADAPTER_MARK, adapter_namespace

__all__ = ["AdapterNames"]

_NAMES_MAX: Final = 1 << 12
_NAME_MAX: Final = 1 << 10  # characters


class AdapterNames:
    """The names of adapters that are known. Thread-safe.

    A name that an instance lists as a model is never one of an adapter: a publisher that says so by mistake or in
    malice would end matching for all who ask that model. Of too many names those said longest ago are forgotten.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: OrderedDict[str, None] = OrderedDict()  # said longest ago first
        self._models: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: object) -> bool:
        """Whether an adapter is known by this name."""
        with self._lock:
            return name in self._names

    def add(self, name: str) -> None:
        """There is such an adapter. Ignores a model's name, and one that is too long or has the mark of namespaces."""
        with self._lock:
            if ADAPTER_MARK not in name and name not in self._models:
                _remember(self._names, name)

    def add_model(self, name: str) -> None:
        """A model that is no adapter has this name."""
        with self._lock:
            _remember(self._models, name)
            self._names.pop(name, None)

    def namespace(self, model: str | None, salt: str) -> str:
        """That of a request's prompt in KV events. SGLang's requests name an adapter behind its model: base:adapter."""
        if model is not None and model not in self:
            model = model.partition(":")[2]
        return adapter_namespace(model if model is not None and model in self else "", salt)


def _remember(names: OrderedDict[str, None], name: str) -> None:
    if name and len(name) <= _NAME_MAX:
        names[name] = None
        names.move_to_end(name)
        if len(names) > _NAMES_MAX:
            names.popitem(last=False)
