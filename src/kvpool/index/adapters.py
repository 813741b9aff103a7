"""Namespaces of prompts that engines compute with LoRA adapters: neither a salt nor another adapter has the same."""

from __future__ import annotations

from typing import Final

__all__ = ["ADAPTER_MARK", "adapter_namespace"]

ADAPTER_MARK: Final = "\x1f"


def adapter_namespace(adapter: str, salt: str = "") -> str:
    """The namespace that the KV events of an engine's adapter give its prompts.

    Without an adapter it is the salt, but for a salt that begins with the mark of adapters: that one follows two marks.
    Clients choose salts, so what has the form of an adapter's namespace may only come from an adapter.

    Args:
        adapter: Its name, which requests give as `model`; it has no mark. "" for the model itself.
        salt: The request's `cache_salt`; "" for none.
    """
    return f"{ADAPTER_MARK}{adapter}{ADAPTER_MARK}{salt}" if adapter or salt.startswith(ADAPTER_MARK) else salt
