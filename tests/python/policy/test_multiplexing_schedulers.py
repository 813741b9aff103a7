"""ADBS, FCFS and round robin: each trap by an example."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest

from kvpool import ArgumentError, ArgumentTypeError
from kvpool.policy import multiplexing as mux
from kvpool.policy.multiplexing import Job, ModelQueues, State, Turns, Waiting

PLAIN = mux.ADBS(stretch=False)


def queue(*units, name="r"):
    return tuple(Waiting(f"{name}{at}", each, float(at)) for at, each in enumerate(units))


def model(name, prefill=(), decode=(), **more):
    more = {"quota": 1000, "prefill_share": 0.6, "decode_share": 0.2} | more
    return ModelQueues(name, queue(*prefill, name=f"{name}p"), queue(*decode, name=f"{name}d"), **more)


def names(jobs):
    return [(job.model, job.phase) for job in jobs]


def test_prefill_comes_first_and_decode_fills_what_is_left():
    state = State([model("a", [10], [0]), model("b", [10], [0]), model("c", [], [0, 0])], 1000)
    jobs = PLAIN.step(state)
    assert jobs == [
        Job("a", "prefill", ("ap0",), 0.6),
        Job("a", "decode", ("ad0",), 0.2),
        Job("b", "decode", ("bd0",), pytest.approx(0.2)),
    ]
    after = mux.started(state, jobs)
    assert PLAIN.step(after) == []  # one prefill at a time, and no compute for another decode
    assert after.available == 990
    assert after.models[0].used == 10
    ended = replace(after, running=())
    assert names(PLAIN.step(ended)) == [("c", "decode"), ("b", "prefill")]  # in turn, what has waited longest first


def test_an_empty_prefill_queue_holds_nothing_back():
    state = State([model("a"), model("b", [], [0]), model("c", [5])], 1000)
    assert names(PLAIN.step(state)) == [("c", "prefill"), ("b", "decode")]
    assert names(PLAIN.step(State([model("a"), model("b", [], [0])], 1000))) == [("b", "decode")]


def test_a_decode_that_does_not_fit_does_not_end_the_round():
    state = State([model("a", [], [0], decode_share=0.9), model("b", [], [5, 0]), model("c", [], [0])], 0)
    running = (Job("z", "decode", (), 0.6),)
    state = replace(state, models=[*state.models, model("z")], running=running)
    assert PLAIN.step(state) == [Job("b", "decode", ("bd1",), 0.2), Job("c", "decode", ("cd0",), 0.2)]


@pytest.mark.parametrize("more", [{}, {"quota": 5, "used": 1}])
def test_a_prefill_that_waits_for_memory_holds_no_decode_back(more):
    state = State([model("a", [500], [0], **more), model("b", [], [0])], 100)
    assert names(PLAIN.step(state)) == [("a", "decode"), ("b", "decode")]


def test_a_prefill_that_waits_for_compute_holds_decode_back():
    running = (Job("b", "decode", (), 0.5),)
    state = State([model("a", [5], [0]), model("b", [], [0]), model("c", [], [0])], 100, running)
    assert PLAIN.step(state) == []
    assert names(PLAIN.step(replace(state, running=()))) == [("a", "prefill"), ("a", "decode"), ("b", "decode")]


def test_prompts_of_a_model_do_not_overtake_each_other_and_others_go_first_for_a_round():
    state = State([model("a", [500, 1]), model("b", [5], [0]), model("c", [6])], 100, turns=Turns(prefill="c"))
    jobs = PLAIN.step(state)
    assert names(jobs) == [("b", "prefill"), ("b", "decode")]
    state = mux.started(state, jobs)
    assert state.turns.passed["a", "prefill"] == 1
    state = replace(state, models=[model("a", [500, 1]), model("b", [5], [0]), model("c", [6])], running=())
    waits = replace(state, turns=Turns("b", "b", "b", {("a", "prefill"): 3}))  # a round: three queues
    assert names(PLAIN.step(waits)) == [("b", "decode")]
    assert names(PLAIN.step(replace(waits, available=500)))[0] == ("a", "prefill")
    nothing_runs = replace(waits, models=[waits.models[0], model("b", [5]), model("c", [6])])
    assert names(PLAIN.step(nothing_runs)) == [("c", "prefill")]  # nothing would ever free its memory


def test_a_quota_holds_prompts_back_but_not_what_already_runs():
    full = {"quota": 50, "used": 50}
    assert names(PLAIN.step(State([model("a", [5], [0], **full)], 100))) == [("a", "decode")]
    (job,) = PLAIN.step(State([model("a", [5], [3, 3, 0], **full)], 100))
    assert job.requests == ("ad0", "ad1", "ad2")  # with the last alone, it would end its requests ever more slowly
    assert PLAIN.step(State([model("a", [], [3], **full)], 2)) == []
    assert names(PLAIN.step(State([model("a", [80], quota=50)], 100))) == [("a", "prefill")]  # alone, beyond its quota
    pinned = model("a", [80], quota=50, used=1)
    assert names(PLAIN.step(State([pinned], 100))) == [("a", "prefill")]  # what is pinned holds nothing back
    assert names(PLAIN.step(State([model("a", [80], [0], quota=50, used=1)], 100))) == [("a", "decode")]
    assert PLAIN.step(State([pinned], 100, (Job("a", "decode", (), 0.1),))) == []


def test_prompts_leave_room_for_the_next_block_of_each_request_that_decodes():
    """Found by a simulation: prompts filled the memory, and 100 requests went on three at a time, without a block."""
    models = [model("a", [10], [0, 0, 0], block=4), model("b", [], [0, 0], block=5)]
    assert names(PLAIN.step(State(models, 32)))[0] == ("a", "prefill")
    assert names(PLAIN.step(State(models, 31))) == [("a", "decode"), ("b", "decode")]
    running = (Job("b", "decode", ("b0", "b1"), 0.1),)
    for scheduler in (PLAIN, mux.RoundRobin()):
        for units, phase in ((32, "prefill"), (31, "decode")):
            state = State([models[0], model("b", block=5)], units, running)
            assert names(scheduler.step(state))[0] == ("a", phase)
    reserved = [model("a", [10], [0, 0, 0], block=4, reserved=22), model("b", [], [0, 0], block=5, reserved=10)]
    assert names(PLAIN.step(State(reserved, 0)))[0] == ("a", "prefill")
    assert names(PLAIN.step(State([replace(reserved[0], reserved=21), reserved[1]], 0)))[0] == ("a", "decode")
    limited = [replace(models[0], limit=100, used=78), models[1]]
    assert names(PLAIN.step(State(limited, 99)))[0] == ("a", "prefill")
    assert names(PLAIN.step(State([replace(limited[0], used=79), models[1]], 99)))[0] == ("a", "decode")


def test_growth_of_neighbours_takes_nothing_from_a_reserve():
    """a wants 100 units, and nothing is available; b has its reserve, which a can never have."""
    a = model("a", [], [0] * 50, block=2)
    b = model("b", [20], reserved=50)
    for scheduler in (PLAIN, mux.RoundRobin()):
        assert ("b", "prefill") in names(scheduler.step(State([a, b], 0)))
    grows = replace(b, decode=queue(*[0] * 15, name="bd"), block=2)
    assert names(PLAIN.step(State([a, grows], 0)))[0] == ("b", "prefill")  # 20, and 30 to grow
    assert ("b", "prefill") not in names(PLAIN.step(State([a, replace(grows, reserved=49)], 0)))
    assert ("b", "prefill") not in names(PLAIN.step(State([a, replace(grows, reserved=49)], 100)))
    assert names(PLAIN.step(State([a, replace(grows, reserved=49)], 101)))[0] == ("b", "prefill")


def test_a_neighbour_grows_no_further_than_its_limit():
    a = model("a", [], [0] * 50, block=2, limit=100, used=98)  # room for one block, whatever its requests want
    assert names(PLAIN.step(State([a, model("b", [20])], 22)))[0] == ("b", "prefill")
    assert names(PLAIN.step(State([a, model("b", [20])], 21))) == [("a", "decode")]


def test_decode_begins_with_half_of_its_share_rather_than_wait():
    half = State([model("a", [1]), model("b", [], [0], decode_share=0.8)], 100)
    assert PLAIN.step(half) == [Job("a", "prefill", ("ap0",), 0.6), Job("b", "decode", ("bd0",), 0.4)]
    less = replace(half, models=[half.models[0], model("b", [], [0], decode_share=0.81)])
    assert names(PLAIN.step(less)) == [("a", "prefill")]


def test_a_reserve_is_used_before_what_all_can_have():
    state = State([model("a", [60], reserved=50), model("b", [15])], 20)
    jobs = PLAIN.step(state)
    assert names(jobs) == [("a", "prefill")]
    after = mux.started(state, jobs)
    assert (after.available, after.models[0].reserved, after.models[0].used) == (10, 0, 60)
    assert PLAIN.step(replace(after, running=())) == []  # b's 15 do not fit into the 10 that are left


def waited(model_name, phase):
    return Turns(passed={(model_name, phase): 99})


def test_a_decode_that_waits_for_memory_keeps_it_from_others():
    """Found by an example: b's small prompts took each unit that became free, and a's larger block never came."""
    models = [model("a", [2], [8]), model("b", [4], [2, 0]), model("c", [4], [], reserved=4)]
    state = State(models, 6)
    assert names(PLAIN.step(state))[0] == ("a", "prefill")
    kept = replace(state, turns=waited("a", "decode"))
    assert PLAIN.step(kept) == [Job("c", "prefill", ("cp0",), 0.6), Job("b", "decode", ("bd1",), 0.2)]
    assert names(PLAIN.step(replace(kept, available=8)))[0] == ("a", "decode")
    stands = replace(kept, models=[models[0], model("b", [4], [2])])
    assert names(PLAIN.step(stands)) == [("b", "decode")]  # nothing else frees any
    assert PLAIN.step(replace(stands, running=(Job("b", "prefill", (), 0.1),))) == []
    lonely = replace(kept, models=[models[0], model("b", [4])])
    assert PLAIN.step(lonely) == []
    assert mux.preemption(lonely).model == "a"


def test_a_model_at_its_limit_keeps_nothing_from_others():
    models = [model("a", [1], [8], limit=20, used=16), model("b", [4], [0])]
    state = State(models, 50, turns=waited("a", "decode"))
    assert names(PLAIN.step(state)) == [("b", "prefill"), ("b", "decode")]
    below = replace(state, models=[model("a", [], [8], limit=24, used=16), models[1]])
    assert names(PLAIN.step(below))[0] == ("a", "decode")
    prompts = [model("a", [3, 3, 3], limit=20, used=13), models[1]]
    assert PLAIN.step(State(prompts, 50))[0].requests == ("ap0", "ap1")


def test_a_prompt_that_lacks_room_to_grow_below_its_limit_keeps_nothing_from_others():
    """a's requests will want the 20 units that its limit leaves: no neighbour could help its prompt."""
    a = model("a", [10], [0] * 10, limit=100, used=80, block=5)
    state = State([a, model("b", [4]), model("c", [4])], 1000, turns=waited("a", "prefill"))
    assert names(PLAIN.step(state)) == [("b", "prefill"), ("a", "decode")]
    assert names(PLAIN.step(replace(state, turns=replace(state.turns, prefill="b"))))[0] == ("c", "prefill")
    below = replace(state, models=[replace(a, limit=140), *state.models[1:]], available=59)
    assert ("b", "prefill") not in names(PLAIN.step(below))  # 10 units, and 50 to grow: memory is what it lacks


