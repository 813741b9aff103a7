"""Many live migrations at once, in both directions; and by the way that measured costs choose, among members."""

from __future__ import annotations

import random
import time

import pytest
from cluster.kit import LocalPlace
from control.migration_kit import Place, Reader, ToyEngine, eventually, prompt_of, reference
from kit import small_pool

import kvpool
from kvpool.control.migration import Migrations
from kvpool.policy import cost, mell
from kvpool.policy.migration import WayCosts

REQUESTS, LENGTH, SECONDS = 6, 120, 2.0


@pytest.mark.parametrize("seed", range(2))
def test_requests_that_go_to_and_fro_lose_no_token_and_no_block(seed):
    dice, reader = random.Random(seed), Reader()
    places = [Place(name, reader, blocks=256) for name in ("a", "b")]
    a, b = places
    try:
        a.pool.peers.connect(b.address)
        prompts = {f"r{each}": prompt_of(each, dice.randint(2, 40)) for each in range(REQUESTS)}
        for name, prompt in prompts.items():
            dice.choice(places).engine.begin(name, prompt, LENGTH)
        for each in places:
            each.engine.run(SECONDS / LENGTH)
        moving, until = [], time.monotonic() + SECONDS

        def moved():
            return sum(each.done() and each.exception(0) is None for each in moving)

        while time.monotonic() < until or (moved() <= REQUESTS and time.monotonic() < until + 60):
            here, there = dice.sample(places, 2)
            names = [name for name, one in list(here.engine.requests.items()) if not one.stopped]
            if names:
                try:
                    by = dice.choice(["kv", "tokens"])
                    moving.append(here.migrations.migrate(dice.choice(names), there.name, by=by))
                except (kvpool.StateError, kvpool.Busy):  # it is on its way, or has just come
                    pass
            if moving and dice.random() < 0.3:
                dice.choice(moving).cancel()
            time.sleep(0.01 * dice.random())
        for each in moving:
            failure = each.exception(30)
            assert failure is None or isinstance(failure, kvpool.Cancelled), failure
        assert moved() > REQUESTS
        for each in places:
            each.engine.end()
        for name, prompt in prompts.items():
            (holder,) = [each for each in places if name in each.engine.requests]
            expected = reference(prompt, LENGTH)
            assert holder.engine.finish(name) == expected
            assert reader.tokens[name] == expected[len(prompt) :]
        for each in places:
            eventually(lambda each=each: not each.migrations.arriving())
            each.check_empty()
    finally:
        for each in places:
            each.close()


def costs(bytes_per_s):
    shape = cost.ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256)
    profile = mell.BoundaryProfile(
        shape, cost.Machine("test", "", 1), 64,
        {"link": [mell.LinkSample(n, n / bytes_per_s) for n in (1000, 1000000)]},
        [mell.IterationSample(1, 0, 0.01), mell.IterationSample(1, 100, 0.02)],
    )  # fmt: skip
    return WayCosts(profile, link="link")


@pytest.mark.parametrize(("bytes_per_s", "way"), [(1e9, "kv"), (1e3, "tokens")])
def test_members_are_met_by_name_and_a_request_goes_the_way_that_takes_less(bytes_per_s, way):
    place, reader, prompt = LocalPlace(), Reader(), prompt_of(1)
    try:
        clusters, pools, engines, moves = [], [], [], []
        for name in ("a", "b"):
            clusters.append(cluster := place.join(lease=10.0))
            pools.append(small_pool(64, 0))
            pools[-1].attach(cluster, name=name)
            engines.append(ToyEngine(pools[-1], reader, name))
            moves.append(Migrations(pools[-1], engines[-1], cluster=cluster, costs=costs(bytes_per_s)))
            engines[-1].batch = lambda: 1
        for cluster in clusters:
            eventually(lambda cluster=cluster: len(cluster.members()) == 2)
        engines[0].begin("r", prompt, LENGTH)
        assert moves[0].migrate("r", "b").wait().way == way
        assert engines[1].finish("r") == reference(prompt, LENGTH)
        for one in (*moves, *pools):
            one.close()
    finally:
        place.close()
