"""The small parts of the simulator: quantiles, the order of events, links that transfers share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import ArgumentError
from kvpool.sim.links import Links
from kvpool.sim.loop import Loop
from kvpool.sim.sketch import Sketch


@given(st.lists(st.floats(1e-8, 1e6), min_size=1, max_size=300), st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_as_near_as_promised(values, q):
    sketch = Sketch(0.01)
    for value in values:
        sketch.add(value)
    exact = sorted(values)[int(q * (len(values) - 1))]
    assert sketch.quantile(q) == pytest.approx(exact, rel=0.0101)
    assert sketch.mean == pytest.approx(np.mean(values))
    at = sketch.quantile(q)  # of those as it has them, at least so many are at most that
    assert sketch.share(at) * len(values) > q * (len(values) - 1)
    assert sketch.share(max(values)) == 1.0
    assert sketch.share(min(values) / 1.03) == 0.0
    shares = [share for _, share in sketch.cumulative()]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_sketch_of_nothing_and_of_zeros():
    sketch = Sketch()
    assert (sketch.mean, sketch.quantile(0.5), sketch.cumulative()) == (0.0, 0.0, [])
    assert sketch.share(1.0) == 1.0
    for value in (0.0, 0.0, 0.0, 8.0):
        sketch.add(value)
    assert [sketch.share(value) for value in (-1.0, 0.0, 7.9, 8.0)] == [0.0, 0.75, 0.75, 1.0]
    assert sketch.quantile(0.5) == 0.0
    assert sketch.quantile(1.0) == pytest.approx(8.0, rel=0.005)
    assert sketch.as_json()["max"] == 8.0


def test_a_sketch_stays_small():
    sketch = Sketch()
    for value in np.random.default_rng(1).lognormal(0, 3, 100_000).tolist():
        sketch.add(value)
    assert len(sketch._buckets) < 3000


@pytest.mark.parametrize("call", [lambda: Sketch(0.0), lambda: Sketch(1.0), lambda: Sketch().quantile(1.1)])
def test_a_sketch_refuses_wrong_arguments(call):
    with pytest.raises(ArgumentError):
        call()


def test_events_happen_in_order_and_simultaneous_ones_as_they_were_set():
    loop, seen = Loop(), []
    loop.at(2.0, seen.append, "c")
    loop.at(1.0, seen.append, "a")
    loop.at(1.0, lambda name: (seen.append(name), loop.at(0.5, seen.append, "late")), "b")
    loop.run_before(2.0)
    assert seen == ["a", "b", "late"]
    assert loop.now == 2.0
    loop.run_before(float("inf"))
    assert seen[-1] == "c"
    assert loop.events == 4


def test_transfers_wait_for_the_links_out_and_in():
    links = Links(3)
    assert links.send(0.0, 0, 1, 4.0) == 4.0
    assert links.send(1.0, 0, 2, 1.0) == 5.0  # 0 sends until 4
    assert links.send(1.0, 2, 1, 1.0) == 5.0  # 1 receives until 4
    assert links.send(9.0, 2, 0, 1.0) == 10.0
    assert (links.busy_s, links.waited_s) == (7.0, 6.0)