def test_a_prompt_that_waits_for_memory_leaves_others_their_reserves():
    models = [model("a", [90]), model("b", [10, 5], [0], reserved=12, used=3)]
    state = State(models, 50, turns=waited("a", "prefill"))
    assert PLAIN.step(state)[0] == Job("b", "prefill", ("bp0",), 0.6)


def test_a_prompt_that_no_state_could_hold_is_reported_and_passed_over():
    tier = mux.Tier(100, {"a": mux.QuotaRule(), "b": mux.QuotaRule(reserve=30), "c": mux.QuotaRule(limit=40)})
    assert [tier.most(name) for name in "abc"] == [70, 100, 40]
    with pytest.raises(ArgumentError, match="'d'"):
        tier.most("d")
    models = [model("a", [71, 5], limit=70), model("b", [4], [0])]
    state = State(models, 60, turns=waited("a", "prefill"))
    assert mux.misfits(state) == [("a", "ap0")]
    assert PLAIN.step(state)[0] == Job("a", "prefill", ("ap1",), 0.6)
    only = replace(state, models=[model("a", [71], limit=70), models[1]])
    assert names(PLAIN.step(only)) == [("b", "prefill"), ("b", "decode")]


def test_compute_that_nobody_waits_for_is_divided():
    alone = mux.ADBS().step(State([model("a", [], [0])], 10))
    assert alone == [Job("a", "decode", ("ad0",), 1.0)]
    both = mux.ADBS().step(State([model("a", [1], [0])], 10))
    assert [job.share for job in both] == pytest.approx([0.75, 0.25])
    waiting = mux.ADBS().step(State([model("a", [1], [0]), model("b", [], [0], decode_share=0.5)], 10))
    assert [job.share for job in waiting] == pytest.approx([0.6, 0.2])  # b takes what is left when it suffices


