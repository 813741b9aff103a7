"""Namespaces of prompts that engines compute with LoRA adapters: neither a salt nor another adapter has the same."""

from __future__ import annotations

from typing import Final

__all__ = ["adapter_namespace", "adapter_of"]

_MARK: Final = "\x1f"


def adapter_namespace(adapter: str, salt: str = "") -> str:
    """The namespace that the KV events of an engine's adapter give its prompts; the salt alone without an adapter.

    Args:
        adapter: Its name, which requests give as `model`; "" for the model itself.
        salt: The request's `cache_salt`; "" for none.
    """
    return f"{_MARK}{adapter}{_MARK}{salt}" if adapter else salt


def adapter_of(namespace: str) -> str:
    """The adapter of a namespace; "" for none."""
    return namespace[1:].partition(_MARK)[0] if namespace.startswith(_MARK) else ""
