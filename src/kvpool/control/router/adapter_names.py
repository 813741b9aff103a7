"""The names of LoRA adapters that the router knows, and the namespaces of their prompts."""

from __future__ import annotations

from typing import Final

from kvpool.index.adapters import adapter_namespace, adapter_of

__all__ = ["AdapterNames"]

_NAMES_MAX: Final = 1 << 16
_NAME_MAX: Final = 1 << 10  # characters


class AdapterNames:
    """The names of adapters that are known. Any thread may add some."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __contains__(self, name: object) -> bool:
        """Whether an adapter is known by this name."""
        return name in self._names

    def add(self, name: str) -> None:
        """There is such an adapter; a name that is too long, or one too many, is ignored."""
        if name and len(name) <= _NAME_MAX and len(self._names) < _NAMES_MAX:
            self._names.add(name)

    def seen(self, namespace: str) -> None:
        """Takes the adapter from a namespace of an event, if there is one."""
        self.add(adapter_of(namespace))

    def namespace(self, model: str | None, salt: str) -> str:
        """That of a request's prompt in KV events."""
        return adapter_namespace(model if model is not None and model in self._names else "", salt)
