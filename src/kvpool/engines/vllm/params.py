"""``kv_transfer_params`` of a request and of an answer: what a client or proxy says to two engines.

Anybody who may send a request may have written them, so every field is checked, and what is wrong is ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["KEY", "Announced", "Params", "letter", "parts", "read", "read_letter"]

_log = logging.getLogger("kvpool.engines.vllm")

KEY: Final = "kvpool"
_COMPLETE: Final = b"kvpool-prompt "
_FAILED: Final = b"kvpool-failed "
_NAME_MAX: Final = 255  # characters, as of a member
_ID_MAX: Final = 64
_PART_MAX: Final = _ID_MAX + len("/9999")
_TOKENS_MAX: Final = 1 << 31
_SHOWN: Final = 80


@dataclass(frozen=True)
class Announced:
    """A prompt that another engine sends.

    Attributes:
        peer: The engine's name in the cluster.
        id: The number of this prompt among all that were ever sent, as text.
        tokens: How many tokens it has, in whole blocks.
    """

    peer: str
    id: str
    tokens: int

    def told(self) -> dict[str, Any]:
        """As ``kv_transfer_params`` of an answer, and of the next request."""
        return {KEY: {"from": self.peer, "id": self.id, "tokens": self.tokens}}


@dataclass(frozen=True)
class Params:
    """What a request says.

    Attributes:
        to: Send the prompt to this member. "": to nobody.
        announced: The prompt comes from another engine. None: it does not.
        pull: Fetch what this member has of the prompt. "": the request does not say.
    """

    to: str = ""
    announced: Announced | None = None
    pull: str = ""


def read(given: object) -> Params:
    """Reads ``kv_transfer_params``. What is missing, or wrong, is left out; what is wrong is logged."""
    if not isinstance(given, Mapping) or KEY not in given:
        return Params()
    fields = given[KEY]
    if not isinstance(fields, Mapping):
        return _ignored(fields)
    to, peer, pull = (fields.get(name, "") for name in ("to", "from", "pull"))
    if not all(_is_text(name, _NAME_MAX) for name in (to, peer, pull)):
        return _ignored(fields)
    if not peer:
        return Params(to=to, pull=pull)
    number, tokens = fields.get("id"), fields.get("tokens")
    if not _is_text(number, _ID_MAX) or not number or type(tokens) is not int or not 0 < tokens < _TOKENS_MAX:
        return _ignored(fields)
    return Params(to, Announced(peer, str(number), tokens), pull)


def parts(number: str, groups: int) -> list[str]:
    """The ids of what is sent of a prompt for each group of layers. They arrive one by one."""
    return [number] if groups == 1 else [f"{number}/{group}" for group in range(groups)]


def letter(number: str, complete: bool = True) -> bytes:
    """What goes with the last blocks of a prompt; or, if not `complete`, what says that they do not come."""
    return (_COMPLETE if complete else _FAILED) + number.encode()


def read_letter(private: bytes) -> tuple[str, bool]:
    """The id in a letter, and whether its prompt is complete. The id is "" if these bytes are something else."""
    for begin in (_COMPLETE, _FAILED):
        number = private[len(begin) :]
        if private.startswith(begin) and len(number) <= _PART_MAX and number.isascii():
            return number.decode(), begin is _COMPLETE
    return "", False


def _is_text(value: object, longest: int) -> bool:
    return isinstance(value, str) and len(value) <= longest and (not value or value.isprintable())


def _ignored(fields: object) -> Params:
    _log.warning("kv_transfer_params of a request are ignored, because kvpool cannot read them: %.*r", _SHOWN, fields)
    return Params()
