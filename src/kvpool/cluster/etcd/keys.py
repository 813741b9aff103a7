"""The keys of a cluster in etcd, and how they are read and changed.

PREFIX/members/NAME        the record of a member, on its lease
PREFIX/instances/NUMBER    the incarnation that has the id, and how many ids had been given including this one. On a
                           lease of an hour, so that an id stays taken if etcd is silent for longer than the member's
                           lease
PREFIX/dropped/INCARNATION a peer has dropped this incarnation: its record had expired, and its link to the peer had
                           ended. It must fence itself before it goes on. On a lease of an hour
PREFIX/ids                 how many ids were given, and a random mark by which members notice that etcd was started
                           again without its data
"""

from __future__ import annotations

import json
import logging
import secrets
import urllib.parse
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Final

from kvpool.cluster.etcd.gateway import after, decode, encode
from kvpool.cluster.record import INSTANCE_MAX, Member

__all__ = [
    "Holder", "Ids", "Keys", "Value", "absent", "delete", "get", "on_lease", "put", "unchanged", "values",
]  # fmt: skip

_GIVEN_MAX: Final = 1 << 53  # every JSON parser can represent these integers
_SHOWN_BYTES: Final = 60  # of an unreadable counter, in an error message

_log = logging.getLogger("kvpool.cluster")


@dataclass(frozen=True)
class Value:
    """A key as read from etcd.

    Attributes:
        key: The name of the key.
        content: Its value.
        revision: The revision of its last change.
        lease: The lease that it expires with; 0: none.
    """

    key: str
    content: bytes
    revision: int
    lease: int

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Value:
        """From etcd's JSON."""
        key = decode(fields["key"]).decode("utf-8", "replace")
        content = decode(fields.get("value", ""))
        return cls(key, content, int(fields.get("mod_revision", 0)), int(fields.get("lease", 0)))


@dataclass(frozen=True)
class Ids:
    """The value of PREFIX/ids: a counter that only grows, even when the 16,383 ids start over.

    Attributes:
        given: How many ids were given.
        birth: The random mark of this etcd's data.
    """

    given: int
    birth: str

    @classmethod
    def new(cls, given: int) -> Ids:
        """A counter with a new mark."""
        return cls(given, secrets.token_hex(8))

    def raised(self, given: int) -> Ids:
        """The counter with at least this many given."""
        return replace(self, given=max(self.given, given))

    def next_free(self, taken: Collection[int]) -> tuple[Ids, int] | None:
        """The next free id, and the counter after it. None if all ids are taken."""
        for step in range(1, INSTANCE_MAX + 1):
            number = (self.given + step - 1) % INSTANCE_MAX + 1
            if number not in taken:
                return replace(self, given=self.given + step), number
        return None

    def to_bytes(self) -> bytes:
        """The value as stored."""
        return json.dumps({"v": 1, "given": self.given, "birth": self.birth}).encode()

    @classmethod
    def read(cls, content: bytes) -> Ids | None:
        """Reads a stored value; None if no member can have written it."""
        try:
            fields = json.loads(content)
            given, birth = fields["given"], fields["birth"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if type(given) is int and isinstance(birth, str) and 0 <= given <= _GIVEN_MAX:
            return cls(given, birth)
        return None


@dataclass(frozen=True)
class Holder:
    """The value of PREFIX/instances/NUMBER.

    Attributes:
        incarnation: The incarnation that has the id.
        given: How many ids had been given including this one.
    """

    incarnation: int
    given: int

    def to_bytes(self) -> bytes:
        """The value as stored."""
        return f"{self.incarnation} {self.given}".encode()

    @classmethod
    def read(cls, content: bytes) -> Holder | None:
        """Reads a stored value; None if no member can have written it."""
        words = content.split()
        if len(words) != 2 or not all(word.isdigit() and len(word) <= 20 for word in words):
            return None
        return cls(int(words[0]), min(int(words[1]), _GIVEN_MAX))


class Keys:
    """The names of the keys of one cluster."""

    def __init__(self, prefix: str) -> None:
        """`prefix` has no slash at either end."""
        self._prefix = f"{prefix}/"
        self.members = f"{prefix}/members/"
        self.ids = f"{prefix}/ids"
        self._instances = f"{prefix}/instances/"
        self._dropped = f"{prefix}/dropped/"

    def member(self, name: str) -> str:
        """The key of a member's record."""
        return self.members + urllib.parse.quote(name, safe="", errors="surrogatepass")

    def instance(self, number: int) -> str:
        """The key of an id."""
        return self._instances + str(number)

    def dropped(self, incarnation: int) -> str:
        """The key that says that a peer has dropped an incarnation."""
        return self._dropped + str(incarnation)

    def name_of(self, key: str) -> str:
        """The name of the member whose record has this key."""
        return urllib.parse.unquote(key.removeprefix(self.members), errors="surrogatepass")

    def all_members(self) -> dict[str, Any]:
        """The range of all records."""
        return {"key": encode(self.members), "range_end": after(self.members)}

    def all_instances(self) -> dict[str, Any]:
        """The range of all ids that are taken."""
        return {"key": encode(self._instances), "range_end": after(self._instances)}

    def number_of(self, key: str) -> int:
        """The id of a key in `all_instances`; 0 if the key has no valid id."""
        number = key.removeprefix(self._instances)
        return int(number) if number.isdigit() and len(number) <= 5 else 0

    def no_counter(self, value: Value) -> str:
        """The message about an unreadable counter of ids, with its content."""
        shown = repr(value.content[:_SHOWN_BYTES])[1:]
        more = f" and {len(value.content) - _SHOWN_BYTES} more bytes" if len(value.content) > _SHOWN_BYTES else ""
        return f"the key {self.ids} in etcd holds {shown}{more}, which is not a counter of ids"

    def everything(self) -> dict[str, Any]:
        """The range of all keys below the prefix."""
        return {"key": encode(self._prefix), "range_end": after(self._prefix)}

    def record(self, value: Value) -> Member | None:
        """Reads a record. Logs a warning and returns None if it is not valid."""
        try:
            record = Member.from_bytes(value.content)
            if self.member(record.name) != value.key:
                raise ValueError(f"it is the record of {record.name}")
        except ValueError as error:
            _log.warning("%s in etcd is ignored: %s", value.key, error)
            return None
        return record


# ---- transactions, as etcd's JSON has them


def absent(key: str) -> dict[str, Any]:
    """Compares: the key does not exist."""
    return {"key": encode(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}


def unchanged(key: str, value: Value | None) -> dict[str, Any]:
    """Compares: the key is still as it was read."""
    if value is None:
        return absent(key)
    return {"key": encode(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(value.revision)}


def on_lease(key: str, lease: int) -> dict[str, Any]:
    """Compares: the key exists and is on this lease."""
    return {"key": encode(key), "target": "LEASE", "result": "EQUAL", "lease": str(lease)}


def put(key: str, content: bytes, lease: int = 0) -> dict[str, Any]:
    """Writes a key."""
    return {"request_put": {"key": encode(key), "value": encode(content), "lease": str(lease)}}


def delete(key: str) -> dict[str, Any]:
    """Deletes a key."""
    return {"request_delete_range": {"key": encode(key)}}


def get(key: str) -> dict[str, Any]:
    """Reads a key."""
    return {"request_range": {"key": encode(key)}}


def values(answer: dict[str, Any]) -> list[Value]:
    """The keys in the answer to a range request."""
    return [Value.read(fields) for fields in answer.get("kvs", ())]
