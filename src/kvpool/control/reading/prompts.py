"""Turns a request's body into the tokens for routing.

The router has no model. Its tokens only need to preserve common prefixes, because the instance tokenizes the prompt
itself. So by default a token is four bytes of the prompt's UTF-8, about the length of a word piece of English, which
also gives the cost model realistic lengths. With a tokenizer.json they are the model's tokens. Token ids from the
client are used unchanged.

A chat becomes one text: tools first, as in chat templates, then each message after its role. Later messages follow, so
a continued chat has the earlier one as a prefix.

A body of a few MiB can contain a million values, each of which would become a Python object. So only the necessary
fields are decoded, a prompt with too many values is treated as text, and only the first `prompt_bytes_max` of a prompt
are read, which is enough for routing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError, Unsupported

__all__ = [
    "INLINE_BYTES",
    "NOTHING",
    "ByteTokens",
    "Kind",
    "Reading",
    "Tokenizer",
    "Tokens",
    "Unreadable",
    "chat_text",
    "has_few_values",
    "is_quick",
    "load_tokenizer",
    "read_prompt",
    "short",
    "units",
]

Tokens = npt.NDArray[np.int32]
Kind = Literal["completions", "chat", "other"]

INLINE_BYTES: Final = 64 << 10  # a smaller body is read in well under a millisecond, except as `is_quick` says
_BYTES: Final = 4  # a token
_TOKEN_MAX: Final = 2**31 - 1
_MODEL_MAX: Final = 1 << 10  # characters
_VALUES_QUICK: Final = 4096  # in a body
_VALUES_MAX: Final = 100_000  # in a prompt: each takes up to 250 bytes
_FIELDS: Final = ("model", "user", "stream", "cache_salt", "lora_path", "prompt", "messages", "tools")
NOTHING: Final = np.zeros(1, dtype=np.int32)  # less than a block: no tree learns it


class Unreadable(Exception):
    """The body is no JSON object.

    Args:
        message: For the client.
        sure: Every JSON parser refuses it. Otherwise the instance may be less strict.
    """

    def __init__(self, message: str, sure: bool = True) -> None:
        super().__init__(message)
        self.sure = sure


@dataclass(frozen=True)
class Reading:
    """The result of reading a body.

    Attributes:
        tokens: Of the prompt; at least one.
        session: Of the client, if it names one.
        namespace: Model, salt and kind of token: prompts of different ones share no cache.
        stream: The client wants events.
        ids_namespace: The namespace that the prompt has as tokens of the model; `namespace` if these are such.
        salt: Of the cache; "" for none, None for one that is too long to be stored.
        model: That it names; None for none, or one that is too long.
        lora_path: The adapter that it names in SGLang's field of this name; None likewise.
    """

    tokens: Tokens
    session: str | None
    namespace: str
    stream: bool
    ids_namespace: str
    salt: str | None
    model: str | None
    lora_path: str | None


class Tokenizer(Protocol):
    """Turns text into tokens. Texts with a common prefix have tokens with a common prefix."""

    slow: bool  # texts take so long that others would wait for it

    def encode(self, text: str) -> Tokens:
        """int32, at least one. Pure; may run in any thread."""


class ByteTokens:
    """Four bytes of UTF-8 a token, the last one padded with zeros."""

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
        # Unlike `encode`, this one lets other threads run meanwhile.
        ids = self._tokenizer.encode_batch_fast([clean], add_special_tokens=False)[0].ids
        return np.array(ids, dtype=np.int32) if ids else NOTHING


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
    except Exception as error:  # the package raises plain exceptions
        raise ArgumentError(f"tokenizer {path}: {error}") from error


def is_quick(body: bytes | bytearray) -> bool:
    """Whether reading a body is quick enough for the event loop."""
    return len(body) <= INLINE_BYTES and _values(body) <= _VALUES_QUICK


def units(body: bytes | bytearray) -> int:
    """How many times the bytes of a short body a body has, at least one: for what takes time with its length."""
    return max(1, -(-len(body) // INLINE_BYTES))


def has_few_values(body: bytes | bytearray) -> bool:
    """Whether a body has no more values than short bodies of the same length together may have."""
    return _values(body) <= _VALUES_QUICK * units(body)


def read_prompt(
    tokenizer: Tokenizer,
    kind: Kind,
    session: str | None,
    body: bytes | bytearray,
    prompt_bytes_max: int = 1 << 20,
) -> Reading:
    """Reads a body. Ignores fields that the router does not know; the instance checks them. Pure.

    Args:
        tokenizer: For texts.
        kind: Of the endpoint; not "other".
        session: From the headers, if any.
        body: JSON.
        prompt_bytes_max: The part of a prompt that is read: bytes of ids, characters of a text.

    Raises:
        Unreadable: The body is no JSON object.
    """
    fields = _parse(body, prompt_bytes_max)
    user = fields.get("user")
    session = short(session or (user if isinstance(user, str) and user else None))
    tokens, unit = _tokens(tokenizer, kind, fields, prompt_bytes_max)
    model, salt = fields.get("model"), fields.get("cache_salt")
    adapter = fields.get("lora_path")
    if isinstance(adapter, list):  # one for each prompt: of several prompts the first one decides
        adapter = adapter[0] if adapter else None
    namespace, ids_namespace = _namespace(unit, model, salt, adapter), _namespace("ids", model, salt, adapter)
    told = "" if salt is None else salt if isinstance(salt, str) and short(salt) == salt else None
    streams = fields.get("stream") is True
    return Reading(tokens, session, namespace, streams, ids_namespace, told, _name(model), _name(adapter))


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


def short(text: str | None) -> str | None:
    """Shortens a client's text, which is stored, to a readable form for the scheduler."""
    if text is None or (len(text) <= 64 and text.isascii()):
        return text
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


