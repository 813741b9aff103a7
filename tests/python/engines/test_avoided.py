"""Members that have failed are left out for a while, whose length depends on the failure."""

from __future__ import annotations

from kvpool.engines.avoided import Avoided


def test_a_member_is_left_out_until_its_time_is_over() -> None:
    now = 100.0
    avoided = Avoided(lambda: now)
    avoided.add("a", 5.0)
    avoided.add("b", 60.0)
    assert avoided.without("abc") == ["c"]
    now += 5.0
    assert avoided.without("cab") == ["c", "a"]
    now += 55.0
    assert avoided.without("abc") == ["a", "b", "c"]
    assert not avoided._until


def test_the_last_failure_counts() -> None:
    now = 0.0
    avoided = Avoided(lambda: now)
    avoided.add("a", 60.0)
    avoided.add("a", 2.0)
    now += 2.0
    assert avoided.without("a") == ["a"]
