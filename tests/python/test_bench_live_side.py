"""The engines of the benches of live migration: each way that is measured moves a request, and says what it did."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench.mell import live_stop, live_ways
from bench.mell.live_side import BLOCK_TOKENS
from bench.remote import Remote


@pytest.fixture(scope="module")
def sides():
    """Two engines that wait in their steps; the second has measured what requests cost that come to it."""
    with ExitStack() as stack:
        found = [stack.enter_context(Remote("bench.mell.live_side")) for _ in range(2)]
        for number, side in enumerate(found):
            side.ask("start", name=f"engine-{number}", processor=number, blocks=700, step_ms=2.0, computes=False)
            side.ask("begin", request=f"other-{number}", context=BLOCK_TOKENS)
        source, destination = found
        source.ask("connect", address=destination.ask("listen"))
        held = source.ask("hold", blocks=16)
        profile = destination.ask("profile", peer="engine-0", blocks=held, sizes=[1, 16], tokens=[8, 32], rounds=2)
        source.ask("give_back", blocks=held)
        assert [sample["bytes"] for sample in profile["links"]["link"]] == [65536, 16 * 65536]
        assert [(sample["batch"], sample["tokens"]) for sample in profile["iterations"]] == [(1, 0), (1, 8), (1, 32)]
        source.ask("serve", bytes_per_s=1e9)
        destination.ask("serve", bytes_per_s=1e9, costs=True)
        yield found


@pytest.mark.parametrize(("by", "way"), [("kv", "kv"), ("tokens", "tokens")])
def test_a_request_migrates_by_the_way_that_is_asked_for(sides, by, way):
    moved = live_ways._migrate(sides, by, 160, 1)
    assert moved["way"] == way
    assert (moved["blocks"] >= 10) == (way == "kv")
    assert 0 < moved["stop_s"] <= moved["total_s"]


def test_the_costs_predict_both_ways_and_one_of_them_is_taken(sides):
    predicted = sides[1].ask("choose", peer="engine-0", tokens=160)
    assert set(predicted) == {"kv", "tokens"}
    assert min(predicted.values()) > 0
    assert live_ways._migrate(sides, "auto", 160, 2)["way"] == min(predicted, key=predicted.get)


def test_a_row_of_the_stop_has_all_that_it_is_compared_with(sides):
    rows = live_stop._measure(sides, 64, 2, "64 tokens")
    assert [row.what.partition(": ")[2] for row in rows] == [
        "the stop", "between two tokens", "steps of others at the source", "steps of others at the destination"
    ]  # fmt: skip
    assert set(rows[1].peers) == {"stop-and-copy", "starting again"}
    assert all(row.value > 0 for row in rows)
    assert rows[0].details["repeats"] == len(rows[0].details["stops_ms"]) == 2


def test_everything_that_has_ended_is_free_again(sides):
    for side in sides:
        assert len(side.ask("hold", blocks=400)) == 400
