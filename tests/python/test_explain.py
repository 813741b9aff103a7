"""Pool.explain_match: why a match ends where it does."""

from __future__ import annotations

import numpy as np
import pytest
from kit import BLOCK, prompt, small_pool, state_of, store

import kvpool
from kvpool import DRAM


@pytest.fixture
def pool():
    with small_pool() as pool:
        yield pool


def test_a_completely_cached_prompt(pool):
    addrs = store(pool, prompt(3))
    report = pool.explain_match(prompt(3))
    assert isinstance(report, kvpool.MatchReport)
    assert (report.reason, report.matched_tokens, report.requested_tokens) == ("complete", 3 * BLOCK, 3 * BLOCK)
    assert report.addrs.tolist() == addrs.tolist()
    assert str(report) == "12 of 12 tokens are cached (3 blocks: 3 in HBM).\nThe whole prompt is cached."


def test_tokens_that_do_not_fill_a_block(pool):
    store(pool, prompt(3))
    report = pool.explain_match(prompt(3)[:-1])
    assert (report.reason, report.matched_tokens, report.partial_tokens) == ("complete", 2 * BLOCK, BLOCK - 1)
    assert "What is left (3) does not fill a block of 4; 3 of it agree" in str(report)


def test_a_prompt_that_diverges(pool):
    store(pool, prompt(3))
    tokens = prompt(3)
    tokens[6] = 99
    report = pool.explain_match(tokens)
    assert (report.reason, report.matched_tokens, report.partial_tokens) == ("diverges", BLOCK, 2)
    assert "token 6 is the first" in str(report)


def test_a_prompt_that_is_longer_than_the_cached_one(pool):
    store(pool, prompt(2))
    report = pool.explain_match(prompt(3))
    assert (report.reason, report.matched_tokens) == ("nothing_beyond", 2 * BLOCK)
    assert "No cached prompt goes beyond token 8" in str(report)


def test_an_empty_namespace(pool):
    store(pool, prompt(2))
    report = pool.explain_match(prompt(3), namespace="lora")
    assert (report.reason, report.matched_tokens) == ("no_namespace", 0)
    assert report.elsewhere == {"": 2 * BLOCK}
    assert "Nothing is stored under this namespace" in str(report)
    assert "'' holds 8" in str(report)


def test_other_namespaces_that_hold_more_are_named(pool):
    store(pool, prompt(1))
    store(pool, prompt(3), namespace="a")
    store(pool, prompt(1), namespace="b")
    report = pool.explain_match(prompt(3))
    assert report.elsewhere == {"a": 3 * BLOCK}


def test_an_empty_pool(pool):
    report = pool.explain_match(prompt(2))
    assert (report.reason, report.matched_tokens) == ("nothing_beyond", 0)
    assert str(report).startswith("0 of 8 tokens are cached (0 blocks).")


def test_an_empty_prompt(pool):
    report = pool.explain_match([])
    assert (report.reason, report.requested_tokens) == ("complete", 0)


def test_both_tiers_are_counted(pool):
    store(pool, prompt(3))
    pool.swap_out(2)
    assert "1 in HBM, 2 in DRAM" in str(pool.explain_match(prompt(3)))


def test_looking_changes_nothing(pool):
    store(pool, prompt(2, 1))
    store(pool, prompt(2, 2), medium=DRAM)
    before = state_of(pool)
    nodes = pool.stats().index_nodes
    pool.explain_match(prompt(1, 1))
    assert state_of(pool) == before
    assert pool.stats().index_nodes == nodes
    store(pool, prompt(2, 3))
    for _ in range(3):
        pool.explain_match(prompt(2, 1))
    pool.evict(2, medium=kvpool.HBM)
    assert pool.explain_match(prompt(2, 1)).matched_tokens == 0  # it was not used


def test_explain_agrees_with_match(pool):
    random = np.random.default_rng(15)
    for _ in range(100):
        store(pool, np.repeat(random.integers(0, 2, random.integers(1, 4)), BLOCK), evict=True)
        tokens = np.repeat(random.integers(0, 2, 4), BLOCK)
        tokens[random.integers(0, 16)] += random.integers(0, 2)
        report = pool.explain_match(tokens)
        with pool.match(tokens) as hit:
            assert (hit.tokens, hit.partial_tokens) == (report.matched_tokens, report.partial_tokens)
            assert hit.addrs.tolist() == report.addrs.tolist()