def test_no_job_starts_without_compute():
    tiny = model("a", [1], [0], prefill_share=1e-10, decode_share=1e-10)
    for scheduler in (PLAIN, mux.ADBS(), mux.RoundRobin()):
        assert scheduler.step(State([tiny, model("b")], 10, (Job("b", "decode", (), 1.0),))) == []


def test_batches_are_limited():
    many = model("a", [1] * 30, [0] * 30, prefill_batch=4, decode_batch=7)
    assert [len(job.requests) for job in PLAIN.step(State([many], 100))] == [4, 7]


def test_advice_to_preempt_only_when_nothing_can_go_on():
    stuck = State([model("a", [], [5, 5], quota=10, used=40), model("b", [9], [3], quota=50, used=45)], 2)
    assert mux.preemption(stuck) == Job("a", "decode", ("ad1",), 0.2)
    assert mux.preemption(replace(stuck, available=3)) is None
    assert mux.preemption(replace(stuck, running=(Job("a", "decode", (), 0.1),))) is None
    assert mux.preemption(State([model("a")], 0)) is None


def test_advice_to_preempt_where_only_the_own_limit_holds_decode_back():
    """No neighbour can give a's requests a block: they would stand still as long as neighbours have work."""
    at_limit = model("a", [], [1, 1], limit=30, used=30)
    state = State([at_limit, model("b", [4], [0])], 100, (Job("b", "prefill", (), 0.6),))
    assert mux.preemption(state) == Job("a", "decode", ("ad1",), 0.2)
    assert mux.preemption(replace(state, running=())).model == "a"  # although b could start
    for goes_on in ({"limit": 31}, {"limit": None}, {"decode": queue(1, 0, name="ad")}, {"decode": ()}):
        assert mux.preemption(replace(state, models=[replace(at_limit, **goes_on), state.models[1]])) is None
    for phase in ("prefill", "decode"):  # what runs may end and free some
        assert mux.preemption(replace(state, running=(Job("a", phase, (), 0.1),))) is None


