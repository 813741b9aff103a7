"""Content keys: names of blocks that are equal exactly if their content is, on any host.

    start    H("kvpool" fields: format version, model, page format, dtype, compression, rank slice, namespace)
    key[0]   H("T", start,    tokens of block 0)             a chain: a key stands for all tokens up to its block
    key[i]   H("T", key[i-1], tokens of block i)
    key      H("E", start, the engine's own key)             where an engine names its blocks itself

H is BLAKE2b of 32 bytes with a secret key, so without that key nobody can tell from a name which tokens it stands for,
or make a name for tokens. Every field is preceded by its length, so two lists of fields never give the same bytes.
Tokens are hashed as int64, little-endian, whichever type they have in memory. Pure; thread-safe.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvpool.arguments import shown
from kvpool.errors import ArgumentError, ArgumentTypeError
from kvpool.types import KVLayout, Layout, RawLayout

__all__ = ["KEY_BYTES", "ContentKeys", "tokens_from"]

KEY_BYTES: Final = 32
"""Bytes of a content key."""

FORMAT_VERSION: Final = 1
"""Of the content of blocks and of these keys. Another version gives other keys."""

_PERSON: Final = b"kvpool.content.1"  # 16 bytes: keeps these hashes apart from all others that use the same secret
_SECRET_MAX: Final = hashlib.blake2b.MAX_KEY_SIZE
_ENGINE_KEY_MAX: Final = 4096


class ContentKeys:
    """The keys of the blocks of one model, layout and rank slice.

    Args:
        model: A fingerprint of the weights and of all that changes what they compute, such as a quantisation.
        layout: What a block holds. `order` is left out: the bytes of a block are the same in either order.
        rank_slice: Which part of the heads and layers the blocks hold; "" for all. Ranks of a tensor-parallel engine
            have different ones, such as "tp 0 of 2".
        compression: How the content is packed; "none".
        secret: The key of the hash, of any length; b"" for none. Pools that share a store need the same.

    Raises:
        ArgumentError: `model` is empty: blocks of two models would have the same keys.
        ArgumentTypeError: A value of the wrong type.
    """

    def __init__(
        self, *, model: str, layout: Layout, rank_slice: str = "", compression: str = "none", secret: bytes = b""
    ) -> None:
        for name, value in (("model", model), ("rank_slice", rank_slice), ("compression", compression)):
            if not isinstance(value, str):
                raise ArgumentTypeError(f"{name} must be a str, not {type(value).__name__} ({shown(value)})")
        if not isinstance(secret, bytes | bytearray):
            raise ArgumentTypeError(f"secret must be bytes, not {type(secret).__name__}")
        if not isinstance(layout, KVLayout | RawLayout):
            raise ArgumentTypeError(f"layout must be a KVLayout or a RawLayout, not {type(layout).__name__}")
        if not model:
            raise ArgumentError("model is empty: name the model, so that no other model reads its blocks")
        self._block_tokens = layout.block_tokens
        secret = bytes(secret)
        self._secret = hashlib.blake2b(secret).digest() if len(secret) > _SECRET_MAX else secret
        self._fields = (
            str(FORMAT_VERSION), model, *_page_format(layout), layout.dtype, compression, str(layout.block_tokens),
            rank_slice,
        )  # fmt: skip

    def of_tokens(self, tokens: Any, namespace: str = "") -> list[bytes]:
        """The key of each whole block of a prompt.

        Args:
            tokens: Token ids: an array or a list of any integer type, or bytes, which are taken as int32.
            namespace: Of the prompt, as in `Pool.match`.

        Returns:
            As many keys of `KEY_BYTES` as there are whole blocks. The keys of a prefix are a prefix of the keys.
        """
        wide = tokens_from(tokens)
        step = 8 * self._block_tokens
        content = memoryview(wide.astype("<i8", copy=False).tobytes())
        link, previous, keys = self._hash(b"T"), self._start(namespace), []
        for begin in range(0, len(wide) // self._block_tokens * step, step):
            one = link.copy()
            one.update(previous)
            one.update(content[begin : begin + step])
            previous = one.digest()
            keys.append(previous)
        return keys

    def of_engine_keys(self, keys: Sequence[bytes], namespace: str = "") -> list[bytes]:
        """The key of each block that an engine names itself, by a hash over all tokens up to its end.

        Args:
            keys: The engine's keys, 1 to 4,096 bytes each.
            namespace: What the engine's keys do not cover.

        Raises:
            ArgumentTypeError: One is not bytes.
            ArgumentError: One is empty or too long.
        """
        link, start, named = self._hash(b"E"), self._start(namespace), []
        for position, key in enumerate(keys):
            if not isinstance(key, bytes | bytearray | memoryview):
                raise ArgumentTypeError(f"key {position} must be bytes, not {type(key).__name__}")
            if not 1 <= len(key) <= _ENGINE_KEY_MAX:
                raise ArgumentError(
                    f"key {position} has {len(key)} bytes; it must have 1 to {_ENGINE_KEY_MAX}", position=position
                )
            one = link.copy()
            one.update(start)
            one.update(key)
            named.append(one.digest())
        return named

    def _start(self, namespace: str) -> bytes:
        if not isinstance(namespace, str):
            raise ArgumentTypeError(f"namespace must be a str, not {type(namespace).__name__} ({shown(namespace)})")
        hashed = self._hash(b"S")
        for field in (*self._fields, namespace):
            content = field.encode("utf-8", "surrogatepass")
            hashed.update(len(content).to_bytes(8, "little"))
            hashed.update(content)
        return hashed.digest()

    def _hash(self, kind: bytes) -> hashlib.blake2b:
        return hashlib.blake2b(kind, digest_size=KEY_BYTES, key=self._secret, person=_PERSON)


def tokens_from(tokens: Any) -> npt.NDArray[np.int64]:
    """Token ids as int64, in one row.

    Raises:
        ArgumentTypeError: They are no integers.
        ArgumentError: They are not in one row, or one does not fit 64 bits.
    """
    if isinstance(tokens, memoryview) and tokens.format == "B":
        tokens = tokens.tobytes()
    if isinstance(tokens, bytes | bytearray):
        if len(tokens) % 4:
            raise ArgumentError(f"tokens in bytes are int32, and {len(tokens)} bytes are no multiple of 4")
        return np.frombuffer(bytes(tokens), dtype=np.int32).astype(np.int64)
    if not isinstance(tokens, np.ndarray | memoryview | array | Sequence) or isinstance(tokens, str):
        raise ArgumentTypeError(f"tokens must be integers in an array or a list, not {type(tokens).__name__}")
    try:
        found = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as error:
        raise ArgumentTypeError(f"tokens must be integers: {error}") from error
    if not found.size and not isinstance(tokens, np.ndarray):
        return np.empty(0, np.int64)
    if found.ndim != 1:
        raise ArgumentError(f"tokens must be in one row, not in {found.ndim} dimensions")
    if found.dtype == object and all(isinstance(one, int) and not isinstance(one, bool) for one in found):
        raise ArgumentError("a token does not fit 64 bits")
    if found.dtype.kind not in "iu":
        raise ArgumentTypeError(f"tokens must be integers, not {found.dtype}")
    if found.dtype.kind == "u" and found.itemsize == 8 and found.size and int(found.max()) >= 1 << 63:
        raise ArgumentError("a token does not fit 64 bits with a sign", value=int(found.max()))
    return found.astype(np.int64)


def _page_format(layout: Layout) -> tuple[str, ...]:
    if isinstance(layout, RawLayout):
        return ("raw", str(layout.block_bytes))
    return ("kv", str(layout.layers), str(layout.kv_heads), str(layout.head_dim), layout.dims, layout.pages)
