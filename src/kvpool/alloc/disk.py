"""Blocks on disk: the options of a pool for the core, and its statistics."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from typing import Any

from kvpool.config import Settings
from kvpool.errors import ArgumentError, ArgumentTypeError
from kvpool.types import Layout, RawLayout

_log = logging.getLogger("kvpool")

__all__ = ["DiskLog", "DiskStats", "DiskWarning", "disk_options", "disk_stats_of"]


class DiskWarning(UserWarning):
    """The disk of a pool has failed and is switched off. Nothing on it is cached any more; the pool goes on without.

    The first ``stats()`` or ``audit()`` after that warns: nothing is said before one of them is called.
    """


@dataclass(frozen=True)
class DiskStats:
    """Blocks on disk, and what their store has done since the pool was made.

    Attributes:
        capacity: All blocks: slots in the file.
        free: Free ones.
        used: Those with content: pages that lie there, and copies.
        copies: Of these, copies of blocks that lie in HBM or DRAM.
        evictable: Pages that lie there alone and that nothing pins.
        path: The directory.
        engine: How the drive is read and written: "io_uring" or "threads".
        direct: Whether past the page cache (O_DIRECT); False where the file system refuses that.
        state: "on"; or "off", since the drive has failed.
        reason: Why it is off.
        recovered_blocks: Pages that were found when the pool was made.
        matched_tokens: Tokens that matches found on DISK.
        written_blocks: Blocks that were written.
        moved_blocks: Blocks that were evicted from memory, and were found on DISK from then on.
        brought_blocks: Blocks that came from DISK to DRAM.
        lost_blocks: Blocks that were found damaged or gone when they were read, and are cached no more.
        corrupt_blocks: Of these, and of others, the reads whose checksum was wrong.
        read_errors: Reads that the drive failed.
        write_errors: Writes that the drive failed.
        read_bytes: Read from the drive, with padding.
        written_bytes: Written to the drive, with padding.
        written_bytes_today: Bytes that were given to the drive, with padding, since the day of the setting
            ``disk_bytes_day`` began: with the first write of this process, or the first after the last day ended.
    """

    capacity: int
    free: int
    used: int
    copies: int
    evictable: int
    path: str
    engine: str
    direct: bool
    state: str
    reason: str
    recovered_blocks: int
    matched_tokens: int
    written_blocks: int
    moved_blocks: int
    brought_blocks: int
    lost_blocks: int
    corrupt_blocks: int
    read_errors: int
    write_errors: int
    read_bytes: int
    written_bytes: int
    written_bytes_today: int


_CoreOptions = tuple[int, bytes, list[tuple[str, str]], str, int, int, float]


def disk_options(
    blocks: int, path: str | os.PathLike[str] | None, layout: Layout, settings: Settings
) -> _CoreOptions | None:
    """As the core takes them; None without a disk.

    Args:
        blocks: How many blocks; 0 without a disk.
        path: The directory; its name need not be UTF-8.
        layout: Of the blocks.
        settings: Those of the pool.

    Raises:
        ArgumentError: One of `blocks` and `path` without the other, or out of range; or no file can have this `path`.
        ArgumentTypeError: A value of the wrong type.
    """
    if isinstance(blocks, bool) or not isinstance(blocks, int):
        raise ArgumentTypeError(f"disk_blocks must be an int, not {type(blocks).__name__}")
    if path is not None and not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError(f"disk_path must be a str or a path, not {type(path).__name__}")
    if blocks == 0 and path is None:
        return None
    if path is None or not 1 <= blocks <= 1 << 24:
        raise ArgumentError(
            f"disk_blocks is {blocks}, from 1 to {1 << 24} with a disk_path: a pool has both or neither", value=blocks
        )
    return (
        blocks, _bytes_of(path), _format_of(layout, settings.model), settings.disk_admission, settings.disk_bytes_s,
        settings.disk_bytes_day, settings.disk_hang_s,
    )  # fmt: skip


def _bytes_of(path: str | os.PathLike[str]) -> bytes:
    """The absolute path as the kernel takes it; names of files need not be UTF-8."""
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ArgumentError(f"disk_path cannot be the name of a file: {error}") from None
    if not name or b"\0" in name:
        raise ArgumentError(f"disk_path is {name!r}: the path of a directory is neither empty nor has it zero bytes")
    return os.path.abspath(name)


def _format_of(layout: Layout, model: str) -> list[tuple[str, str]]:
    """What the bytes of a block depend on; not `order`, which changes only how memory keeps them."""
    if isinstance(layout, RawLayout):
        shape = [("layout", "raw")]
    else:
        names = ("layers", "kv_heads", "head_dim", "dims", "pages")
        shape = [("layout", "kv"), *((name, str(getattr(layout, name))) for name in names)]
    return [("format", "1"), *shape, ("dtype", layout.dtype), ("model", model)]


def disk_stats_of(blocks: dict[str, Any], store: dict[str, Any] | None) -> DiskStats | None:
    """Makes DiskStats of what the core counts; None without a disk."""
    return None if store is None else DiskStats(**blocks, **store)


class DiskLog:
    """Says what a pool's store on disk found when it was opened, and, once, that it is off."""

    def __init__(self, store: dict[str, Any] | None) -> None:
        """`store`: what the core counts; None without a disk."""
        self._warned = False
        if store is not None:
            _log.info(
                "blocks on disk at %s: %d found, by %s%s", store["path"], store["recovered_blocks"], store["engine"],
                "" if store["direct"] else ", through the page cache",
            )  # fmt: skip

    def seen(self, store: dict[str, Any] | None) -> dict[str, Any] | None:
        """Returns `store`. Warns the caller's caller if it is off, the first time."""
        if store is not None and store["state"] == "off" and not self._warned:
            self._warned = True
            text = f"the disk at {store['path']} is switched off: {store['reason']}; the pool goes on without it"
            _log.warning("%s", text)
            warnings.warn(text, DiskWarning, stacklevel=3)
        return store
