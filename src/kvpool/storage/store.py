"""What a store is: content of blocks by content key, outside of the machine's memory, shared by any number of pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from kvpool.arguments import int_from, shown
from kvpool.errors import ArgumentError, ArgumentTypeError

__all__ = ["Content", "Store", "StoreStats", "Trimmed", "check_contents", "check_keys", "content_bytes", "size_limit"]

Content: TypeAlias = Sequence[memoryview]
"""The bytes of a block, in one buffer or in several that follow each other: contiguous, of format "B"."""

_KEY_BYTES_MIN: Final = 16
_KEY_BYTES_MAX: Final = 64


@dataclass
class StoreStats:
    """What a store has done in this process.

    Attributes:
        hits: Blocks that `get` has brought.
        misses: Blocks that `get` did not find, or could not use.
        read_bytes: Content of the hits.
        written: Blocks newly written.
        written_bytes: Their content.
        present: Blocks that `put` did not write, because they were there.
        torn: Of the misses: their size was wrong.
        rotten: Of the misses: a checksum was wrong, or the medium could not read them.
        foreign: Of the misses, and of blocks that were to be written: something else was in their place.
        deleted: Blocks deleted on request, by age or by size.
        leftovers: Remains of writers that died, removed.
        failed_reads: Calls of exists and get that failed.
        failed_writes: Calls of put and delete that failed.
        read_only: Whether it writes nothing at the moment, because a write has failed.
    """

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    written: int = 0
    written_bytes: int = 0
    present: int = 0
    torn: int = 0
    rotten: int = 0
    foreign: int = 0
    deleted: int = 0
    leftovers: int = 0
    failed_reads: int = 0
    failed_writes: int = 0
    read_only: bool = False


@dataclass(frozen=True)
class Trimmed:
    """What a trim of a store did.

    Attributes:
        removed: Blocks removed.
        removed_bytes: Their files.
        leftovers: Remains of writers that died, removed.
        blocks: Blocks left.
        bytes: Their files.
    """

    removed: int
    removed_bytes: int
    leftovers: int
    blocks: int
    bytes: int


class Store(Protocol):
    """Where blocks are kept by their content keys. Implementations are thread-safe.

    A store may lose anything at any time, and then the block is a miss. It never returns other content than was put
    under the key, or half of it. Every call has a deadline, which it looks at between the blocks: one operation of a
    file system that hangs holds the calling thread longer, so callers that cannot wait use `Storage`.

    All methods raise StoreFailed if the store cannot be reached or has failed, DeadlineExceeded after `timeout` seconds
    (None: no limit; what was done by then stays done; not `get`), ClosedError after `close`, ArgumentError and
    ArgumentTypeError for bad arguments.
    """

    def exists(self, keys: Sequence[bytes], *, timeout: float | None = None) -> list[bool]:
        """Whether a block is there under each key. A later `get` may miss it all the same."""

    def get(self, keys: Sequence[bytes], into: Sequence[Content], *, timeout: float | None = None) -> list[bool]:
        """Reads blocks straight into memory of the caller, and verifies them.

        Args:
            keys: Of the blocks.
            into: For each its buffers, writable, together exactly as long as the content.
            timeout: Seconds.

        Returns:
            For each whether it came. The buffers of the others have undefined content. After `timeout` seconds it
            returns what has come by then, in place of DeadlineExceeded.
        """

    def put(self, keys: Sequence[bytes], contents: Sequence[Content], *, timeout: float | None = None) -> int:
        """Writes blocks that are not there yet. Readers see a block when all of it is there.

        Returns:
            How many were newly written.
        """

    def delete(self, keys: Sequence[bytes], *, timeout: float | None = None) -> int:
        """Deletes blocks; one that is not there is no error.

        Returns:
            How many were there.
        """

    def stats(self) -> StoreStats:
        """What it has done so far."""

    def close(self) -> None:
        """Ends it. Idempotent. Calls that are under way end as they would have."""


def check_keys(keys: Sequence[bytes]) -> None:
    """Checks the keys of a call.

    Raises:
        ArgumentError: A key is too short or too long.
        ArgumentTypeError: They are no sequence, or a key is not bytes.
    """
    given: object = keys
    if isinstance(given, bytes | str) or not isinstance(given, Sequence):
        raise ArgumentTypeError(f"keys must be a sequence of bytes, not {type(keys).__name__} ({shown(keys)})")
    for position, key in enumerate(keys):
        if not isinstance(key, bytes):
            raise ArgumentTypeError(f"key {position} must be bytes, not {type(key).__name__} ({shown(key)})")
        if not _KEY_BYTES_MIN <= len(key) <= _KEY_BYTES_MAX:
            raise ArgumentError(
                f"key {position} has {len(key)} bytes; it must have {_KEY_BYTES_MIN} to {_KEY_BYTES_MAX}",
                position=position,
            )


def check_contents(keys: Sequence[bytes], contents: Sequence[Content]) -> None:
    """Checks the keys and contents of a call.

    Raises:
        ArgumentError: As `check_keys`; contents are too few or too many, or not contiguous bytes.
        ArgumentTypeError: As `check_keys`; a content is no sequence of buffers.
    """
    check_keys(keys)
    if not isinstance(contents, Sequence):
        raise ArgumentTypeError(f"contents must be a sequence, not {type(contents).__name__} ({shown(contents)})")
    if len(contents) != len(keys):
        raise ArgumentError(f"{len(keys)} keys and {len(contents)} contents", given=len(contents), needed=len(keys))
    for position, content in enumerate(contents):
        given: object = content
        several = isinstance(given, Sequence) and not isinstance(given, memoryview)
        if not several or not all(isinstance(piece, memoryview) for piece in content):
            raise ArgumentTypeError(f"content {position} must be a list of memoryviews")
        if not all(piece.contiguous and piece.itemsize == 1 for piece in content):
            raise ArgumentError(f"content {position} must be contiguous bytes: memoryview(...).cast('B')")


def content_bytes(content: Content) -> int:
    """How long a content is."""
    return sum(piece.nbytes for piece in content)


def size_limit(size_max: object) -> int:
    """Checks a `size_max` of `trim`; ArgumentError if it is negative."""
    if (size := int_from(size_max, "size_max")) < 0:
        raise ArgumentError(f"size_max is {size}; it must not be negative", value=size)
    return size
