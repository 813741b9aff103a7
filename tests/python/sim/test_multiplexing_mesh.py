"""A mesh of several models on a virtual clock: tiny cases by hand, and seeded runs in which nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import ArgumentError, OutOfMemory, OutOfQuota, StateError
from kvpool.policy import multiplexing as mux
from kvpool.sim.loop import Loop
from kvpool.sim.multiplexing_memory import UNIT_BYTES, MeshMemory, block_units
from kvpool.sim.multiplexing_mesh import Mesh, Resident
from kvpool.sim.multiplexing_requests import Request
from kvpool.sim.multiplexing_times import Parts

KV = UNIT_BYTES // 16  # bytes a token: a block of 16 tokens is one unit


class Fixed:
    """A prefill takes 1 s of compute, a decode step 0.1 s of calls, whatever is in it."""

    def prefill_parts(self, lengths, tp):
        return Parts(1.0, 0.0, 0.0, 0.0)

    def decode_parts(self, batch, context, tp):
        return Parts(0.0, 0.0, 0.1, 0.0)

    def prefill_s(self, share, batch, tokens, tp):
        return 1.0 / share

    def decode_s(self, share, batch, tokens, tp):
        return 0.1

    def decode_reads_s(self, batch, tokens, tp):
        return 0.0


class Reading(Fixed):
    """Decode reads for 0.1 s, and nothing else."""

    def decode_parts(self, batch, context, tp):
        return Parts(0.0, 0.1, 0.0, 0.0)


def resident(name, decode_share=0.4, prefill_share=0.6, rate=1.0, kv=KV, times=None):
    timing = times or Fixed()
    return Resident(mux.ServedModel(name, rate, 16, 16, 1, kv, timing), timing, decode_share, prefill_share)


def mesh(residents, units=1000, scheduler=None, sharing="unified"):
    memory = MeshMemory(units, [each.served for each in residents], sharing)
    loop = Loop()
    return Mesh(residents, 1, scheduler or mux.ADBS(), memory, loop), loop


def run(made, requests, until=1e9):
    one, loop = made
    for request in requests:
        loop.at(request.time_s, one.arrive, request)
    one.run(until, check=True)
    return one


# ---- by hand


def test_a_request_alone():
    """Prefill with all of the compute that nobody waits for, then three steps."""
    request = Request("a", 2.0, prompt=20, output=4)
    one = run(mesh([resident("a")]), [request])
    assert request.first_s == pytest.approx(3.0)
    assert request.end_s == pytest.approx(3.3)
    assert (one.counts.arrived, one.counts.ended, one.counts.tokens, one.counts.computed) == (1, 1, 4, 20)
    assert one.counts.jobs == 4
    assert one.memory.used("a") == 0


def test_blocks_are_taken_when_they_are_needed():
    """20 tokens take two units; the 13th step writes token 33, into a third."""
    request = Request("a", 0.0, prompt=20, output=20)
    made = mesh([resident("a")])
    used = {}
    for at in (0.5, 1.55, 2.25, 2.35):
        made[1].at(at, lambda at: used.__setitem__(at, made[0].memory.used("a")), at)
    run(made, [request])
    assert used == {0.5: 2, 1.55: 2, 2.25: 3, 2.35: 3}
    assert request.end_s == pytest.approx(1 + 19 * 0.1)


def test_prefill_and_decode_of_two_models_run_beside_each_other():
    """b's prefill has 0.6 of the compute while a decodes with 0.4: 1 / 0.6 s, and a is not held up."""
    first = Request("a", 0.0, prompt=16, output=31)
    second = Request("b", 1.05, prompt=16, output=1)
    run(mesh([resident("a"), resident("b")]), [first, second])
    assert second.end_s == pytest.approx(1.1 + 1 / 0.6)  # it waits for the end of a's step, which had all compute
    assert first.end_s == pytest.approx(1 + 30 * 0.1)
    assert first.stopped == second.stopped == 0


