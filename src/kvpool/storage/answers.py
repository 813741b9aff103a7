"""Calls of a store whose answers are checked: an application may have written the store."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from kvpool.errors import StoreFailed
from kvpool.storage.store import Content, Store

__all__ = ["are_stored", "put_one", "read_into"]


def are_stored(store: Store, keys: Sequence[bytes], timeout: float) -> list[bool]:
    """`Store.exists`; StoreFailed for an answer that is not one for each key."""
    return _answers(store.exists(keys, timeout=timeout), len(keys), "exists")


def read_into(store: Store, keys: Sequence[bytes], into: Sequence[Content], timeout: float) -> list[bool]:
    """`Store.get`; StoreFailed for an answer that is not one for each key."""
    return _answers(store.get(keys, into, timeout=timeout), len(keys), "get")


def put_one(store: Store, key: bytes, content: Content, timeout: float) -> bool:
    """`Store.put` of one block: whether it was newly written; StoreFailed for another answer."""
    written: object = store.put([key], [content], timeout=timeout)
    try:
        number = operator.index(written)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number not in (0, 1):
        raise StoreFailed(f"put of the store returned {written!r:.80} for one block", errno=0)
    return number == 1


def _answers(found: object, count: int, call: str) -> list[bool]:
    try:
        answers = [bool(one) for one in found]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise StoreFailed(f"{call} of the store returned {found!r:.80}, and no list", errno=0) from None
    if len(answers) != count:
        raise StoreFailed(f"{call} of the store returned {len(answers)} answers for {count} keys", errno=0)
    return answers