def test_fcfs_runs_one_job_at_a_time_in_order_of_arrival():
    first = ModelQueues("a", (Waiting(1, 5, 2.0),), (Waiting(2, 0, 9.0),))
    second = ModelQueues("b", (), (Waiting(3, 0, 3.0), Waiting(4, 0, 1.0)))
    state = State([first, second], 100)
    assert mux.FCFS().step(state) == [Job("b", "decode", (3, 4), 1.0)]
    assert mux.FCFS().step(mux.started(state, mux.FCFS().step(state))) == []
    assert mux.FCFS().step(State([first], 100)) == [Job("a", "prefill", (1,), 1.0)]
    assert mux.FCFS().step(State([first], 4)) == [Job("a", "decode", (2,), 1.0)]  # memory comes from what ends


def test_fcfs_batches_continuously_within_the_model_of_the_oldest_request():
    old = ModelQueues("a", (Waiting(1, 5, 8.0), Waiting(2, 5, 9.0)), (Waiting(3, 0, 0.0),))
    state = State([ModelQueues("b", (Waiting(4, 1, 1.0),)), old], 100)
    assert mux.FCFS().step(state) == [Job("a", "prefill", (1, 2), 1.0)]
    assert mux.FCFS().step(replace(state, available=4)) == [Job("a", "decode", (3,), 1.0)]
    misfit = replace(old, prefill=(Waiting(1, 5, -1.0),), decode=(Waiting(3, 0, 2.0),), limit=4)
    assert mux.FCFS().step(State([state.models[0], misfit], 100)) == [Job("b", "prefill", (4,), 1.0)]


