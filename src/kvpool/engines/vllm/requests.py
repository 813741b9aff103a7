"""What is remembered of a request of vLLM: its tokens as an array, and the namespace that its blocks belong to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["Digests", "TokenArray", "Tracked", "cacheable", "namespace_of", "namespaces_of_groups"]

_DIGEST_BYTES: Final = 16
_DIGEST_EVERY: Final = 1024  # tokens
_NAMESPACE_MAX = 200  # characters; a longer one is known by its hash


class TokenArray:
    """The tokens of a request, converted once: only what was added since is read."""

    def __init__(self) -> None:
        self._array: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._size = 0

    def first(self, request: Any, count: int) -> npt.NDArray[np.int32]:
        """The first `count` tokens, int32. REQUIRES: the request has as many, and tokens are only ever added."""
        if count > self._size:
            if count > len(self._array):
                grown = np.empty(max(request.num_tokens, 2 * len(self._array)), np.int32)
                grown[: self._size] = self._array[: self._size]
                self._array = grown
            size = request.num_tokens
            size = min(size, len(self._array))
            self._array[self._size : size] = request.all_token_ids[self._size : size]
            self._size = size
        return self._array[:count]


class Digests:
    """Hashes of the beginnings of a request's tokens. Each token is read once, and a few again for each hash."""

    def __init__(self) -> None:
        self._states = [hashlib.blake2b(digest_size=_DIGEST_BYTES)]  # after 0, 1024, 2048 and so on tokens

    def of(self, tokens: npt.NDArray[np.int32], count: int) -> str:
        """Of the first `count` tokens. REQUIRES: `tokens` begin as at all calls before."""
        states = self._states
        while len(states) <= count // _DIGEST_EVERY:
            begin = (len(states) - 1) * _DIGEST_EVERY
            states.append(states[-1].copy())
            states[-1].update(_bytes(tokens[begin : begin + _DIGEST_EVERY]))
        nearest = count // _DIGEST_EVERY
        state = states[nearest].copy()
        state.update(_bytes(tokens[nearest * _DIGEST_EVERY : count]))
        return state.hexdigest()


def _bytes(tokens: npt.NDArray[np.int32]) -> bytes:
    return np.ascontiguousarray(tokens, np.int32).tobytes()


def cacheable(request: Any) -> bool:
    """Whether tokens say all about the request's content.

    Not of prompts given as embeddings; and not of sessions whose tokens vLLM takes back when more input comes.
    """
    return request.prompt_token_ids is not None and request.prompt_embeds is None and not request.resumable


def namespace_of(request: Any) -> str:
    """The namespace of a request: what its content depends on besides the tokens.

    That is the salt, the LoRA adapter, and the images and other features whose tokens are placeholders. All features of
    the request count, also for the blocks before the first one: requests share blocks only if they have the same
    features at the same places.
    """
    lora = request.lora_request
    features = [[feature.identifier, feature.mm_position.offset] for feature in request.mm_features]
    if not (request.cache_salt or lora or features):
        return ""
    adapter = [lora.lora_name, lora.lora_int_id] if lora else []
    name = json.dumps([request.cache_salt or "", adapter, features], ensure_ascii=True)
    return name if len(name) <= _NAMESPACE_MAX else hashlib.blake2b(name.encode(), digest_size=32).hexdigest()


def namespaces_of_groups(namespace: str, groups: int) -> list[str]:
    """Those of each group of layers: the same tokens are cached once for each. No other namespace has such a name."""
    return [namespace, *(f"{namespace}#{group}" for group in range(1, groups))]


@dataclass
class Tracked:
    """A request that the scheduler has.

    Attributes:
        request: vLLM's.
        namespace: Of its blocks.
        readable: Its prompt may be looked up. False for ever after a load has failed: it would be tried again and
            again.
        writable: Its blocks may be saved.
        tokens: Its tokens.
        planned: Blocks from the first on that are cached, or whose save was planned.
        local: Tokens that vLLM's own cache had, at the last lookup.
        gap: A group of layers lacks blocks in the cache that vLLM does not have, either. So no more is saved: a prefix
            is a hit where every group has it.
        tails: By group, at which block the tail begins in which it is cached. Groups that are cached from the first
            block on are not in it.
        digests: Hashes of the beginnings of its tokens.
        boundary: The tokens at the end of the last step that ended at the end of a block.
    """

    request: Any
    namespace: str
    readable: bool
    writable: bool
    tokens: TokenArray = field(default_factory=TokenArray)
    planned: int = 0
    local: int = 0
    gap: bool = False
    tails: dict[int, int] = field(default_factory=dict)
    digests: Digests = field(default_factory=Digests)
    boundary: int = 0
