"""From a request's body to the tokens that it is routed by.

The router has no model. Two prompts that begin alike must become tokens that begin alike, and nothing else is asked of
them; the instance makes its own tokens. So by default a token is four bytes of the prompt's UTF-8, about what a word
piece of English has, which also gives the cost model lengths of the right size. With a tokenizer.json they are the
model's own. Token ids that the client sends are taken as they are.

A chat becomes one text: tools first, for chat templates put them first, then each message behind its role. Whatever
follows a message stands behind it, so a chat that goes on has the earlier one as a prefix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import anyio.to_thread
import numpy as np
import numpy.typing as npt

from kvpool.control.router.errors import Refusal
from kvpool.errors import ArgumentError, Unsupported

__all__ = ["Asked", "ByteTokens", "PromptReader", "Tokenizer", "chat_text", "load_tokenizer"]

Tokens = npt.NDArray[np.int32]
Kind = Literal["completions", "chat", "other"]

_BYTES: Final = 4  # a token
_LONG: Final = 1 << 20  # bytes of a body, milliseconds of reading
_TOKEN_MAX: Final = 2**31 - 1
_NOTHING: Final = np.zeros(1, dtype=np.int32)  # less than a block: no tree learns it


@dataclass(frozen=True)
class Asked:
    """What a request wants, for routing.

    Attributes:
        kind: Of the endpoint.
        tokens: Of the prompt; at least one.
        session: Of the client, None where it names none.
        namespace: Model, salt and kind of token: prompts of different ones share no cache.
        stream: The client wants events.
    """

    kind: Kind
    tokens: Tokens
    session: str | None = None
    namespace: str = ""
    stream: bool = False


class Tokenizer(Protocol):
    """Text to tokens, so that texts that begin alike have tokens that begin alike."""

    slow: bool  # long texts take so long that others would wait for it

    def encode(self, text: str) -> Tokens:
        """int32, at least one. Pure; may run in any thread."""


class ByteTokens:
    """Four bytes of UTF-8 a token, the last one filled up with zeros."""

    slow = False

    def encode(self, text: str) -> Tokens:
        """As Tokenizer.encode."""
        data = text.encode("utf-8", "surrogatepass")  # JSON may hold half a pair
        filled = data + bytes(-len(data) % _BYTES or (0 if data else _BYTES))
        return np.frombuffer(filled, dtype="<i4").astype(np.int32, copy=False)


class _HuggingFace:
    slow = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> Tokens:
        clean = text.encode("utf-8", "replace").decode()
        ids = self._tokenizer.encode(clean, add_special_tokens=False).ids
        return np.array(ids, dtype=np.int32) if ids else _NOTHING


def load_tokenizer(path: Path | None) -> Tokenizer:
    """From a tokenizer.json, or ByteTokens for None.

    Raises:
        ArgumentError: The file cannot be read, or is no tokenizer.
        Unsupported: The package `tokenizers` is not installed.
    """
    if path is None:
        return ByteTokens()
    try:
        import tokenizers
    except ImportError as error:
        raise Unsupported("--tokenizer needs the package tokenizers: pip install tokenizers") from error
    try:
        return _HuggingFace(tokenizers.Tokenizer.from_str(path.read_text()))
    except OSError as error:
        raise ArgumentError(f"tokenizer {path}: {error.strerror}") from error
    except Exception as error:  # the package raises no class of its own
        raise ArgumentError(f"tokenizer {path}: {error}") from error


def chat_text(messages: Any, tools: Any = None) -> str:
    """One text of a chat; it begins with the text of each chat that it continues."""
    parts = [] if not tools else [_canonical(tools), "\n"]
    for message in messages if isinstance(messages, list) else [messages]:
        if not isinstance(message, Mapping):
            parts.append(_canonical(message))
            continue
        rest = {key: value for key, value in message.items() if key not in ("role", "content") and value}
        parts += ["<|", str(message.get("role")), "|>", _content(message.get("content"))]
        parts += [_canonical(rest)] if rest else []
        parts.append("\n")
    return "".join(parts)


class PromptReader:
    """Reads requests. Thread-safe.

    Args:
        tokenizer: For texts.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def read(self, kind: Kind, headers: Mapping[str, str], body: bytes) -> Asked:
        """What a request wants. What the router does not know in a body is the instance's to judge.

        Raises:
            Refusal: 400, the body is no JSON object.
        """
        session = headers.get("x-session-id")
        if kind == "other":
            return Asked(kind, _NOTHING, _short(session))
        if self._tokenizer.slow or len(body) > _LONG:  # others do not wait for it
            return await anyio.to_thread.run_sync(self._read, kind, session, body)
        return self._read(kind, session, body)

    def _read(self, kind: Kind, session: str | None, body: bytes) -> Asked:
        fields = _parse(body)
        user = fields.get("user")
        session = _short(session or (user if isinstance(user, str) and user else None))
        tokens, unit = self._tokens(kind, fields)
        salt = fields.get("cache_salt")
        namespace = _short(_canonical([unit, fields.get("model"), *([] if salt is None else [salt])]))
        return Asked(kind, tokens, session, namespace or "", fields.get("stream") is True)

    def _tokens(self, kind: Kind, fields: Mapping[str, Any]) -> tuple[Tokens, str]:
        """The tokens, and what kind of token they are."""
        if kind == "chat":
            return self._tokenizer.encode(chat_text(fields.get("messages"), fields.get("tools"))), "text"
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]  # of several prompts the first one decides
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt), "text"
        if _are_ids(prompt):
            return np.array(prompt, dtype=np.int32), "ids"
        return self._tokenizer.encode(_canonical(prompt)), "json"


def _short(text: str | None) -> str | None:
    """What clients make up is remembered: it has to be short, and legible for the scheduler."""
    if text is None or (len(text) <= 64 and text.isascii()):
        return text
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def _are_ids(prompt: Any) -> bool:
    if not isinstance(prompt, list) or not prompt or any(type(token) is not int for token in prompt):
        return False
    return bool(min(prompt) >= 0 and max(prompt) <= _TOKEN_MAX)


def _parse(body: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON: {error}", "invalid_json") from error
    if not isinstance(fields, dict):
        raise Refusal(400, "the body is no JSON object", "invalid_json")
    return fields


def _canonical(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except RecursionError as error:
        raise Refusal(400, "the body is nested too deeply", "invalid_json") from error


def _content(content: Any) -> str:
    """A message's text; what is no text (an image, say) by its JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = (part.get("text") if isinstance(part, Mapping) else None for part in content)
        pairs = zip(content, texts, strict=True)
        return "".join(text if isinstance(text, str) else _canonical(part) for part, text in pairs)
    return "" if content is None else _canonical(content)
