"""What the connector for vLLM loads and saves, with an engine of the same kind: no vLLM is needed."""

from __future__ import annotations

import random

import pytest
from engines.vllm_apart_kit import ApartEngine
from engines.vllm_kit import Adapter, Engine, Feature, Position, Request, maker, prompt

import kvpool


@pytest.fixture(params=[Engine, ApartEngine], ids=["one process", "two workers"])
def made(request):
    with maker(request.param) as make:
        yield make


@pytest.fixture(params=[False, True], ids=["loads before steps", "loads beside steps"])
def engine(made, request):
    return made(async_load=request.param)


def test_a_prompt_comes_back_after_its_blocks_were_used_again(engine):
    assert engine.run(Request("a", prompt(14))) == 0
    engine.pool.finish_all()
    assert engine.run(Request("b", prompt(14, seed=1))) == 0
    assert engine.run(Request("c", prompt(14))) == 12
    assert engine.engine.take_figures()["loaded_tokens"] == 12


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_hit_leaves_the_last_token_to_compute(engine, length, cached):
    engine.run(Request("a", prompt(16)))
    engine.pool.finish_all()
    assert engine.run(Request("b", prompt(length))) == cached


def test_a_block_is_not_written_while_a_save_reads_it(engine):
    """The blocks are used again at once, and the copies have not even begun."""
    for seed in range(5):
        engine.run(Request(str(seed), prompt(40, seed)))
    engine.pool.finish_all()
    for seed in range(5):
        assert engine.run(Request(str(seed), prompt(40, seed))) == 36


def test_what_a_preempted_request_had_is_saved_before_another_writes(engine):
    first = engine.start(Request("a", prompt(20)))
    assert engine.admit(first)
    engine.step({"a": 20})
    engine.preempt(first)
    engine.run(Request("b", prompt(50, seed=1)))
    assert engine.admit(first)
    assert engine.external["a"] == 16
    while engine.waiting:
        engine.pool.finish_all()
        engine.step({})
    engine.step({"a": 4})
    engine.check(first)


def test_blocks_are_saved_as_they_fill(engine):
    """In chunks, then token by token."""
    request = engine.start(Request("a", prompt(10)))
    assert engine.admit(request)
    for count, saved in ((3, 0), (3, 4), (4, 8)):
        engine.step({"a": count})
        engine.pool.finish_all()
        assert engine.pool.explain_match(prompt(10)).matched_tokens == saved
    for token in range(7):
        request.all_token_ids.append(token)
        engine.step({"a": 1})
    engine.pool.finish_all()
    assert engine.pool.explain_match(request.all_token_ids).matched_tokens == 16
    engine.finish(request)


def test_tokens_that_may_be_rejected_are_not_saved(engine):
    """Drafts, and tokens that vLLM counts as computed before it knows them."""
    request = engine.start(Request("a", prompt(6)))
    assert engine.admit(request)
    request.blocks += [engine.free.pop() for _ in range(4)]

    def saved(count: int) -> list[list[int]]:
        return [save.tokens.tolist() for save in engine.planner.plan({"a": count}, lambda _: [request.blocks]).saves]

    assert saved(6) == [prompt(6)[:4]]
    request.num_computed_tokens = 6
    request.all_token_ids.append(1)
    assert saved(10) == []  # one token that is known, and 9 drafts
    request.num_computed_tokens = 16  # counted ahead
    assert saved(1) == []
    request.all_token_ids.append(2)
    assert saved(1) == [[*prompt(6), 1, 2]]


def test_nothing_is_loaded_that_vllm_has_itself(engine):
    engine.run(Request("a", prompt(20)))
    engine.pool.finish_all()
    request = engine.start(Request("b", prompt(20)))
    for own, more in ((16, 0), (20, 0), (8, 8), (4, 12)):
        assert engine.planner.match(request, own)[0] == more
    blocks = [11, 12, 13, 14, 15]
    engine.planner.match(request, 8)
    engine.planner.allocated(request, [blocks], 8)
    (load,) = engine.planner.plan({"b": 4}, lambda _: [blocks]).loads
    assert (load.first, load.blocks.tolist()) == (2, [13, 14])


def test_a_hit_that_vllm_has_no_room_for_is_not_kept(engine):
    engine.run(Request("a", prompt(20)))
    engine.pool.finish_all()
    engine.step({})
    request = engine.start(Request("b", prompt(20)))
    for _ in range(135):
        assert engine.planner.match(request, 0)[0] == 16
        engine.planner.plan({}, lambda _: [[]])
        assert engine.pool.evict(0, kvpool.DRAM) == 0
    assert engine.pool.evict(64, kvpool.DRAM) == 5  # nothing is pinned
    assert engine.planner.match(request, 0) == (0, False)


