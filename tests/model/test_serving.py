"""The cache changes how long an answer takes, and nothing else; and the engine gives back every block it takes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from llama import Llama  # noqa: E402
from serving import Engine, Served, Tokens  # noqa: E402

import kvpool  # noqa: E402

if TYPE_CHECKING:
    from conftest import MakePool

NEW_TOKENS = 6
BLOCK = 4


def prompt(count: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.int32)


def assert_same_answer(on: Served, off: Served) -> None:
    assert on.tokens == off.tokens
    assert torch.equal(on.logits, off.logits)  # not merely close: see examples/llama.py


@pytest.fixture
def off(model: Llama, make_pool: MakePool) -> Engine:
    return Engine(model, make_pool(64, 0), cache=False)


def test_nothing_is_cached_at_first(model: Llama, make_pool: MakePool, off: Engine) -> None:
    served = Engine(model, make_pool(64, 0)).serve(prompt(21), NEW_TOKENS)
    assert (served.prompt_tokens, served.cached_tokens, len(served.tokens)) == (21, 0, NEW_TOKENS)
    assert_same_answer(served, off.serve(prompt(21), NEW_TOKENS))


# The last token is always computed, and blocks are cached whole: of 20 tokens, 16 come from the cache.
@pytest.mark.parametrize(("count", "cached"), [(1, 0), (3, 0), (4, 0), (5, 4), (19, 16), (20, 16), (21, 20)])
def test_the_same_prompt_again_is_a_full_hit_but_for_its_last_token(
    model: Llama, make_pool: MakePool, off: Engine, count: int, cached: int
) -> None:
    engine = Engine(model, make_pool(64, 0))
    engine.serve(prompt(count), NEW_TOKENS)
    again = engine.serve(prompt(count), NEW_TOKENS)
    assert again.cached_tokens == cached
    assert_same_answer(again, off.serve(prompt(count), NEW_TOKENS))


@pytest.mark.parametrize("shared", [0, 3, 4, 10, 16])
def test_a_shared_prefix_is_used_in_whole_blocks(model: Llama, make_pool: MakePool, off: Engine, shared: int) -> None:
    engine = Engine(model, make_pool(64, 0))
    engine.serve(prompt(22, seed=1), NEW_TOKENS)
    other = np.concatenate([prompt(22, seed=1)[:shared], prompt(22 - shared, seed=2)])
    served = engine.serve(other, NEW_TOKENS)
    assert served.cached_tokens == shared // BLOCK * BLOCK
    assert_same_answer(served, off.serve(other, NEW_TOKENS))


def test_the_answer_is_cached_for_the_next_turn(model: Llama, make_pool: MakePool, off: Engine) -> None:
    engine = Engine(model, make_pool(64, 0))
    first = engine.serve(prompt(18), NEW_TOKENS)
    conversation = np.concatenate([prompt(18), np.array(first.tokens, np.int32), prompt(5, seed=2)])
    second = engine.serve(conversation, NEW_TOKENS)
    # Of 18 + 6 tokens the last has no K and V yet: 23 tokens, of which 20 fill blocks.
    assert second.cached_tokens == 20
    assert_same_answer(second, off.serve(conversation, NEW_TOKENS))


def test_a_prompt_that_was_moved_to_dram_returns_and_gives_the_same_answer(
    model: Llama, make_pool: MakePool, off: Engine
) -> None:
    pool = make_pool(16, 16)
    engine = Engine(model, pool)
    engine.serve(prompt(30), NEW_TOKENS)
    assert len(pool.swap_out(16)) == 8
    assert pool.stats().hbm.historical == 0
    served = engine.serve(prompt(30), NEW_TOKENS)
    assert (served.cached_tokens, served.swapped_in_blocks) == (28, 7)
    assert pool.stats().swapped_in_blocks == 7
    assert_same_answer(served, off.serve(prompt(30), NEW_TOKENS))


@pytest.mark.parametrize("in_dram", [1, 3, 6])
def test_a_hit_may_lie_in_both_media(model: Llama, make_pool: MakePool, off: Engine, in_dram: int) -> None:
    pool = make_pool(16, 16)
    engine = Engine(model, pool)
    engine.serve(prompt(30), 3)  # 8 blocks, of which a match of the prompt finds the first 7
    assert len(pool.swap_out(in_dram + 1)) == in_dram + 1
    served = engine.serve(prompt(30), NEW_TOKENS)
    assert served.cached_tokens == 28
    assert 0 < served.swapped_in_blocks <= in_dram + 1
    assert_same_answer(served, off.serve(prompt(30), NEW_TOKENS))


def test_cached_blocks_are_read_and_never_written(model: Llama, make_pool: MakePool) -> None:
    pool = make_pool(32, 0)
    engine = Engine(model, pool)
    engine.serve(prompt(20), 1)
    with pool.match(prompt(20)) as hit:
        assert hit.tokens == 20
        ids = kvpool.block_ids(hit.addrs)
        before = np.asarray(pool.tensor(kvpool.HBM))[ids].copy()
        engine.serve(prompt(20), NEW_TOKENS)  # computes the last cached block again, elsewhere
        assert np.array_equal(np.asarray(pool.tensor(kvpool.HBM))[ids], before)
    with pool.match(prompt(20)) as hit:
        assert np.array_equal(kvpool.block_ids(hit.addrs), ids)


def test_the_blocks_hold_what_the_model_computed(model: Llama, make_pool: MakePool) -> None:
    """There is no second KV store: a wrong byte in the pool changes the answer."""
    pool = make_pool(32, 0)
    engine = Engine(model, pool)
    first = engine.serve(prompt(20), NEW_TOKENS)
    with pool.match(prompt(20)) as hit:
        np.asarray(pool.tensor(kvpool.HBM))[kvpool.block_ids(hit.addrs)[0]] += 1.0
    assert not torch.equal(engine.serve(prompt(20), NEW_TOKENS).logits, first.logits)


@pytest.mark.parametrize(("hbm", "dram"), [(12, 0), (12, 6), (12, 40), (30, 20), (64, 0)])
@pytest.mark.parametrize("seed", range(4))
def test_random_streams_get_the_same_answers_under_any_pressure(
    model: Llama, make_pool: MakePool, off: Engine, hbm: int, dram: int, seed: int
) -> None:
    """The largest request needs (40 + 6 - 1) tokens, 12 blocks: exactly what the smallest HBM has."""
    rng = random.Random(seed)
    pool = make_pool(hbm, dram)
    engine = Engine(model, pool)
    prefixes = [prompt(rng.randint(8, 30), seed=1000 + i) for i in range(4)]
    said: list[Tokens] = []
    cached = 0
    for number in range(40):
        if said and rng.random() < 0.3:
            tokens = rng.choice(said)
            tokens = tokens[: rng.randint(1, len(tokens))]
        else:
            prefix = rng.choice(prefixes)
            tokens = np.concatenate([prefix, prompt(rng.randint(0, 40 - len(prefix)), seed=number)])
        new_tokens = rng.randint(1, NEW_TOKENS)
        served = engine.serve(tokens, new_tokens)
        assert_same_answer(served, off.serve(tokens, new_tokens))
        cached += served.cached_tokens
        said.append(np.concatenate([tokens, np.array(served.tokens, np.int32)])[:40])
        stats = pool.stats()
        assert (stats.hbm.active, stats.hbm.pinned, stats.dram.active, stats.dram.pinned) == (0, 0, 0, 0)
    assert cached > 0
    if hbm + dram < 30:
        assert stats.evicted_blocks > 0
    if dram and hbm < 30:
        assert stats.swapped_out_blocks > 0
        assert stats.swapped_in_blocks > 0


def test_a_sequence_that_fits_exactly_is_served_when_all_of_hbm_is_cached(model: Llama, make_pool: MakePool) -> None:
    pool = make_pool(8, 0)
    engine = Engine(model, pool)
    engine.serve(prompt(30, seed=1), 3)
    assert pool.stats().hbm.historical == 8
    assert engine.serve(prompt(30, seed=2), 3).cached_tokens == 0
    assert engine.serve(prompt(30, seed=2), 3).cached_tokens == 28


def test_a_sequence_too_large_for_hbm_is_refused_and_the_pool_stays_usable(model: Llama, make_pool: MakePool) -> None:
    pool = make_pool(8, 0)
    engine = Engine(model, pool)
    engine.serve(prompt(20), 1)
    with pytest.raises(kvpool.OutOfBlocks):
        engine.serve(prompt(33, seed=1), 1)
    with pytest.raises(kvpool.OutOfBlocks):
        engine.serve(prompt(20), 20)  # runs out while it decodes
    assert pool.stats().hbm.active == 0
    assert engine.serve(prompt(30, seed=2), 1).prompt_tokens == 30


def test_a_model_that_fails_leaves_no_active_block_and_no_pin(
    model: Llama, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(32, 0)
    engine = Engine(model, pool)
    engine.serve(prompt(20), 1)
    calls = 0
    forward = model.forward

    def fail_later(*arguments):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("the device is lost")
        return forward(*arguments)

    monkeypatch.setattr(model, "forward", fail_later)
    with pytest.raises(RuntimeError, match="the device is lost"):
        engine.serve(prompt(20), NEW_TOKENS)
    stats = pool.stats()
    assert (stats.hbm.active, stats.hbm.pinned) == (0, 0)


@pytest.mark.parametrize(("count", "new_tokens"), [(0, 1), (5, 0), (5, -1)])
def test_a_request_without_prompt_or_answer_is_refused(
    model: Llama, make_pool: MakePool, count: int, new_tokens: int
) -> None:
    with pytest.raises(ValueError, match="need a prompt"):
        Engine(model, make_pool(8, 0)).serve(prompt(count), new_tokens)


def test_without_the_cache_nothing_is_matched_or_inserted(model: Llama, make_pool: MakePool) -> None:
    pool = make_pool(16, 0)
    engine = Engine(model, pool, cache=False)
    for _ in range(2):
        assert engine.serve(prompt(20), NEW_TOKENS).cached_tokens == 0
    stats = pool.stats()
    assert (stats.match_calls, stats.inserted_blocks, stats.hbm.historical) == (0, 0, 0)
