"""What members publish of their settlements: what was said is read as it was, and nonsense is refused."""

from __future__ import annotations

import logging

import pytest
from control.lending_kit import town_of
from policy.lending_kit import row

from kvpool import ArgumentError, Member
from kvpool.control.lending import row_json
from kvpool.control.lending.records import said_from, said_json
from kvpool.policy import lending as policy

SAID = policy.Said(
    policy.Call(policy.Settlement((7, 9, 8), 30), (1, 4, 2), 5, 30.0, 8, 4), {3: policy.Answer(1, 6, "agreed", 9, 2, 1)}
)


def member_of(said, **changes):
    lending = row_json(row(7)) | said | changes
    return Member.from_bytes(Member("m7", 7, 70, "both", term=1, lending=lending).to_bytes())


def test_what_is_said_comes_back_from_a_record_as_it_was():
    assert said_from(member_of(said_json(SAID))) == SAID
    assert said_from(member_of(said_json(policy.Said()))) == policy.Said()
    assert said_from(member_of({})) is None
    assert said_from(member_of(said_json(SAID), v=2)) is None
    assert said_from(Member("m7", 7, 70, "both", lending={})) is None


@pytest.mark.parametrize(
    "settling",
    [3, None, [], {}, {"call": None}, {"answers": {}}, {"call": 0, "answers": {}}, {"call": {}, "answers": {}},
     {"call": None, "answers": {"x": [1, 6, "agreed"]}}, {"call": None, "answers": {"3": 5}},
     {"call": None, "answers": {"3": [1, 6, "maybe"]}}, {"call": None, "answers": {"3": [1, 6, "agreed", 1, 1, 1, 1]}}],
)  # fmt: skip
def test_what_cannot_be_said_is_no_settlement_and_its_row_counts(settling, caplog):
    bad = member_of({"settling": settling})
    with pytest.raises(ArgumentError, match="m7 publishes a settlement"):
        said_from(bad)
    town, [(_, lending)] = town_of(20)
    with caplog.at_level(logging.WARNING, "kvpool.lending"):
        town.show(bad, "joined")
        lending.settle()
    assert 7 in lending._members.ledger
    assert "m7 publishes a settlement" in caplog.text


@pytest.mark.parametrize("changes", [
    {"members": [9, 7, 8]}, {"members": [7]}, {"members": "789"}, {"members": [7, None, 8]}, {"terms": [1]},
    {"blocks": 0}, {"number": -1}, {"seconds": 1e9}, {"seconds": "1"}, {"seconds": 10**400}, {"due": 31},
    {"due": None}, {"unit": 0},
])  # fmt: skip
def test_a_call_that_cannot_be_is_refused(changes):
    said = said_json(SAID)
    said["settling"]["call"] |= changes
    with pytest.raises(ArgumentError, match="m7 publishes a settlement"):
        said_from(member_of(said))
