"""Models with layers that keep one state (Mamba): a prefix is a hit where a state of it is cached, too."""

from __future__ import annotations

import random

import numpy as np
import pytest
from engines.vllm_kit import BLOCK, Request, maker, prompt
from engines.vllm_states_kit import ApartStates, States

from kvpool.engines.vllm.groups import Groups

KINDS = [(True, False), (False, True), (True,)]


@pytest.fixture(params=[States, ApartStates], ids=["one process", "two workers"])
def made(request):
    with maker(request.param) as make:
        yield make


@pytest.fixture(params=KINDS, ids=str)
def any_engine(made, request):
    return made(states=request.param)


@pytest.fixture
def engine(made):
    return made()


@pytest.mark.parametrize(("chunk", "found"), [(BLOCK, 28), (2 * BLOCK, 24), (100, 0), (3 * BLOCK + 1, 0), (1, 28)])
def test_a_prompt_is_found_up_to_the_last_boundary_at_which_a_step_ended(any_engine, chunk, found):
    engine = any_engine
    assert engine.run(Request("a", prompt(30)), chunk) == 0
    engine.pool.finish_all()
    assert engine.run(Request("b", prompt(30)), chunk) == found


def test_the_hit_is_the_longest_prefix_that_has_a_state(engine):
    """Attention has more blocks of both prompts than there are states."""
    engine.run(Request("a", prompt(40)), 2 * BLOCK)
    engine.pool.finish_all()
    longer = prompt(20) + prompt(30, seed=5)
    assert engine.run(Request("b", longer), 5 * BLOCK) == 16  # the same up to 20 tokens, and states at 8 and 16
    engine.pool.finish_all()
    assert engine.run(Request("c", longer)) == 36


def test_prompts_that_differ_before_a_boundary_have_different_states(any_engine):
    """A state stands for all tokens before it: the same tokens in its own block are not enough."""
    engine = any_engine
    engine.run(Request("a", prompt(8) + prompt(8, seed=1)), BLOCK)
    engine.pool.finish_all()
    assert engine.run(Request("b", prompt(8, seed=2) + prompt(9, seed=1)), BLOCK) == 0
    engine.pool.finish_all()
    assert engine.run(Request("c", prompt(8) + prompt(9, seed=1))) == 16


def test_only_the_state_is_loaded_and_the_request_goes_on_from_it(engine):
    engine.run(Request("a", prompt(33)), BLOCK)
    engine.pool.finish_all()
    request = engine.start(Request("b", prompt(33)))
    assert engine.admit(request)
    step = engine.planner.plan({}, engine.of.__getitem__)
    assert [(load.group, load.first, len(load.blocks)) for load in step.loads] == [(0, 7, 1), (1, 0, 8)]
    engine._execute(step, {})
    engine.pool.finish_all()
    engine.step({})
    engine.step({"b": 1})
    engine.check(request)
    engine.finish(request)


def test_a_state_that_later_steps_have_left_behind_is_not_saved_as_another(engine):
    """Steps end beyond the boundary: the block before it has no state of the boundary."""
    engine.run(Request("a", prompt(18)), 6)
    engine.pool.finish_all()
    assert engine.run(Request("b", prompt(18)), 6) == 12  # 6, 12, 18: one of these is the end of a block


def test_what_a_failed_load_has_left_is_never_saved(engine):
    engine.run(Request("a", prompt(33)), BLOCK)
    engine.pool.finish_all()
    worker_pools = [worker.pool for worker in getattr(engine, "workers", [engine.engine])]
    worker_pools[-1].fail_loads = ["later"]
    assert engine.run(Request("b", prompt(33)), BLOCK) in (0, 32)
    engine.pool.finish_all()
    assert engine.run(Request("c", prompt(33))) == 32


def test_salts_do_not_share_states(engine):
    engine.run(Request("a", prompt(17), cache_salt="one"), BLOCK)
    engine.pool.finish_all()
    assert engine.run(Request("b", prompt(17), cache_salt="two"), BLOCK) == 0
    engine.pool.finish_all()
    assert engine.run(Request("c", prompt(17), cache_salt="one")) == 16


@pytest.mark.parametrize("seed", range(6))
def test_every_hit_is_right_whatever_comes(made, seed):
    """The kit compares each block that a request has at its end; the cache is small, so states and blocks go."""
    rng = random.Random(seed)
    engine = made(dram_blocks=24, states=KINDS[seed % len(KINDS)])
    for number in range(40):
        tokens = prompt(rng.randrange(4, 24), seed=rng.randrange(2)) + prompt(
            rng.randrange(1, 24), seed=rng.randrange(3)
        )
        engine.run(Request(f"r{number}", tokens), rng.choice([1, 3, BLOCK, 2 * BLOCK, 7, 100]))
        if rng.random() < 0.5:
            engine.pool.finish_all()


def test_groups_with_states_are_looked_up_last_and_need_the_last_block_alone():
    kinds = Groups(BLOCK, (None, 6, None), states=(True, False, False))
    assert kinds.order == [2, 1, 0]
    assert [kinds.first_needed(group, 5) for group in range(3)] == [4, 3, 0]
    tokens = np.arange(8, dtype=np.int32)
    assert kinds.part(0, "", tokens[:4], 0).namespace == ""
    assert kinds.part(0, "", tokens, 1).namespace.startswith("@1:")


def test_a_look_up_tries_the_boundaries_at_which_states_were_saved_and_not_all(engine):
    """A prompt may have thousands of them, and each try reads the index in the scheduler's thread."""
    engine.run(Request("a", prompt(160)), 20 * BLOCK)
    engine.pool.finish_all()
    before = engine.pool.stats()
    assert engine.run(Request("b", [*prompt(157), 7])) == 80
    assert engine.pool.stats().match_calls - before.match_calls <= 6, (
        "two groups, looked up twice at most, and one state"
    )
