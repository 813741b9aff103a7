"""The arguments that schedulers refuse, before they change anything."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from kvpool.errors import ArgumentError, ArgumentTypeError
from kvpool.policy.mell.plan import RequestId

__all__ = ["check_batch", "check_running", "sizes_of", "whole"]


def whole(value: object, what: str) -> int:
    """A Python int for anything that is an index: NumPy's sums and shifts would have 64 bits.

    Raises:
        ArgumentTypeError: It is not one; a bool does not count as one.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(f"{what} must be an int, not {type(value).__name__} ({value!r})")
    return operator.index(cast(Any, value))


def sizes_of(entries: Iterable[tuple[RequestId, int]]) -> list[tuple[RequestId, int]]:
    """Requests and their tokens, which are ints.

    Raises:
        ArgumentTypeError: Some are not.
    """
    return [
        (request, size if type(size) is int else whole(size, f"the tokens of request {request!r}"))
        for request, size in entries
    ]


def check_batch(
    capacity: int,
    size_of: Callable[[RequestId], int | None],
    gone: Sequence[RequestId],
    grown: Sequence[tuple[RequestId, int]],
    came: Sequence[tuple[RequestId, int]],
) -> None:
    """Refuses batches that no scheduler could execute.

    Args:
        capacity: C, tokens of KV cache on each GPU.
        size_of: The tokens of a request; None where it does not run.
        gone: Requests that depart.
        grown: Requests and their new sizes.
        came: New requests and their sizes.

    Raises:
        ArgumentError: A request that does not run departs or grows; a request does both, or one of them twice, or
            shrinks; a running request that does not depart arrives; a request arrives twice; or a size is not positive,
            or above C.
    """
    seen: set[RequestId] = set()
    for request in [*gone, *(request for request, _ in grown)]:
        if size_of(request) is None:
            raise ArgumentError(f"request {request!r} does not run")
        if request in seen:
            raise ArgumentError(f"request {request!r} is named twice in one batch")
        seen.add(request)
    for request, size in grown:
        before = size_of(request) or 0
        if not before <= size <= capacity:
            raise ArgumentError(
                f"request {request!r} cannot grow from {before} to {size} tokens: it never shrinks, and a GPU has "
                f"{capacity}"
            )
    absent = set(gone)
    arriving: set[RequestId] = set()
    for request, size in came:
        if request in arriving or (request not in absent and size_of(request) is not None):
            raise ArgumentError(f"request {request!r} runs already, or is named twice in one batch")
        if not 0 < size <= capacity:
            raise ArgumentError(f"request {request!r} of {size} tokens; a GPU has {capacity}")
        arriving.add(request)


def check_running(capacity: int, running: Mapping[int, Mapping[RequestId, int]]) -> dict[int, dict[RequestId, int]]:
    """Refuses requests that cannot run where they are said to.

    Raises:
        ArgumentError: A request is named twice, or its size is not from 1 to C; or the number of a GPU is negative.
        ArgumentTypeError: A size, or the number of a GPU, is no int.
    """
    found: dict[int, dict[RequestId, int]] = {}
    seen: set[RequestId] = set()
    for gpu, requests in running.items():
        number = whole(gpu, "a GPU")
        if number < 0:
            raise ArgumentError(f"GPU {number}: numbers begin at 0")
        found[number] = dict(sizes_of(requests.items()))
        for request, size in found[number].items():
            if request in seen or not 0 < size <= capacity:
                raise ArgumentError(f"request {request!r} of {size} tokens runs twice, or does not fit into {capacity}")
            seen.add(request)
    return found
