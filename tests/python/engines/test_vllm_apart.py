"""Workers in other processes: what happens when one of them could not save, and in which order they copy."""

from __future__ import annotations

import random

import numpy as np
import pytest
from engines.vllm_apart_kit import ApartEngine, index_of
from engines.vllm_kit import BLOCK, Request, prompt

from kvpool.engines.vllm.groups import Groups
from kvpool.engines.vllm.plans import LoadPlan, SavePlan, StepPlan, WorkerReport
from kvpool.engines.vllm.scheduler_index import SchedulerIndex

ONE = Groups(BLOCK)


@pytest.fixture
def make_index():
    made = []

    def make(dram_blocks: int, workers: int) -> SchedulerIndex:
        made.append(index_of(8, dram_blocks, workers))
        return made[-1]

    yield make
    for index in made:
        index.pool.audit()
        index.close()


@pytest.fixture
def engine():
    engine = ApartEngine()
    yield engine
    engine.close()


def begun(engine: ApartEngine) -> list[int]:
    """How many copies have ended in each worker."""
    return [sum(copy.done() for copy in pool.held) for pool in engine.pool.workers]


@pytest.mark.parametrize("how", ["now", "later"])
def test_what_one_worker_could_not_save_is_forgotten(engine, how):
    engine.run(Request("a", prompt(8)))
    engine.pool.finish_all()
    engine.pool.workers[1].fail_saves = [how]
    engine.run(Request("b", prompt(20)))
    engine.pool.finish_all()
    engine.step({})  # the report
    assert engine.pool.explain_match(prompt(20)).matched_tokens == 8
    assert engine.run(Request("c", prompt(20))) == 8
    engine.pool.finish_all()
    assert engine.run(Request("d", prompt(21))) == 20


def test_a_save_that_a_worker_never_begins_has_failed(engine):
    """vLLM does not end each step at each stage of a pipeline, and then nothing would be saved or reported there."""
    engine.deaf = frozenset({1})
    first = engine.start(Request("a", prompt(20)))
    assert engine.admit(first)
    engine.step({"a": 20})
    engine.deaf = frozenset()
    second = engine.start(Request("b", prompt(20)))
    assert engine.admit(second)
    assert engine.external["b"] == 16, "nobody knows yet"
    assert engine.step({"b": 4}), "blocks that failed to load"
    while second.num_computed_tokens < 20:
        engine.step({"b": 20 - second.num_computed_tokens})
    engine.check(second)
    for request in (first, second):
        engine.finish(request)
    engine.pool.finish_all()
    engine.step({})
    assert not engine.index._saves
    assert engine.run(Request("c", prompt(21))) == 20, "b has saved what a had not"


def test_what_one_worker_could_not_save_is_not_loaded_before_the_scheduler_knows(engine):
    engine.pool.workers[1].fail_saves = ["later"]
    first = engine.start(Request("a", prompt(20)))
    assert engine.admit(first)
    engine.step({"a": 20})  # the save is planned, and has not failed yet
    second = engine.start(Request("b", prompt(20)))
    assert engine.admit(second)
    assert engine.external["b"] == 16
    assert engine.step({"b": 4})  # blocks that failed to load
    while second.num_computed_tokens < 20:
        engine.step({"b": 20 - second.num_computed_tokens})
    engine.check(second)


def test_a_prompt_is_there_for_the_next_step_and_its_load_waits_for_its_save(engine):
    first = engine.start(Request("a", prompt(20)))
    assert engine.admit(first)
    engine.step({"a": 20})
    assert begun(engine) == [0, 0]
    second = engine.start(Request("b", prompt(20)))
    assert engine.admit(second)
    assert engine.external["b"] == 16
    engine.step({"b": 4})
    assert begun(engine) == [1, 1]
    engine.check(second)


def test_a_block_of_dram_is_not_filled_again_before_it_is_full(engine):
    """There is room for one prompt: the next is saved when both workers have said that it is there."""
    engine = ApartEngine(dram_blocks=5)
    engine.run(Request("first", prompt(20)))
    engine.run(Request("refused", prompt(20, seed=1)))
    assert engine.take_figures()["failed_saves"] == 1
    assert engine.run(Request("again", prompt(20))) == 16
    engine.pool.finish_all()
    engine.step({})
    engine.run(Request("second", prompt(20, seed=2)))
    assert engine.run(Request("third", prompt(20, seed=2))) == 16
    assert engine.pool.explain_match(prompt(20)).matched_tokens == 0
    engine.close()


