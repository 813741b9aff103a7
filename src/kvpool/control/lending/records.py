"""What a member publishes of its lending, as JSON in its record: its row, and what it says of settlements."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from platform import node
from typing import Any, Final

from kvpool.cluster import Member
from kvpool.errors import ArgumentError
from kvpool.policy import lending
from kvpool.types import Medium

__all__ = ["row_from", "row_json", "said_from", "said_json", "this_host"]

_VERSION: Final = 1

# What another machine's record may raise where it is read. An ArgumentError is a ValueError.
_UNREADABLE: Final = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


def row_json(row: lending.Row) -> dict[str, Any]:
    """What a member publishes of a row: the rest is in its record."""
    return {
        "v": _VERSION,
        "version": row.version,
        "host": row.host,
        "blocks": row.blocks,
        "free": {str(int(medium)): blocks for medium, blocks in row.free.items()},
        "lend_max": row.lend_max,
        "lent": row.lent,
        "wants": row.wants,
        "debts": {str(creditor): blocks for creditor, blocks in row.debts.items()},
    }


def row_from(member: Member) -> lending.Row | None:
    """The row in a member's record; None if it takes no part in lending, or publishes what this version cannot read.

    Raises:
        ArgumentError: It is no row that a member can be in.
    """
    fields = member.lending
    if not fields or fields.get("v") != _VERSION:
        return None
    try:
        return lending.Row(
            member.instance,
            member.term,
            fields["version"],
            fields["host"],
            fields["blocks"],
            {Medium(int(medium)): blocks for medium, blocks in fields["free"].items()},
            fields["lend_max"],
            fields["lent"],
            {int(creditor): blocks for creditor, blocks in fields["debts"].items()},
            fields["wants"],
        )
    except _UNREADABLE as error:
        raise ArgumentError(f"{member.name} publishes a row that cannot be: {error!r}") from None


def said_json(said: lending.Said) -> dict[str, Any]:
    """What a member that settles debts publishes beside its row."""
    answers = {
        str(coordinator): [answer.term, answer.number, answer.state, answer.able, answer.room, answer.home]
        for coordinator, answer in said.answers.items()
    }
    return {"settling": {"call": None if said.call is None else _call_json(said.call), "answers": answers}}


def said_from(member: Member) -> lending.Said | None:
    """What a member says of settlements; None if it takes no part in them.

    Raises:
        ArgumentError: It is nothing that a member can say.
    """
    published = member.lending
    if not published or published.get("v") != _VERSION or "settling" not in published:
        return None
    fields = published["settling"]
    try:
        return lending.Said(
            None if fields["call"] is None else _call_from(fields["call"]),
            {int(coordinator): lending.Answer(*answer) for coordinator, answer in fields["answers"].items()},
        )
    except _UNREADABLE as error:
        raise ArgumentError(f"{member.name} publishes a settlement that cannot be: {error!r}") from None


@lru_cache(maxsize=1)
def this_host() -> str:
    """Tells this machine from others, whatever names containers give it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return node()


def _call_json(call: lending.Call) -> dict[str, Any]:
    return {
        "members": call.settlement.members,
        "terms": call.terms,
        "blocks": call.settlement.blocks,
        "number": call.number,
        "seconds": call.seconds,
        "due": call.due,
        "unit": call.unit,
    }


def _call_from(fields: Mapping[str, Any]) -> lending.Call:
    settlement = lending.Settlement(tuple(fields["members"]), fields["blocks"])
    return lending.Call(
        settlement, tuple(fields["terms"]), fields["number"], fields["seconds"], fields["due"], fields["unit"]
    )
