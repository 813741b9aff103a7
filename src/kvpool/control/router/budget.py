"""How many bytes of requests the router holds in all. A limit for each alone would let many of them fill the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from kvpool.control.router.errors import Refusal

__all__ = ["Budget"]

_PAUSE_S: Final = 1


class Budget:
    """Bytes that requests hold from the moment that they come. Belongs to one event loop.

    Args:
        bytes_max: Of all requests together.

    Attributes:
        held: Bytes that are held now.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.held = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """A request's share, given back at the end. Yields what takes more bytes for it.

        That raises Refusal: 503, with when to come back, when there are not as many left; then it takes none.
        """
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self.held + size > self._bytes_max:
                raise Refusal(503, "too many bytes of requests are held", "overloaded", retry_after_s=_PAUSE_S)
            self.held += size
            taken += size

        try:
            yield take
        finally:
            self.held -= taken
