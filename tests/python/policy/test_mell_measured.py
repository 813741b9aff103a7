"""Measured boundaries: fits, moves that fit into an epoch, refused profiles. With numbers made by hand."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import ArgumentError
from kvpool.policy import cost, mell
from kvpool.policy.mell import BoundaryProfile, ComputeProfile, IterationSample, LinkSample

SHAPE = cost.ModelShape(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=50)
TOKEN = SHAPE.kv_bytes_per_token
SECONDS = {(1, 0): 0.010, (1, 8): 0.0105, (1, 32): 0.014, (8, 0): 0.020, (8, 8): 0.019, (8, 32): 0.021}


def made_profile(**changes):
    """A link of 1 ms and a million tokens a second, and one with useless times; batches of 1 and 8."""
    fields = {
        "model": SHAPE,
        "machine": cost.Machine("made", "by hand", 1),
        "context": 64,
        "links": {
            "even": tuple(LinkSample(TOKEN * n, 1e-3 + n * 1e-6) for n in (10, 100, 1000)),
            "flat": (LinkSample(TOKEN * 10, 1e-3), LinkSample(TOKEN * 20, 1e-3)),
        },
        "iterations": tuple(IterationSample(*key, seconds) for key, seconds in SECONDS.items()),
    }
    return BoundaryProfile(**(fields | changes))


def test_latency_and_bandwidth_are_measured_separately():
    link = made_profile().link("even")
    assert link.latency_s == pytest.approx(1e-3)
    assert link.bytes_per_s == pytest.approx(1e6 * TOKEN)
    flat = made_profile().link("flat")  # no bandwidth without end
    assert (flat.latency_s, flat.bytes_per_s) == (0.0, pytest.approx(20e3 * TOKEN))


def test_tokens_fit_beside_a_batch_as_far_as_the_slowdown_allows():
    profile = made_profile()
    assert profile.tokens_beside(1, 0.05) == 8
    assert profile.tokens_beside(1, 0.2) == 8 + int(24 * (0.012 - 0.0105) / (0.014 - 0.0105))
    assert profile.tokens_beside(1, 5.0) == 32  # beyond the measurements nothing is known
    assert profile.tokens_beside(8, 0.0) == 8  # a measurement below the one without moves is no slowdown


def test_an_epoch_carries_tokens_in_each_of_its_slowed_iterations():
    assert made_profile().compute(epoch_s=1.0, slowdown=0.05).tokens == {1: 95 * 8, 8: 47 * 32}
    assert made_profile().compute(epoch_s=0.001).tokens == {1: 0, 8: 0}  # shorter than an iteration


def test_between_two_measured_batches_the_smaller_counts():
    profile = ComputeProfile({1: 100, 8: 300, 16: 200})
    assert [profile.boundary(batch) for batch in (0, 1, 2, 8, 9, 16, 17)] == [100, 100, 100, 300, 200, 200, 0]


def test_the_planner_takes_the_measurements():
    profile = made_profile()

    def links(source, destination):
        return [("up", source), ("down", destination)]

    kinds = {(way, gpu): "even" for way in ("up", "down") for gpu in range(3)}
    limits = profile.boundaries(links, kinds, gpus=[2], epoch_s=0.01, share=0.5, slowdown=0.05)
    assert set(limits.link_tokens.values()) <= {4999, 5000}
    assert set(limits.link_call_tokens.values()) <= {1000, 1001}
    assert set(limits.compute) == {2}
    moves = [mell.Move((number,), 0, 1 + number % 2, 1900) for number in range(4)]
    found = mell.Backlog().divide(moves, limits, {}, dict.fromkeys(range(4), 1900), {1: 10**6, 2: 10**6})
    assert found.as_kv == moves[:1]  # two transfers of 1,900 tokens and 1,000 more for each are too much
    assert len(mell.divide(moves, limits, {}).as_kv) == 1


@given(
    st.lists(st.floats(1e-6, 10), min_size=2, max_size=6),
    st.lists(st.floats(1e-6, 10), min_size=1, max_size=6),
    st.floats(0, 3),
)
def test_more_time_never_carries_less_whatever_was_measured(link_s, iteration_s, slowdown):
    samples = tuple(LinkSample(TOKEN * 4**at, seconds) for at, seconds in enumerate(link_s))
    iterations = tuple(IterationSample(4, 8 * at, seconds) for at, seconds in enumerate(iteration_s))
    profile = made_profile(links={"it": samples}, iterations=iterations)
    link = profile.link("it")
    assert link.bytes_per_s > 0
    assert link.latency_s >= 0
    beside = [profile.tokens_beside(4, part * slowdown) for part in (0, 0.5, 1)]
    assert 0 <= beside[0] <= beside[1] <= beside[2] <= iterations[-1].tokens
    limits = [profile.boundaries(lambda *_: ["a"], {"a": "it"}, [0], epoch_s) for epoch_s in (1.0, 2.0)]
    assert 0 <= limits[0].link_tokens["a"] <= limits[1].link_tokens["a"]
    assert 0 <= limits[0].compute_tokens(0, 4) <= limits[1].compute_tokens(0, 4)


@pytest.mark.parametrize(
    "ask",
    [
        lambda profile: profile.link("none"),
        lambda profile: profile.tokens_beside(2, 0.1),
        lambda profile: profile.compute(0.0),
        lambda profile: profile.compute(1.0, -0.1),
        lambda profile: profile.boundaries(lambda *_: [], {}, [], 1.0, share=1.5),
        lambda profile: profile.boundaries(lambda *_: [], {"a": "none"}, [], 1.0),
        lambda profile: made_profile(links={"one": [LinkSample(8, 1.0)]}).link("one"),
        lambda profile: made_profile(iterations=()).compute(1.0),
    ],
)
def test_a_missing_measurement_is_an_error(ask):
    with pytest.raises(ArgumentError):
        ask(made_profile())


def test_a_profile_is_the_same_when_it_is_read_back():
    profile = made_profile()
    assert BoundaryProfile.from_json(profile.as_json()) == profile


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda v: v.update(version=2), "version 2"),
        (lambda v: v.update(format="kvpool operator profile"), "operator profile"),
        (lambda v: v.pop("links"), "no links"),
        (lambda v: v.update(context=0), "context is 0"),
        (lambda v: v["model"].pop("ffn"), "ffn missing"),
        (lambda v: v["machine"].update(units="2"), r"machine\.units"),
        (lambda v: v["links"].update(even={}), r"links\.even is dict"),
        (lambda v: v["links"]["even"][1].update(bytes=0), r"links\.even\[1\]\.bytes is 0"),
        (lambda v: v["links"]["even"][1].update(seconds=float("inf")), r"seconds is inf"),
        (lambda v: v["iterations"][2].pop("tokens"), r"iterations\[2\] has no tokens"),
        (lambda v: v["iterations"][2].update(batch=0), r"iterations\[2\]\.batch is 0"),
        (lambda v: v["iterations"][2].update(tokens=True), r"iterations\[2\]\.tokens is True"),
    ],
)
def test_an_error_in_a_profile_is_named(spoil, text):
    value = copy.deepcopy(made_profile().as_json())
    spoil(value)
    with pytest.raises(ArgumentError, match=text):
        BoundaryProfile.from_json(value)
