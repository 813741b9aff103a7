r"""The bytes of a stored block: a header, and the content behind it.

    bytes   field
    0       magic     8   b"KVPOOLB\n"
    8       version   2   1
    10      size      2   of the header: 112
    12      key size  4   16 to 64
    16      length    8   of the content
    24      checksum  4   CRC-32 of the content
    28                4   zero
    32      key      64   followed by zeros
    96      seal     16   BLAKE2b of the 96 bytes before

Numbers are little-endian. The seal finds a damaged header, the checksum damaged content, the length what is cut off or
appended, and the key a file that was renamed. Pure.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import Final, Literal, TypeAlias

from kvpool.storage.store import Content, content_bytes

__all__ = ["HEADER_BYTES", "Fault", "content_fault", "header_fault", "header_of"]

Fault: TypeAlias = Literal["torn", "rotten", "foreign"]
"""What is wrong with a stored block: its size; its bytes; or it is something else."""

_FIELDS: Final = struct.Struct("<8sHHIQI4x64s")
_MAGIC: Final = b"KVPOOLB\n"
_VERSION: Final = 1
_SEAL_BYTES: Final = 16
HEADER_BYTES: Final = _FIELDS.size + _SEAL_BYTES


def header_of(key: bytes, content: Content) -> bytes:
    """The header of a block."""
    packed = _FIELDS.pack(_MAGIC, _VERSION, HEADER_BYTES, len(key), content_bytes(content), _checksum(content), key)
    return packed + _seal(packed)


def header_fault(header: bytes, key: bytes, content: Content, size: int) -> Fault | None:
    """What is wrong with a file, as far as its header and size tell.

    Args:
        header: Its first `HEADER_BYTES` bytes, fewer if it has fewer.
        key: Under which it was looked for.
        content: Where its content is to go: says how long that must be.
        size: Of the whole file.
    """
    if len(header) < HEADER_BYTES:
        return "torn"
    packed = header[: _FIELDS.size]
    magic, version, header_bytes, key_bytes, length, _, named = _FIELDS.unpack(packed)
    if magic != _MAGIC:
        return "foreign"
    if header[_FIELDS.size : HEADER_BYTES] != _seal(packed):
        return "rotten"
    if version != _VERSION or header_bytes != HEADER_BYTES or named[:key_bytes] != key:
        return "foreign"
    return None if size - HEADER_BYTES == length == content_bytes(content) else "torn"


def content_fault(header: bytes, content: Content) -> Fault | None:
    """What is wrong with the content that was read behind a header without fault."""
    checksum = _FIELDS.unpack(header[: _FIELDS.size])[5]
    return None if checksum == _checksum(content) else "rotten"


def _checksum(content: Content) -> int:
    checksum = 0
    for piece in content:
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _seal(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_SEAL_BYTES, person=b"kvpool.block.1").digest()
