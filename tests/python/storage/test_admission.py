"""Which blocks are saved."""

from __future__ import annotations

import pytest

import kvpool
from kvpool.storage import Always, OnSecondUse

A, B, C, D, E = (bytes([letter]) * 32 for letter in b"ABCDE")


def test_always_saves_all_that_is_stored():
    policy = Always()
    assert policy.stored([A, B, C], 1) == [1, 2]
    assert policy.used([A, B]) == []


def test_what_is_stored_once_is_not_saved():
    assert OnSecondUse().stored([A, B, C], 0) == []


def test_what_is_stored_again_is_saved_once():
    policy = OnSecondUse()
    policy.stored([A, B], 0)
    assert policy.stored([A, B], 1) == [1]  # B was evicted, and computed again
    assert policy.stored([A, B], 0) == [0]
    assert policy.stored([A, B], 0) == []


def test_what_a_request_finds_in_the_pool_is_saved():
    policy = OnSecondUse()
    policy.stored([A, B, C], 0)
    assert policy.used([A, B]) == [0, 1]
    assert policy.used([A, B, C]) == [2]


def test_a_prompt_that_becomes_longer_is_used_once():
    """The blocks of an answer are stored one after another."""
    policy = OnSecondUse()
    for end in range(1, 5):
        assert policy.stored([A, B, C, D][:end], end - 1) == []


def test_what_two_prompts_share_is_saved():
    policy = OnSecondUse()
    policy.stored([A, B, C], 0)
    assert policy.stored([A, B, D], 2) == [0, 1]
    assert policy.stored([A, B, E], 2) == []  # is saved already


def test_what_was_not_saved_can_be_chosen_again():
    policy = OnSecondUse()
    policy.stored([A, B], 0)
    assert policy.used([A, B]) == [0, 1]
    policy.not_saved([B, C])
    assert policy.used([A, B]) == [1]


def test_the_longest_unused_names_are_forgotten():
    policy = OnSecondUse(remembered=2)
    policy.stored([A, B], 0)
    policy.stored([C], 0)
    assert policy.used([B]) == [0]
    assert policy.used([A]) == []  # forgotten: this is its first use
    with pytest.raises(kvpool.ArgumentError):
        OnSecondUse(remembered=0)
