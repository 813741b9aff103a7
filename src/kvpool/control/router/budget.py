"""How many requests the router has in all, and bytes of them. A limit for each alone would let many fill the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from kvpool.control.router.errors import Refusal

__all__ = ["Budget"]

_PAUSE_S: Final = 1


class Budget:
    """Requests, and the bytes that they hold from the moment that they come. Belongs to one event loop.

    Args:
        bytes_max: Of all requests together.
        requests_max: At a time.

    Attributes:
        held: Bytes that are held now.
        requests: That there are now.
    """

    def __init__(self, bytes_max: int, requests_max: int) -> None:
        self._bytes_max = bytes_max
        self._requests_max = requests_max
        self.held = 0
        self.requests = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """A request's share, given back at the end. Yields what takes more bytes for it.

        That raises Refusal: 503, with when to come back, when there are not as many left; then it takes none. So does
        entering, when there are as many requests as there may be.
        """
        if self.requests >= self._requests_max:
            raise Refusal(503, "too many requests are under way", "overloaded", retry_after_s=_PAUSE_S)
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self.held + size > self._bytes_max:
                raise Refusal(503, "too many bytes of requests are held", "overloaded", retry_after_s=_PAUSE_S)
            self.held += size
            taken += size

        self.requests += 1
        try:
            yield take
        finally:
            self.requests -= 1
            self.held -= taken
