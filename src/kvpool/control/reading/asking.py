"""What instances are asked beside requests: the model's tokens of a prompt, and which adapters they have.

Tokens by `POST /tokenize` of vLLM and SGLang, adapters by OpenAI's `GET /v1/models`.

The router has neither the model's tokenizer nor its chat template; the instances have both. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from kvpool.control.reading.prompts import Kind, Tokens

__all__ = ["adapters_in", "answered", "is_about_the_prompt", "is_of_sglang", "models_in", "question"]

_TOKEN_MAX: Final = 2**31 - 1

_Raw = msgspec.Raw | msgspec.UnsetType


class _Part(msgspec.Struct):
    type: str = "text"


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


class _Chat(msgspec.Struct, omit_defaults=True):
    """The fields of a chat on which the text of its prompt depends."""

    messages: msgspec.Raw
    model: _Raw = msgspec.UNSET
    tools: _Raw = msgspec.UNSET
    tool_choice: _Raw = msgspec.UNSET
    add_generation_prompt: _Raw = msgspec.UNSET
    continue_final_message: _Raw = msgspec.UNSET
    add_special_tokens: _Raw = msgspec.UNSET
    chat_template: _Raw = msgspec.UNSET
    chat_template_kwargs: _Raw = msgspec.UNSET
    documents: _Raw = msgspec.UNSET
    reasoning_effort: _Raw = msgspec.UNSET


class _Completion(msgspec.Struct, omit_defaults=True):
    prompt: str | list[str]
    model: _Raw = msgspec.UNSET
    add_special_tokens: _Raw = msgspec.UNSET


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Refusal(msgspec.Struct):
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    object: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _ListedModel(msgspec.Struct):
    id: str
    parent: str | None = None
    owned_by: str | None = None


class _Models(msgspec.Struct):
    data: list[_ListedModel]


_MODELS: Final = msgspec.json.Decoder(_Models)
_CHAT: Final = msgspec.json.Decoder(_Chat)
_COMPLETION: Final = msgspec.json.Decoder(_Completion)
_MESSAGES: Final = msgspec.json.Decoder(list[_Message])
_KWARGS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TOKENS: Final = msgspec.json.Decoder(_Tokens)
_REFUSAL: Final = msgspec.json.Decoder(_Refusal)


def question(kind: Kind, body: bytes | bytearray) -> bytes | None:
    """The body to ask with; None for a prompt that has no such tokens: with a picture, of token ids, of no known form.

    Args:
        kind: Of the endpoint; not "other".
        body: Of the request, JSON.
    """
    try:
        return _of_chat(_CHAT.decode(body)) if kind == "chat" else _of_completion(_COMPLETION.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def answered(data: bytes) -> Tokens | None:
    """The tokens of an answer, at least one; None if it has none."""
    try:
        tokens: Sequence[int] = _TOKENS.decode(data).tokens
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not tokens or min(tokens) < 0 or max(tokens) > _TOKEN_MAX:
        return None
    return np.array(tokens, dtype=np.int32)


def adapters_in(data: bytes) -> Sequence[str]:
    """Of a list of models, the names of those that are made from another one; nothing if it is no such list."""
    return [each.id for each in _listed(data) if each.parent not in (None, each.id)]


def is_of_sglang(data: bytes) -> bool:
    """Whether a list of models is of SGLang, which says so of each."""
    return any(each.owned_by == "sglang" for each in _listed(data))


def models_in(data: bytes) -> Sequence[str]:
    """Of a list of models, the names of the others, which are no adapters; nothing if it is no such list."""
    return [each.id for each in _listed(data) if each.parent in (None, each.id)]


def is_about_the_prompt(data: bytes) -> bool:
    """Whether a body is an error object of OpenAI's API (of an unknown model, say): its server knows the path."""
    try:
        refusal = _REFUSAL.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    said = refusal.object
    return refusal.error is not msgspec.UNSET or (isinstance(said, msgspec.Raw) and bytes(said) == b'"error"')


def _listed(data: bytes) -> Sequence[_ListedModel]:
    try:
        return _MODELS.decode(data).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()


def _of_chat(chat: _Chat) -> bytes | None:
    messages = _MESSAGES.decode(chat.messages)
    parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
    if not messages or any(part.type not in ("text", "input_text") for part in parts):
        return None
    if chat.documents is not msgspec.UNSET or chat.reasoning_effort is not msgspec.UNSET:
        _move_to_template(chat)
    return msgspec.json.encode(chat)


def _move_to_template(chat: _Chat) -> None:
    """Names these as arguments of the template, to which vLLM hands them in a chat, and only so where it tokenizes.

    SGLang looks for the effort beside them, too, so that one stays where it is.
    """
    raw = chat.chat_template_kwargs
    given = {} if isinstance(raw, msgspec.UnsetType) or bytes(raw) == b"null" else _KWARGS.decode(raw)
    for name in ("documents", "reasoning_effort"):
        value = getattr(chat, name)
        if value is not msgspec.UNSET and bytes(value) != b"null":
            given.setdefault(name, value)
    if "reasoning_effort" in given:
        thinks = bytes(given["reasoning_effort"]) != b'"none"'
        given.setdefault("enable_thinking", msgspec.Raw(b"true" if thinks else b"false"))
    chat.documents = msgspec.UNSET
    if given:
        chat.chat_template_kwargs = msgspec.Raw(msgspec.json.encode(given))


def _of_completion(completion: _Completion) -> bytes | None:
    if isinstance(completion.prompt, list):  # of several prompts the first one decides
        if not completion.prompt:
            return None
        completion.prompt = completion.prompt[0]
    return msgspec.json.encode(completion) if completion.prompt else None
