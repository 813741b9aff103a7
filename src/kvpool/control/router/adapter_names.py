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

    vLLM takes an adapter's name as that of a model. SGLang runs the model itself then: a request names the adapter
    behind the model (``base:adapter``), or in its field ``lora_path``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: OrderedDict[str, None] = OrderedDict()  # said longest ago first
        self._behind: OrderedDict[str, None] = OrderedDict()  # of these: listed by SGLang
        self._alone: OrderedDict[str, None] = OrderedDict()  # of these: listed by another engine
        self._models: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: object) -> bool:
        """Whether an adapter is known by this name."""
        with self._lock:
            return name in self._names

    def add(self, name: str) -> None:
        """There is such an adapter. Ignores a model's name, and one that is too long or has the mark of namespaces."""
        with self._lock:
            self._add(name)

    def add_listed(self, name: str, behind: bool) -> None:
        """As `add`, of one that an instance lists. `behind`: a request must name it behind the model."""
        with self._lock:
            if self._add(name):
                _remember(self._behind if behind else self._alone, name)

    def add_model(self, name: str) -> None:
        """A model that is no adapter has this name."""
        with self._lock:
            _remember(self._models, name)
            self._names.pop(name, None)

    def namespace(self, model: str | None, salt: str, lora_path: str | None = None) -> str:
        """That of a request's prompt in KV events.

        Args:
            model: Of the request.
            salt: Likewise; "" for none.
            lora_path: Likewise. As for SGLang, an adapter behind the model counts before it, known or not. It counts
                only if SGLang lists the adapter: vLLM ignores the field.
        """
        with self._lock:
            named = None if model is None else self._adapter_in(model)
            if named is None and lora_path in self._behind and lora_path in self._names:
                named = lora_path if model is None or not self._behind_model(model) else None
        return adapter_namespace(named or "", salt)

    def _add(self, name: str) -> bool:
        """Whether the name is known now. REQUIRES: the lock."""
        if ADAPTER_MARK not in name and name not in self._models:
            _remember(self._names, name)
        return name in self._names

    def _adapter_in(self, model: str) -> str | None:
        """The adapter that a request means by its model; None for the model itself, or an adapter that is not known."""
        if model in self._models:
            return None
        if model in self._names:
            only_behind = model in self._behind and model not in self._alone
            return None if only_behind else model
        behind = self._behind_model(model)
        return behind if behind in self._names else None

    def _behind_model(self, model: str) -> str:
        """What a request's model names behind a colon; "" for nothing."""
        if model in self._models or model in self._names:
            return ""
        whole = [at for at, letter in enumerate(model) if letter == ":" and model[:at] in self._models]
        behind = model[whole[-1] + 1 :] if whole else model.partition(":")[2]  # a model's name may have colons
        return behind.strip()


def _remember(names: OrderedDict[str, None], name: str) -> None:
    if name and len(name) <= _NAME_MAX:
        names[name] = None
        names.move_to_end(name)
        if len(names) > _NAMES_MAX:
            names.popitem(last=False)