# ---- inside


class _Raw(msgspec.Struct):
    """The fields that matter, not decoded yet. Others are skipped."""

    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    user: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    stream: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    cache_salt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    lora_path: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Ids:
    """Token ids."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens


class _Opaque(str):
    """JSON with too many values to decode."""


_RAW: Final = msgspec.json.Decoder(_Raw)
_IDS: Final = msgspec.json.Decoder(list[int])
_ANY: Final = msgspec.json.Decoder()


def _values(data: bytes | bytearray) -> int:
    """About how many lists, objects and keys there are; more where texts have such characters."""
    return data.count(b"[") + data.count(b"{") + data.count(b":")


def _parse(body: bytes | bytearray, prompt_bytes_max: int) -> Mapping[str, Any]:
    try:
        raw = _RAW.decode(body)
        given = ((name, getattr(raw, name)) for name in _FIELDS)
        return {
            name: _decoded(name, bytes(value), prompt_bytes_max) for name, value in given if value is not msgspec.UNSET
        }
    except RecursionError as error:
        raise Unreadable("the body is nested too deeply") from error
    except msgspec.ValidationError as error:
        raise Unreadable("the body is no JSON object") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _parse_laxly(body, error)


def _parse_laxly(body: bytes | bytearray, strict: Exception) -> Mapping[str, Any]:
    """As Python's own reader has it, which lets NaN and halves of surrogate pairs pass; of short bodies only."""
    if len(body) > INLINE_BYTES:
        raise Unreadable(f"the body is no JSON: {strict}", sure=False) from strict
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Unreadable("the body is no JSON object")
    return fields


def _decoded(name: str, value: bytes, prompt_bytes_max: int) -> Any:
    if name == "prompt" and (ids := _ids(value, prompt_bytes_max)) is not None:
        return _Ids(ids)
    if not value.startswith(b'"') and _values(value) > _VALUES_MAX:
        return _Opaque(value[:prompt_bytes_max].decode("utf-8", "replace"))
    try:
        return _ANY.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        if len(value) <= INLINE_BYTES:
            try:
                return json.loads(value)  # a number too large for others
            except UnicodeDecodeError:
                raise
            except ValueError:  # it has more digits than Python converts
                pass
        return _Opaque(value[:prompt_bytes_max].decode("utf-8", "replace"))


def _ids(value: bytes, prompt_bytes_max: int) -> Tokens | None:
    """A list of token ids, its beginning if it is longer; None for anything else."""
    if not value.startswith(b"[") or not value[1:64].lstrip()[:1].isdigit():
        return None
    if len(value) > prompt_bytes_max:
        value = value[: value.rfind(b",", 0, prompt_bytes_max)] + b"]"
    try:
        ids = _IDS.decode(value)
    except msgspec.DecodeError:
        return None
    return _checked(ids)


def _checked(ids: list[int]) -> Tokens | None:
    if not ids or min(ids) < 0 or max(ids) > _TOKEN_MAX:
        return None
    return np.array(ids, dtype=np.int32)


def _tokens(tokenizer: Tokenizer, kind: Kind, fields: Mapping[str, Any], most: int) -> tuple[Tokens, str]:
    """The tokens, and what kind of token they are."""
    if kind == "chat":
        return tokenizer.encode(chat_text(fields.get("messages"), fields.get("tools"))[:most]), "text"
    prompt = fields.get("prompt")
    if isinstance(prompt, _Opaque):
        return tokenizer.encode(prompt), "json"
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # of several prompts the first one decides
    if isinstance(prompt, str):
        return tokenizer.encode(prompt[:most]), "text"
    if isinstance(prompt, list) and not any(type(token) is not int for token in prompt):
        ids = _checked(prompt[: most // _BYTES])
        prompt = prompt if ids is None else _Ids(ids)
    if isinstance(prompt, _Ids):
        return prompt.tokens, "ids"
    return tokenizer.encode(_canonical(prompt)[:most]), "json"


def _name(value: Any) -> str | None:
    """The name of a model or an adapter."""
    return value if isinstance(value, str) and len(value) <= _MODEL_MAX else None


def _namespace(unit: str, model: Any, salt: Any, adapter: Any) -> str:
    parts = [unit, model] if adapter is None else [unit, model, ["lora_path", adapter]]
    return short(_canonical([*parts, *([] if salt is None else [salt])])) or ""


def _canonical(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except RecursionError as error:
        raise Unreadable("the body is nested too deeply") from error


def _content(content: Any) -> str:
    """A message's text; what is no text (an image, say) by its JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = (part.get("text") if isinstance(part, Mapping) else None for part in content)
        pairs = zip(content, texts, strict=True)
        return "".join(text if isinstance(text, str) else _canonical(part) for part, text in pairs)
    return "" if content is None else _canonical(content)