def test_temporal_multiplexing_gives_each_model_a_step_in_turn():
    state = State([model("a", [5], [0]), model("b", [], [0]), model("c", [500], [0])], 100)
    ran = []
    for _ in range(4):
        jobs = mux.Temporal().step(state)
        ran += [(job.model, job.phase, job.share) for job in jobs]
        assert mux.Temporal().step(mux.started(state, jobs)) == []  # one at a time
        state = replace(state, turns=mux.started(state, jobs).turns)
    assert ran == [("a", "prefill", 1.0), ("b", "decode", 1.0), ("c", "decode", 1.0), ("a", "prefill", 1.0)]


def test_round_robin_gives_each_model_one_job_and_waits_for_whose_turn_it_is():
    state = State([model("a", [5], [0]), model("b", [], [0]), model("c", [5], decode_share=0.1)], 100)
    jobs = mux.RoundRobin().step(state)
    assert names(jobs) == [("a", "prefill"), ("b", "decode")]  # c's prefill lacks compute
    after = mux.started(state, jobs)
    assert names(mux.RoundRobin().step(replace(after, running=()))) == [("c", "prefill"), ("a", "decode")]


# ---- bad input


@pytest.mark.parametrize("share", [0, 0.0, -0.1, 1.01, nan])
def test_a_share_is_above_0_and_at_most_1(share):
    for make in (
        lambda: model("a", prefill_share=share),
        lambda: model("a", decode_share=share),
        lambda: State([model("a")], 1, (Job("a", "decode", (), share),)),
    ):
        with pytest.raises(ArgumentError, match="share"):
            make()
    with pytest.raises(ArgumentTypeError):
        model("a", decode_share="0.5")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: State([model("a"), model("a")], 1), "same name"),
        (lambda: State([model("a")], 1, (Job("b", "decode", (), 0.5),)), "'b'"),
        (lambda: State([model("a")], -1), "available"),
        (lambda: model("a", quota=-1), "quota"),
        (lambda: model("a", [-1]), "units of a request"),
        (lambda: model("a", decode_batch=0), "decode_batch"),
        (lambda: mux.started(State([model("a", [1])], 1), [Job("b", "prefill", ("ap0",), 0.5)]), "'b'"),
        (lambda: mux.started(State([model("a", [1])], 1), [Job("a", "prefill", ("x",), 0.5)]), "do not wait"),
        (lambda: mux.started(State([model("a", [1])], 1), [Job("a", "prefill", ("ap0", "ap0"), 0.5)]), "one twice"),
        (lambda: model("a", limit=-1), "limit"),
        (lambda: model("a", block=-1), "block"),
    ],
)
def test_bad_states_are_refused(make, match):
    with pytest.raises(ArgumentError, match=match):
        make()