@pytest.mark.parametrize("how", ["now", "later"])
def test_after_a_load_has_failed_the_tokens_are_computed(engine, how):
    engine.run(Request("a", prompt(20)))
    engine.pool.finish_all()
    engine.run(Request("b", prompt(50, seed=1)))
    engine.pool.finish_all()
    engine.pool.fail_loads = [how]
    before = engine.computed_tokens
    assert engine.run(Request("c", prompt(20))) == 16
    assert engine.computed_tokens - before >= 20
    assert engine.engine.take_figures()["failed_loads"] == 1
    engine.pool.finish_all()
    assert engine.run(Request("d", prompt(20))) == 16  # another request loads


def test_a_request_whose_load_failed_is_never_looked_up_again(engine):
    engine.run(Request("a", prompt(20)))
    engine.pool.finish_all()
    engine.pool.fail_loads = ["later"]
    request = engine.start(Request("b", prompt(20)))
    assert engine.admit(request)
    for _ in range(2):
        engine.step({})
        engine.pool.finish_all()
    assert engine.planner.match(request, 0) == (0, False)
    engine.preempt(request)
    assert engine.planner.match(request, 0) == (0, False)


def test_what_was_computed_from_a_failed_load_is_not_saved(made):
    """vLLM learns of the failure after the step, which has computed on with what was not loaded."""
    engine = made()
    engine.run(Request("a", prompt(20)))
    engine.pool.finish_all()
    engine.run(Request("x", prompt(50, seed=1)))  # other content in the blocks
    engine.pool.finish_all()
    engine.pool.evict(64, kvpool.DRAM)
    engine.run(Request("a", prompt(8)))
    engine.pool.finish_all()
    engine.pool.fail_loads = ["later"]
    request = engine.start(Request("b", prompt(20)))
    assert engine.admit(request)
    assert engine.step({"b": 12})
    engine.pool.finish_all()
    assert engine.pool.explain_match(prompt(20)).matched_tokens == 8
    engine.step({"b": 6})  # a chunk of what has to be computed again
    engine.step({"b": 14})
    engine.pool.finish_all()
    engine.check(request)
    assert engine.pool.explain_match(prompt(20)).matched_tokens == 20
    engine.finish(request)
    assert engine.run(Request("c", prompt(21))) == 20


def test_a_request_may_end_while_its_load_is_under_way(made):
    engine = made(async_load=True)
    engine.run(Request("a", prompt(20)))
    engine.pool.finish_all()
    request = engine.start(Request("b", prompt(20)))
    assert engine.admit(request)
    engine.step({})
    engine.planner.finish("b")  # vLLM keeps the blocks
    engine.step({})
    assert engine.waiting == {"b"}
    engine.pool.finish_all()
    engine.step({})
    assert not engine.waiting
    engine.requests.clear()
    assert engine.pool.evict(64, kvpool.DRAM) == 5


def test_the_id_of_a_request_may_be_used_again(engine):
    engine.run(Request("a", prompt(20)))
    engine.pool.finish_all()
    request = engine.start(Request("a", prompt(20)))
    assert engine.planner.match(request, 0)[0] == 16
    other = engine.start(Request("a", prompt(20, seed=2)))  # the first one was never heard of again
    assert engine.planner.match(other, 0) == (0, False)
    assert engine.run(Request("a", prompt(20))) == 16


OTHERS = [
    {"cache_salt": "tenant"},
    {"lora_request": Adapter("legal", 1)},
    {"lora_request": Adapter("legal", 2)},
    {"cache_salt": "legal"},
    {"mm_features": [Feature("image", Position(2))]},
    {"mm_features": [Feature("image", Position(3))]},
    {"mm_features": [Feature("other", Position(2))]},
    {"mm_features": [Feature("image", Position(2)), Feature("image", Position(9))]},
    {"mm_features": [Feature("x" * 500, Position(2))]},
    {"mm_features": [Feature("x" * 499 + "y", Position(2))]},
    {"cache_salt": '["",["legal",1],[]]'},
]


def test_salts_adapters_and_images_do_not_share_blocks(made):
    engine = made(dram_blocks=128)
    for number, more in enumerate([{}, *OTHERS]):
        assert engine.run(Request(f"{number}", prompt(20), **more)) == 0, more
        engine.pool.finish_all()
    for number, more in enumerate([{}, *OTHERS]):
        assert engine.run(Request(f"again {number}", prompt(20), **more)) == 16, more


@pytest.mark.parametrize("more", [{"prompt_embeds": object()}, {"resumable": True}, {"prompt_token_ids": None}])
def test_a_request_whose_tokens_do_not_say_all_is_not_cached(engine, more):
    request = Request("a", **{"prompt_token_ids": prompt(8), **more})
    engine.run(request)
    engine.pool.finish_all()
    assert engine.pool.stats().dram.historical == 0
    engine.run(Request("b", prompt(8)))
    engine.pool.finish_all()
    again = engine.start(Request("c", **{"prompt_token_ids": prompt(8), **more}))
    assert engine.planner.match(again, 0) == (0, False)