def test_temporal_multiplexing_makes_decode_wait_for_a_prefill():
    first = Request("a", 0.0, prompt=16, output=31)
    second = Request("b", 1.05, prompt=16, output=2)
    run(mesh([resident("a"), resident("b")], scheduler=mux.FCFS()), [first, second])
    assert first.end_s == pytest.approx(4.0)  # it came first, and decodes until its end
    assert second.first_s == pytest.approx(5.0)
    assert second.end_s == pytest.approx(5.1)


def test_two_models_that_read_share_the_bandwidth():
    """a reads alone while b's prompt is computed, then both take 0.2 s a step: 8 s of reads in all."""
    requests = [Request("a", 0.0, 16, 41), Request("b", 0.0, 16, 41)]
    residents = [resident(name, decode_share=0.5, times=Reading()) for name in "ab"]
    one = run(mesh(residents, scheduler=mux.ADBS(stretch=False)), requests)
    assert requests[1].first_s == pytest.approx(2 / 0.6)
    assert requests[0].end_s == pytest.approx(8.0, abs=0.2)  # 16 or 17 steps of 0.1 s, then of 0.2 s
    assert requests[1].end_s == pytest.approx(1 / 0.6 + 80 * 0.1, abs=1e-4)
    assert one.counts.read_s == pytest.approx(8.0)


def test_a_stopped_request_is_computed_again_and_ends():
    """Five units. Two requests of two each want a fourth and a fifth, then a sixth: the younger one is stopped."""
    requests = [Request("a", 0.0, 32, 40), Request("a", 0.0, 32, 40)]
    one = run(mesh([resident("a")], units=5), requests)
    assert [request.made for request in requests] == [40, 40]
    assert requests[0].stopped == 0
    assert requests[1].stopped == one.counts.stopped == 1
    assert one.counts.tokens == 80
    assert one.counts.computed > 64  # and what it had made by then


@pytest.mark.parametrize("scheduler", [mux.ADBS(), mux.ADBS(stretch=False), mux.Temporal(), mux.RoundRobin()])
def test_a_full_partition_goes_on_beside_a_neighbour_that_always_has_work(scheduler):
    """b's two requests fill its 30 units and both want one more, while a decodes until long after."""
    light = Request("a", 0.0, prompt=16, output=460)
    full = [Request("b", 0.0, prompt=14 * 16, output=100) for _ in range(2)]
    one = run(mesh([resident("a"), resident("b")], 60, scheduler, "partitioned"), [light, *full])
    assert full[1].stopped == one.counts.stopped == 1
    assert max(request.end_s for request in full) < light.end_s
    assert [request.made for request in full] == [100, 100]


def test_room_for_growth_spares_requests_that_are_stopped():
    """Forty requests that grow from one block to five, in memory for twelve of them."""
    stopped = {}
    for growth in (True, False):
        models = [resident("a")]
        memory = MeshMemory(60, [models[0].served], growth=growth)
        assert memory.view("a")["block"] == int(growth)
        loop = Loop()
        one = Mesh(models, 1, mux.ADBS(), memory, loop)
        run((one, loop), [Request("a", 0.1 * at, 16, 64) for at in range(40)])
        assert one.counts.ended == 40
        stopped[growth] = one.counts.stopped
    assert stopped[True] < stopped[False] / 2


def test_prompts_wait_while_the_largest_batch_decodes():
    """300 prompts at once, eight a second, and prompts go first: after 256 of them decode has its turn."""
    requests = [Request("a", 0.0, 16, 3) for _ in range(300)]
    one = run(mesh([resident("a")], units=1000, scheduler=mux.FCFS()), requests)
    assert one.counts.ended == 300
    assert [request.first_s for request in requests[249:257]] == pytest.approx([33.0] * 7 + [34.2])  # 1 + 31 * 8 + 7
    assert requests[0].end_s == pytest.approx(33.2)


def test_a_request_that_could_never_end_is_refused():
    made = mesh([resident("a"), resident("b")], units=10, sharing="partitioned")
    fits, large = Request("a", 0.0, 40, 41), Request("a", 0.0, 40, 42)  # five units hold 80 tokens
    one = run(made, [fits, large])
    assert fits.end_s > 0
    assert large.end_s < 0
    assert (one.counts.refused, one.counts.ended) == (1, 1)


# ---- memory


