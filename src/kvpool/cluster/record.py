"""The record of a member of a cluster, and its form in a directory: JSON with a version and a limited length.

Anybody with write access to the directory may have written a record, so reading checks every field.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from kvpool.errors import ArgumentError, ArgumentTypeError

__all__ = ["INSTANCE_MAX", "RECORD_BYTES_MAX", "Kind", "Load", "Member", "MemberEvent", "Role", "State"]

Role = Literal["prefill", "decode", "both"]
# "left" and "ended" are in the directory only briefly, so that others can tell them from an expired lease.
State = Literal["up", "draining", "left", "ended"]

Kind = Literal["joined", "changed", "left", "lost"]

INSTANCE_MAX: Final = 16383  # 14 bits of an address
RECORD_BYTES_MAX: Final = 64 << 10
_VERSION: Final = 1
_TEXT_BYTES_MAX: Final = 255
_ENDPOINTS_MAX: Final = 16
_RANK_MAX: Final = (1 << 16) - 1
_INCARNATION_MAX: Final = (1 << 64) - 1
_COUNT_MAX: Final = (1 << 63) - 1


# ---- checks


def _wrong_type(name: str, wanted: str, value: object) -> ArgumentTypeError:
    return ArgumentTypeError(f"member: {name} must be {wanted}, not {type(value).__name__}")


def _check_text(name: str, value: object, bytes_max: int) -> None:
    if not isinstance(value, str):
        raise _wrong_type(name, "a str", value)
    length = len(value.encode("utf-8", "surrogatepass"))
    if length > bytes_max or not value.isprintable():
        raise ArgumentError(
            f"member: {name} must be printable text of at most {bytes_max} bytes, and has {length}",
            given=length,
            maximum=bytes_max,
        )


def _check_count(name: str, value: object, maximum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(name, "an int", value)
    if not 0 <= value <= maximum:
        raise ArgumentError(f"member: {name} is {value}; it must be from 0 to {maximum}", value=value, maximum=maximum)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ArgumentError(f"member: {name} is {value!r}; it must be one of {', '.join(choices)}")


def _checked_endpoints(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _wrong_type("endpoints", "a list of str", value)
    if len(value) > _ENDPOINTS_MAX:
        raise ArgumentError(
            f"member: {len(value)} endpoints; {_ENDPOINTS_MAX} are allowed", given=len(value), maximum=_ENDPOINTS_MAX
        )
    for one in value:
        _check_text("endpoints", one, _TEXT_BYTES_MAX)
    return tuple(value)


# ---- records


@dataclass(frozen=True)
class Load:
    """How busy a member is, as it last published. Blocks are counted by state (docs/architecture.md).

    Attributes:
        hbm_free: Free blocks in HBM.
        hbm_active: Blocks in HBM that requests use.
        hbm_historical: Blocks in HBM that hold cached prompts; they can be evicted unless they are pinned.
        dram_free: Free blocks in DRAM.
        dram_active: Blocks in DRAM that requests use.
        dram_historical: Blocks in DRAM that hold cached prompts.
        requests: Running and waiting requests, as the engine counts them.
        requested_tokens: Tokens that matches asked for, since the pool was made.
        matched_tokens: Tokens that matches found.
    """

    hbm_free: int = 0
    hbm_active: int = 0
    hbm_historical: int = 0
    dram_free: int = 0
    dram_active: int = 0
    dram_historical: int = 0
    requests: int = 0
    requested_tokens: int = 0
    matched_tokens: int = 0

    def __post_init__(self) -> None:
        """Checks every count.

        Raises:
            ArgumentError: A count is negative or larger than 63 bits.
            ArgumentTypeError: A count is no int.
        """
        for name in _LOAD_FIELDS:
            _check_count(f"load: {name}", getattr(self, name), _COUNT_MAX)


_LOAD_FIELDS: Final = tuple(one.name for one in dataclasses.fields(Load))


@dataclass(frozen=True)
class Member:
    """A member of a cluster, as this process last saw it.

    Attributes:
        name: Its name. One member has it at a time.
        instance: The number in the addresses of its blocks, 1 to 16383. No two incarnations have the same.
        incarnation: A random number of its pool, different after each restart.
        role: "prefill", "decode", or "both".
        endpoints: The addresses at which its pool listens, the best first. Empty while it does not listen.
        layout: The layout of its blocks, as JSON.
        model: Fingerprint of the model whose cache it has.
        parallel: Its parallel configuration, as JSON; None for an instance of one rank.
        hbm_blocks: Its capacity in HBM.
        dram_blocks: Its capacity in DRAM.
        load: Its load as last published.
        lending: What it lends and owes, as JSON, as kvpool.control.lending last published it; empty if it takes no
            part.
        rebalancing: What it runs, and what it plans for all, as JSON, as kvpool.control.rebalancing last published it;
            empty if it takes no part.
        url: Where its engine answers HTTP, without `/v1`: "http://10.0.0.1:8000"; empty if it publishes none.
        rank: The data-parallel rank that its engine has at `url`; None if the server has one rank.
        events: Where its engine publishes KV events: "tcp://10.0.0.1:5557"; empty if it does not.
        events_replay: Where it repeats them; empty for nowhere.
        state: "up"; or "draining": it finishes its requests and takes no new ones.
        term: How often it has lost its lease and come back. Each new term voids its earlier links and reservations.
        since_ns: When this process first saw this incarnation in this term (CLOCK_MONOTONIC). Not compared.
    """

    name: str
    instance: int
    incarnation: int
    role: Role
    endpoints: tuple[str, ...] = ()
    layout: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    parallel: Mapping[str, Any] | None = None
    hbm_blocks: int = 0
    dram_blocks: int = 0
    load: Load = Load()
    lending: Mapping[str, Any] = field(default_factory=dict)
    rebalancing: Mapping[str, Any] = field(default_factory=dict)
    state: State = "up"
    term: int = 0
    url: str = ""
    rank: int | None = None
    events: str = ""
    events_replay: str = ""
    since_ns: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            ArgumentError: An invalid value.
            ArgumentTypeError: A value of the wrong type.
        """
        _check_text("name", self.name, _TEXT_BYTES_MAX)
        if not self.name:
            raise ArgumentError("member: name is empty")
        _check_count("instance", self.instance, INSTANCE_MAX)
        _check_count("incarnation", self.incarnation, _INCARNATION_MAX)
        _check_choice("role", self.role, get_args(Role))
        _check_choice("state", self.state, get_args(State))
        object.__setattr__(self, "endpoints", _checked_endpoints(self.endpoints))
        _check_text("model", self.model, _TEXT_BYTES_MAX)
        for name in ("url", "events", "events_replay"):
            _check_text(name, getattr(self, name), _TEXT_BYTES_MAX)
        if self.rank is not None:
            _check_count("rank", self.rank, _RANK_MAX)
        if not isinstance(self.layout, Mapping):
            raise _wrong_type("layout", "a dict", self.layout)
        if self.parallel is not None and not isinstance(self.parallel, Mapping):
            raise _wrong_type("parallel", "a dict or None", self.parallel)
        if not isinstance(self.lending, Mapping):
            raise _wrong_type("lending", "a dict", self.lending)
        if not isinstance(self.rebalancing, Mapping):
            raise _wrong_type("rebalancing", "a dict", self.rebalancing)
        for name in ("hbm_blocks", "dram_blocks", "term"):
            _check_count(name, getattr(self, name), _COUNT_MAX)
        if not isinstance(self.load, Load):
            raise _wrong_type("load", "a Load", self.load)

    @property
    def joined_for_s(self) -> float:
        """Seconds since this process saw it join or come back."""
        return (time.monotonic_ns() - self.since_ns) / 1e9

    def serves(self, role: Role) -> bool:
        """Whether it takes new work of a role: it is up, and its role is `role` or "both"."""
        return self.state == "up" and self.role in (role, "both")

    def same_incarnation(self, other: Member) -> bool:
        """Whether it is the same process, and has lost no lease in between."""
        return (self.name, self.instance, self.incarnation, self.term) == (
            other.name,
            other.instance,
            other.incarnation,
            other.term,
        )

    def _log_fields(self, why: str) -> dict[str, object]:
        """The `extra` fields of a log record about this member, and why it was logged."""
        return {
            "member": self.name,
            "instance": self.instance,
            "incarnation": self.incarnation,
            "role": self.role,
            "why": why,
        }

    def to_bytes(self) -> bytes:
        """The record as stored in a directory.

        Raises:
            ArgumentError: It cannot be written as JSON, or is longer than 64 KiB.
        """
        fields = {name: getattr(self, name) for name in _FIELDS} | {
            "v": _VERSION,
            "load": dataclasses.asdict(self.load),
        }
        try:
            content = json.dumps(fields, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(
                f"member {self.name}: layout, parallel, lending or rebalancing cannot be written as JSON: {error}"
            ) from None
        if len(content) > RECORD_BYTES_MAX:
            raise ArgumentError(
                f"member {self.name}: {len(content)} bytes of JSON; {RECORD_BYTES_MAX} are allowed",
                given=len(content),
                maximum=RECORD_BYTES_MAX,
            )
        return content

    @classmethod
    def from_bytes(cls, content: bytes) -> Member:
        """Reads what `to_bytes` wrote. Ignores fields that a newer version has added.

        Raises:
            ValueError: The content is not a valid record. (ArgumentError is a ValueError.)
        """
        if len(content) > RECORD_BYTES_MAX:
            raise ValueError(f"{len(content)} bytes; {RECORD_BYTES_MAX} are allowed")
        try:
            fields = json.loads(content)
        except RecursionError:
            raise ValueError("JSON that is nested too deeply") from None
        if not isinstance(fields, dict) or fields.get("v") != _VERSION:
            raise ValueError(f"not a member's record of version {_VERSION}")
        load = fields.get("load")
        if not isinstance(load, dict) or not isinstance(fields.get("endpoints"), list):
            raise ValueError("a record without load or endpoints")
        known = {name: fields[name] for name in _FIELDS if name in fields}
        try:
            known["load"] = Load(**{name: load[name] for name in _LOAD_FIELDS if name in load})
            member = cls(**known)
        except TypeError as error:  # a field is missing, or has the wrong type
            raise ValueError(str(error)) from None
        if member.instance == 0:
            raise ValueError("a record without an instance")
        return member


_FIELDS: Final = tuple(one.name for one in dataclasses.fields(Member) if one.compare)


@dataclass(frozen=True)
class MemberEvent:
    """A change of a member.

    Attributes:
        kind: "joined": it is new. "changed": it has published other endpoints, load, lending, rebalancing or state.
            "left": it has announced its leave. "lost": it has died, or was silent for longer than its lease. Transfers
            with it will not complete, and a later member of the same name is a different one.
        member: The member after the change, or its last state.
    """

    kind: Kind
    member: Member