def saved_in(index: SchedulerIndex, tokens: list[int]) -> list[SavePlan]:
    blocks = np.arange(len(tokens) // 4)
    step = StepPlan(saves=[SavePlan("a", "", np.array(tokens, np.int32), blocks)])
    return index.addressed(step).saves


def test_a_hit_is_pinned_until_all_workers_have_loaded_it(make_index):
    index = make_index(4, workers=2)
    (save,) = saved_in(index, list(range(8)))
    assert (save.target.tolist(), len(save.tokens)) == ([0, 1], 0)
    assert index.pin("b", np.arange(8, dtype=np.int32), "", ONE) == 8
    (load,) = index.addressed(StepPlan(loads=[LoadPlan("b", 1, np.array([7]))])).loads
    assert load.source.tolist() == [1]
    for report in (WorkerReport(saves={save.number: 2}), WorkerReport(loads={load.number: 1})):
        index.reported(report)
        assert saved_in(index, prompt(16)) == []  # there is no room for it
    index.reported(WorkerReport(loads={load.number: 1}))
    assert len(saved_in(index, prompt(16))) == 1
    index.reported(WorkerReport(loads={load.number: 1, 99: 1}, saves={save.number: 1}))  # nothing is known of them


@pytest.mark.parametrize("is_saved", [False, True])
def test_what_a_load_still_needs_is_not_found_after_a_reset(make_index, is_saved):
    """vLLM's weights may be others by then."""
    index = make_index(4, workers=1)
    (save,) = saved_in(index, list(range(8)))
    if is_saved:
        index.reported(WorkerReport(saves={save.number: 1}))
    tokens = np.arange(8, dtype=np.int32)
    index.pin("b", tokens, "", ONE)
    (load,) = index.addressed(StepPlan(loads=[LoadPlan("b", 0, np.array([7, 8]))])).loads
    assert index.clear()
    assert index.pin("c", tokens, "", ONE) == 0
    (again,) = saved_in(index, list(range(8)))
    assert set(again.target.tolist()).isdisjoint(load.source.tolist())
    index.reported(WorkerReport(loads={load.number: 1}, saves={save.number: 1, again.number: 1}))
    assert index.pin("c", tokens, "", ONE) == 8
    index.unpin("c")
    assert len(saved_in(index, prompt(16))) == 1  # all four blocks can be had


def test_what_could_not_be_saved_is_forgotten_when_its_load_has_ended(engine):
    """A step that loads it is planned before the failure is known. Then nobody finds it, and it is saved again."""
    first = engine.start(Request("a", prompt(20)))
    assert engine.admit(first)
    engine.pool.workers[1].fail_saves = ["later"]
    engine.step({"a": 20})
    index = engine.index
    assert index.pin("b", np.array(prompt(20)[:19], np.int32), "", ONE) == 16
    (load,) = index.addressed(StepPlan(loads=[LoadPlan("b", 0, np.arange(10, 14))])).loads
    engine.pool.finish_all()
    engine.step({})  # the failure is known, and the prompt is pinned
    for _ in range(3):
        assert index.pin("c", np.array(prompt(20)[:19], np.int32), "", ONE) == 0
        engine.step({})
    index.reported(WorkerReport(loads={load.number: 2}))
    assert engine.pool.stats().dram.historical == 0
    engine.finish(first)
    assert engine.run(Request("d", prompt(20))) == 0
    engine.pool.finish_all()
    assert engine.run(Request("e", prompt(20))) == 16


def test_an_old_save_does_not_make_good_what_a_newer_one_was_refused(engine):
    """The blocks of a save that is under way are given to another, which a worker refuses: it has failed to load."""
    worker, other = engine.workers[1], np.arange(4, 8)
    worker.begin_save(SavePlan("a", "", np.empty(0, np.int32), np.arange(4), 1, np.arange(4)))
    worker.suspects.add(6)
    worker.begin_save(SavePlan("b", "", np.empty(0, np.int32), other, 2, np.arange(4)))
    engine.pool.finish_all()
    worker.load(LoadPlan("c", 0, np.arange(8, 12), 3, np.arange(4)))
    assert worker.take_failed_blocks() == {8, 9, 10, 11}
    assert worker.take_report().failed == {2}


def test_a_load_whose_match_was_given_up_fails_at_every_worker(engine, make_index):
    index = make_index(4, workers=2)
    (load,) = index.addressed(StepPlan(loads=[LoadPlan("gone", 0, np.array([3]))])).loads
    assert load.source is None
    for worker in engine.workers:
        worker.load(load)
        assert worker.take_failed_blocks() == {3}


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("seed", range(6))
def test_many_requests_while_saves_fail_at_a_worker(seed, late):
    chance = random.Random(seed)
    engine = ApartEngine(blocks=30, dram_blocks=12)
    engine.late = late
    for number in range(80):
        if chance.random() < 0.3:
            chance.choice(engine.pool.workers).fail_saves = [chance.choice(["now", "later"])]
        if chance.random() < 0.2:
            engine.pool.fail_loads = [chance.choice(["now", "later"])]
        tokens = prompt(8, chance.randrange(2)) + prompt(chance.randrange(1, 20), chance.randrange(3))
        engine.run(Request(str(number), tokens), chunk=chance.choice([3, 8, 100]))  # checks what it has loaded
        if chance.random() < 0.5:
            engine.pool.finish_all()
    engine.pool.finish_all()
    for _ in range(late + 1):
        engine.step({})
    assert engine.index.clear()
    engine.step({})
    assert engine.index.pool.stats().dram.free == 12
    engine.close()


def test_an_index_is_full_when_all_of_it_is_in_use(make_index):
    index = make_index(2, workers=1)
    (save,) = saved_in(index, prompt(8))
    assert saved_in(index, prompt(8)) == []  # it is there
    assert saved_in(index, prompt(8, seed=1)) == []
    assert index.figures == {"failed_saves": 1}
    index.reported(WorkerReport(saves={save.number: 1}))
    index.pin("b", np.array(prompt(8), np.int32), "", ONE)
    assert saved_in(index, prompt(8, seed=1)) == []
    assert index.figures == {"failed_saves": 2}
    index.unpin("b")
    assert len(saved_in(index, prompt(8, seed=1))) == 1
