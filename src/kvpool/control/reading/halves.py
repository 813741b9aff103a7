"""The two requests that a request becomes where prefill and decode are apart.

    to prefill   the client's, for one token and no stream, with {"kvpool": {"to": DECODE}} as kv_transfer_params
    to decode    the client's, with the kv_transfer_params of prefill's answer

These are the fields with which vLLM's servers are told where KV cache goes. Only the outermost object is decoded:
prompts may be long, and others must not wait for them.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

__all__ = ["ANSWER_BYTES_MAX", "divisible", "for_decode", "for_prefill", "params_of", "without_params"]

ANSWER_BYTES_MAX: Final = 1 << 20  # of prefill's answer, which has one token

_PARAMS: Final = "kv_transfer_params"
_NAMES_MAX: Final = 8192  # in a body, at any depth: the outermost ones are decoded
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PROMPTS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_ONE_TOKEN: Final = ("max_tokens", "max_completion_tokens")
_OF_ANSWERS: Final = ("stream_options", "min_tokens", "n", "best_of")


def divisible(body: bytes | bytearray) -> bool:
    """Whether a body asks for one prompt, in JSON without liberties. Others are answered by one instance."""
    if body.count(b'":') > _NAMES_MAX:
        return False
    try:
        prompt = bytes(_FIELDS.decode(body).get("prompt", b""))
        several = prompt[:1] == b"[" and prompt[1:].lstrip()[:1] in (b'"', b"[")
        return not several or len(_PROMPTS.decode(prompt)) == 1
    except _UNREADABLE:
        return False


def for_prefill(body: bytes | bytearray, chat: bool, decode: str) -> bytes:
    """The request for the instance that computes the prompt.

    Args:
        body: The client's. REQUIRES: it is divisible.
        chat: Whether it is a chat.
        decode: Name of the instance to which the KV cache goes.
    """
    fields: dict[str, Any] = {
        name: value for name, value in _FIELDS.decode(body).items() if name not in (*_OF_ANSWERS, *_ONE_TOKEN)
    }
    fields["max_completion_tokens" if chat else "max_tokens"] = 1
    fields["stream"] = False
    fields[_PARAMS] = {"kvpool": {"to": decode}}
    return msgspec.json.encode(fields)


def params_of(answer: bytes | bytearray) -> msgspec.Raw | None:
    """What decode must know, as prefill's answer says; None if it says nothing."""
    try:
        params = _FIELDS.decode(answer).get(_PARAMS)
    except _UNREADABLE:
        return None
    return params if params is not None and bytes(params)[:1] == b"{" else None


def for_decode(body: bytes | bytearray, params: msgspec.Raw | None) -> bytes:
    """The request for the instance that generates the answer. What the client says of transfers itself is dropped."""
    fields: dict[str, Any] = {name: value for name, value in _FIELDS.decode(body).items() if name != _PARAMS}
    if params is not None:
        fields[_PARAMS] = params
    return msgspec.json.encode(fields)


def without_params(body: bytes | bytearray) -> bytes | None:
    """A body without what its client says of transfers. None: it says nothing of them, or cannot be read."""
    if _PARAMS.encode() not in body and b"\\u" not in body:  # of which letters of the name may be made
        return None
    if body.count(b'":') <= _NAMES_MAX:
        try:
            fields = _FIELDS.decode(body)
        except _UNREADABLE:
            pass
        else:
            return msgspec.json.encode(fields) if fields.pop(_PARAMS, None) is not None else None
    try:
        loose = json.loads(body)  # which takes some liberties, as the instances do
    except (ValueError, RecursionError):
        return None
    if not isinstance(loose, dict) or loose.pop(_PARAMS, None) is None:
        return None
    return json.dumps(loose).encode()
