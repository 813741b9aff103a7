"""What stands in etcd, and how it is read and changed.

PREFIX/members/NAME      the record of a member, on its lease
PREFIX/instances/NUMBER  the epoch of the incarnation that has the id, on the same lease
PREFIX/ids               the highest id ever given, and a random mark by which etcd can be told from one that was
                         started anew with nothing in it
"""

from __future__ import annotations

import json
import logging
import secrets
import urllib.parse
from dataclasses import dataclass, replace
from typing import Any

from kvpool.cluster.gateway import after, decode, encode
from kvpool.cluster.record import INSTANCE_MAX, Member

__all__ = ["Ids", "Keys", "Value", "absent", "on_lease", "put", "unchanged", "values"]

_log = logging.getLogger("kvpool.cluster")


@dataclass(frozen=True)
class Value:
    """A key as it stands in etcd.

    Attributes:
        key: Its name.
        content: Its value.
        revision: Of its last change.
        lease: That it ends with; 0: none.
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
    """What stands in PREFIX/ids.

    Attributes:
        highest: The id given last.
        birth: The mark of this etcd's data.
    """

    highest: int
    birth: str

    @classmethod
    def new(cls, highest: int) -> Ids:
        """Of a cluster that begins, or begins again."""
        return cls(highest, secrets.token_hex(8))

    def raised(self, highest: int) -> Ids:
        """With at least this highest."""
        return replace(self, highest=max(self.highest, highest))

    def to_bytes(self) -> bytes:
        """As it is written down."""
        return json.dumps({"v": 1, "highest": self.highest, "birth": self.birth}).encode()

    @classmethod
    def read(cls, content: bytes) -> Ids:
        """Of what nobody here has written, a new one, with a warning."""
        try:
            fields = json.loads(content)
            highest, birth = fields["highest"], fields["birth"]
            if isinstance(highest, int) and isinstance(birth, str) and 0 <= highest <= INSTANCE_MAX:
                return cls(highest, birth)
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        _log.warning("what stands under ids in etcd is no counter; it is begun anew")
        return cls.new(0)


class Keys:
    """The names of the keys of one cluster."""

    def __init__(self, prefix: str) -> None:
        """Of a prefix without slashes at its ends."""
        self._prefix = f"{prefix}/"
        self.members = f"{prefix}/members/"
        self.ids = f"{prefix}/ids"
        self._instances = f"{prefix}/instances/"

    def member(self, name: str) -> str:
        """Of a member's record."""
        return self.members + urllib.parse.quote(name, safe="", errors="surrogatepass")

    def instance(self, number: int) -> str:
        """Of who has an id."""
        return self._instances + str(number)

    def name_of(self, key: str) -> str:
        """Of the member whose record it is."""
        return urllib.parse.unquote(key.removeprefix(self.members), errors="surrogatepass")

    def all_members(self) -> dict[str, Any]:
        """The range of all records."""
        return {"key": encode(self.members), "range_end": after(self.members)}

    def everything(self) -> dict[str, Any]:
        """The range of all that stands below the prefix."""
        return {"key": encode(self._prefix), "range_end": after(self._prefix)}

    def record(self, value: Value) -> Member | None:
        """Reads a record. None, and a warning, for what is none."""
        try:
            record = Member.from_bytes(value.content)
            if self.member(record.name) != value.key:
                raise ValueError(f"it is the record of {record.name}")
        except ValueError as error:
            _log.warning("%s in etcd is left out: %s", value.key, error)
            return None
        return record


# ---- transactions, as etcd's JSON has them


def absent(key: str) -> dict[str, Any]:
    """True while the key is not there."""
    return {"key": encode(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}


def unchanged(key: str, value: Value | None) -> dict[str, Any]:
    """True while the key is as it was read."""
    if value is None:
        return absent(key)
    return {"key": encode(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(value.revision)}


def on_lease(key: str, lease: int) -> dict[str, Any]:
    """True while the key is there, on this lease."""
    return {"key": encode(key), "target": "LEASE", "result": "EQUAL", "lease": str(lease)}


def put(key: str, content: bytes, lease: int = 0) -> dict[str, Any]:
    """Writes a key."""
    return {"request_put": {"key": encode(key), "value": encode(content), "lease": str(lease)}}


def values(answer: dict[str, Any]) -> list[Value]:
    """The keys in an answer to a range."""
    return [Value.read(fields) for fields in answer.get("kvs", ())]