def test_a_request_that_wants_all_logits_loads_nothing(engine):
    engine.run(Request("a", prompt(8)))
    engine.pool.finish_all()
    assert engine.run(Request("b", prompt(8), skip_reading_prefix_cache=True)) == 0


@pytest.mark.parametrize(("how", "saved", "loaded"), [({"saves": False}, 0, 0), ({"loads": False}, 4, 0)])
def test_a_role_that_only_produces_or_only_consumes(made, how, saved, loaded):
    engine = made(**how)
    engine.run(Request("a", prompt(17)))
    engine.pool.finish_all()
    assert engine.pool.stats().dram.historical == saved
    assert engine.run(Request("b", prompt(17))) == loaded


def test_a_reset_forgets_all_and_what_is_running_is_not_saved_any_more(engine):
    engine.run(Request("a", prompt(20)))
    running = engine.start(Request("b", prompt(10, seed=1)))
    assert engine.admit(running)
    engine.step({"b": 10})  # its save has not begun
    assert engine.planner.reset()
    assert engine.pool.explain_match(prompt(10, seed=1)).matched_tokens == 0
    for token in range(8):
        running.all_token_ids.append(token)
        engine.step({"b": 1})
    engine.pool.finish_all()
    engine.step({})
    assert engine.pool.stats().dram.historical == 0
    engine.finish(running)
    assert engine.run(Request("c", prompt(20))) == 0
    engine.pool.finish_all()
    assert engine.run(Request("d", prompt(20))) == 16


def test_without_room_nothing_is_cached_and_nothing_fails(made):
    engine = made(dram_blocks=2)
    assert engine.run(Request("a", prompt(20))) == 0
    engine.pool.finish_all()
    assert engine.run(Request("b", prompt(20))) == 0
    engine.pool.finish_all()
    assert engine.engine.take_figures()["failed_saves"] >= 1
    engine.run(Request("c", prompt(8)))
    engine.pool.finish_all()
    assert engine.run(Request("d", prompt(9))) == 8


@pytest.mark.parametrize("seed", range(6))
def test_many_requests_at_once_with_too_few_blocks(made, seed):
    """Prompts that share beginnings; preemption, aborts, failed loads and late copies in any order."""
    chance = random.Random(seed)
    engine = made(blocks=14, dram_blocks=20, async_load=bool(seed % 2))
    queue: list[Request] = []
    running: list[Request] = []
    started = finished = 0
    while finished < 60:
        if started < 60 and chance.random() < 0.5:
            tokens = prompt(8, chance.randrange(2)) + prompt(chance.randrange(1, 20), chance.randrange(4))
            queue.append(engine.start(Request(str(started), tokens, cache_salt=chance.choice([None, None, "s"]))))
            started += 1
        if chance.random() < 0.1:
            engine.pool.fail_loads = [chance.choice(["now", "later"])]
        if queue and engine.admit(queue[0]):
            running.append(queue.pop(0))
        ready = [request for request in running if request.request_id not in engine.waiting]
        if ready and len(ready) > 1 and chance.random() < 0.2:
            engine.preempt(ready[-1])
            running.remove(ready[-1])
            queue.insert(0, ready.pop())
        counts = {}
        for request in ready:
            if chance.random() < 0.7:
                counts[request.request_id] = chance.randrange(1, request.num_tokens - request.num_computed_tokens + 1)
        failed = engine.step(counts)
        if chance.random() < 0.5:
            engine.pool.finish_all()
        for request in ready:
            if not failed:
                engine.check(request)
            if request.num_computed_tokens == request.num_tokens or chance.random() < 0.03:
                engine.finish(request)
                running.remove(request)
                finished += 1
    engine.pool.finish_all()
    assert engine.planner.reset()


def test_closing_ends_copies_that_are_under_way():
    engine = Engine(async_load=True)
    engine.run(Request("a", prompt(20)))
    engine.pool.finish_all()
    engine.run(Request("b", prompt(20, seed=1)))  # its save has not begun
    request = engine.start(Request("c", prompt(20)))
    assert engine.admit(request)
    engine.step({})  # nor has its load
    waiting = engine.start(Request("d", prompt(20)))
    assert engine.planner.match(waiting, 0)[0] == 16
    held = list(engine.pool.held)
    engine.close()
    assert held
    assert all(copy.done() for copy in held)
    assert engine.pool.closed
    engine.engine.close()


def test_a_step_in_which_vllm_copies_blocks_waits_for_all_saves():
    engine = Engine()
    engine.run(Request("a", prompt(20)))
    step = engine.planner.plan({}, lambda _: [[]], copies_blocks=True)
    assert step.written is None
    assert engine.engine.saving
    engine.engine.await_saves_of(step.written)
    assert not engine.engine.saving
    engine.close()
