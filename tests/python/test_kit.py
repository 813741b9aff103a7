"""The seams of the long forms: they shorten what takes hours, and never below what runs usually."""

from __future__ import annotations

import kit
import pytest


@pytest.mark.parametrize(
    ("long", "most", "expected"),
    [
        (False, None, 30),
        (False, "100", 30),
        (True, None, 1000),
        (True, "", 1000),
        (True, "100", 100),
        (True, "5000", 1000),
        (True, "7", 30),
    ],
)
def test_a_long_form_repeats_what_it_is_told_to(long, most, expected, monkeypatch):
    monkeypatch.setattr(kit, "LONG", long)
    if most is None:
        monkeypatch.delenv("KVPOOL_LONG_EXAMPLES", raising=False)
    else:
        monkeypatch.setenv("KVPOOL_LONG_EXAMPLES", most)
    assert kit.repeats(30, long=1000) == expected
