"""What keeps a publisher's blocks apart beside their tokens: adapters and salts, which make a namespace."""

from __future__ import annotations

from typing import Final, TypeAlias

from kvpool.index.adapters import ADAPTER_MARK
from kvpool.observe.events.wire import BlockStored

__all__ = ["Apart", "apart", "shared"]

_NAMESPACE_MAX: Final = 1024  # characters

Apart: TypeAlias = tuple[str, str | None]  # an adapter and a salt; None: the salt of the block before holds


def apart(event: BlockStored, position: int) -> Apart | None:
    """What an event says of one of its blocks beside its tokens.

    kvpool names a namespace as an extra key, vLLM an adapter beside each block and a salt beside the first one, SGLang
    a salt in a field.
    """
    adapter, keys = event.lora_name or "", list(event.extra_keys[position] or ()) if event.extra_keys else []
    if (event.lora_id is not None and not adapter) or ADAPTER_MARK in adapter:
        return None  # a number that another publisher may give to another adapter, or a name that no namespace can hold
    if adapter and keys and keys[0] == adapter:
        del keys[0]
    salt = keys[0] if keys else event.cache_salt
    if len(keys) > 1 or not isinstance(salt, str | None) or len(adapter) + len(salt or "") > _NAMESPACE_MAX:
        return None
    return adapter, salt


def shared(said: Apart | None, before: Apart | None) -> Apart | None:
    """The object of the block before, if it is equal: kvpool names a namespace at each block of a prompt."""
    return before if before == said else said
