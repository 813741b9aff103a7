"""Names of members are remembered for a while, whose length depends on why."""

from __future__ import annotations

from kvpool.engines.remembered import Remembered


def test_a_name_is_remembered_until_its_time_is_over() -> None:
    now = 100.0
    remembered = Remembered(lambda: now)
    remembered.add("a", 5.0)
    remembered.add("b", 60.0)
    assert remembered.missing("abc") == ["c"]
    assert remembered.names() == {"a", "b"}
    now += 5.0
    assert remembered.missing("cab") == ["c", "a"]
    now += 55.0
    assert remembered.missing("abc") == ["a", "b", "c"]
    assert not remembered._until


def test_the_last_time_counts() -> None:
    now = 0.0
    remembered = Remembered(lambda: now)
    remembered.add("a", 60.0)
    remembered.add("a", 2.0)
    now += 2.0
    assert remembered.missing("a") == ["a"]
