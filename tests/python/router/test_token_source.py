"""When an instance is asked for tokens: what ends the questions for all, for how long, and how they begin again."""

from __future__ import annotations

import pytest

from kvpool.control.reading.asking import is_about_the_prompt
from kvpool.control.router.token_source import PAUSE_S, TokenSource


def test_faults_end_the_questions_when_several_that_differ_have_failed_in_a_row() -> None:
    source = TokenSource()
    assert [source.failed(b"one", 0.0) for _ in range(9)] == [0.0] * 9
    assert source.failed(b"two", 0.0) == 0.0
    source.told()
    assert [source.failed(each, 0.0) for each in (b"1", b"2", b"3")] == [0.0, 0.0, PAUSE_S]
    assert not source.may_be_asked(PAUSE_S - 0.1)
    assert source.may_be_asked(PAUSE_S)


def test_after_a_pause_one_question_at_a_time_is_a_trial_and_pauses_grow_while_it_fails() -> None:
    source, now = TokenSource(), 0.0
    assert source.failed(b"q", now, sure=True) == PAUSE_S
    assert source.failed(b"r", now, sure=True) == 0.0  # asked before the pause
    pauses = []
    for _ in range(5):
        now += 100.0
        assert source.may_be_asked(now)
        source.under_way += 1
        assert not source.may_be_asked(now)
        pauses.append(source.failed(b"q", now))
        source.under_way -= 1
    assert pauses == [10.0, 20.0, 40.0, 60.0, 60.0]
    source.told()
    source.under_way += 1
    assert source.may_be_asked(now)
    assert source.failed(b"q", now + 100.0, sure=True) == PAUSE_S


def test_a_path_that_is_not_there_ends_them_for_long() -> None:
    assert TokenSource().failed(b"q", 0.0, sure=True, for_long=True) == 60.0


@pytest.mark.parametrize(
    ("body", "is_so"),
    [
        (b'{"error": {"message": "The model does not exist.", "code": 404}}', True),
        (b'{"object": "error", "message": "no such model"}', True),
        (b'{"detail": "Not Found"}', False),
        (b'{"object": "list"}', False),
        (b"", False),
        (b"[]", False),
        (b"<html>", False),
    ],
)
def test_an_error_object_is_about_the_prompt(body: bytes, is_so: bool) -> None:
    assert is_about_the_prompt(body) is is_so