def test_partitions_are_equal_and_nobody_takes_anothers():
    memory = MeshMemory(101, [resident(name).served for name in "ab"], "partitioned")
    memory.take("a", {1: 50})
    memory.check()
    assert memory.available == 1
    with pytest.raises(OutOfQuota):
        memory.take("a", {2: 1})
    memory.take("b", {1: 50})
    memory.check()
    memory.give_back("a", 1)
    assert (memory.used("a"), memory.used("b")) == (0, 50)
    assert memory.view("a") == {"quota": 50, "used": 0, "reserved": 50, "limit": 50, "block": 1}


def test_a_unified_cache_gives_one_model_all_and_its_quotas_follow_what_is_asked_for():
    models = [resident(name, rate=rate).served for name, rate in (("a", 1.0), ("b", 3.0))]
    memory = MeshMemory(100, models)
    assert memory.quotas.units == {"a": 25, "b": 75}
    memory.take("a", {1: 60, 2: 40})
    with pytest.raises(OutOfQuota):
        memory.take("b", {1: 1})
    memory.adapt(100.0, {"a": 0, "b": 0})
    memory.check()
    assert memory.quotas.units["a"] > 90
    idle = MeshMemory(100, [resident(name, rate=0.0).served for name in "ab"])
    assert idle.quotas.units == {"a": 50, "b": 50}


def test_units_of_a_block():
    assert block_units(KV) == 1
    assert block_units(KV + 1) == 2
    assert block_units(512 << 10) == 128


def test_no_memory_and_no_models_are_refused():
    with pytest.raises(OutOfMemory):
        MeshMemory(0, [resident("a").served])
    with pytest.raises(ArgumentError, match="without models"):
        Mesh([], 1, mux.ADBS(), MeshMemory(1, [resident("a").served]), Loop())


class Idle:
    """A scheduler that never starts anything."""

    def step(self, state):
        return []


def test_a_scheduler_that_stands_still_is_an_error():
    with pytest.raises(StateError, match="stands still"):
        run(mesh([resident("a")], scheduler=Idle()), [Request("a", 0.0, 16, 2)])


# ---- nothing is lost

SCHEDULERS = {"ADBS": mux.ADBS(), "plain": mux.ADBS(stretch=False), "FCFS": mux.FCFS(), "turns": mux.RoundRobin()}
SCHEDULERS["temporal"] = mux.Temporal()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("sharing", ["unified", "partitioned"])
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_each_request_ends_once_and_tokens_add_up(name, sharing, data):
    """Memory is short, blocks of three sizes: invariants hold after each event, and everything ends."""
    shares = st.sampled_from([0.1, 0.3, 0.5, 0.9])
    residents = [
        resident(
            f"m{at}", data.draw(shares), data.draw(st.sampled_from([0.5, 0.7, 1.0])),
            kv=KV * data.draw(st.integers(1, 3)), times=data.draw(st.sampled_from([Fixed(), Reading()])),
        )
        for at in range(data.draw(st.integers(1, 3)))
    ]  # fmt: skip
    made = mesh(residents, data.draw(st.integers(24, 90)), SCHEDULERS[name], sharing)
    requests = [
        Request(f"m{data.draw(st.integers(0, len(residents) - 1))}", data.draw(st.floats(0, 8)), prompt, output)
        for prompt, output in data.draw(
            st.lists(st.tuples(st.integers(1, 120), st.integers(1, 60)), min_size=1, max_size=25)
        )
    ]
    one = run(made, requests)
    refused = [each for each in requests if not one.memory.fits(each.model, each.prompt + each.output - 1)]
    ended = [each for each in requests if each.end_s >= 0]
    assert (one.counts.arrived, one.counts.refused, one.counts.ended) == (len(requests), len(refused), len(ended))
    assert len(refused) + len(ended) == len(requests)
    assert one.counts.tokens == sum(each.output for each in ended)
    for request in ended:
        assert request.made == request.output
        assert request.time_s < request.first_s <= request.end_s
    assert all(one.memory.used(each.served.name) == 0 for each in residents)
    assert one.counts.stopped == sum(each.stopped for each in requests)
