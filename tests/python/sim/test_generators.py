"""Made-up workloads: their means, what they share, and that a seed determines everything."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest

from kvpool import ArgumentError
from kvpool.sim.generators import PRESETS, generate
from kvpool.sim.requests import FreshIds


def turns_of(request):
    return [request, *(request.then or ())]


@pytest.mark.parametrize("name", PRESETS)
def test_the_same_seed_gives_the_same_workload_which_can_be_iterated_again(name):
    def first(seed):
        return [
            (each.time_s, each.ids.tobytes(), each.output)
            for start in islice(generate(name, rate=5.0, requests=200, seed=seed).start(), 50)
            for each in turns_of(start)
        ]

    assert first(1) == first(1)
    assert first(1) != first(2)


@pytest.mark.parametrize(("name", "rel"), [("poisson", 0.05), ("power-law", 0.3)])
def test_arrivals_and_lengths_have_their_means(name, rel):
    requests = list(generate(name, rate=5.0, requests=20_000, seed=1).start())
    assert len(requests) == 20_000
    assert 20_000 / requests[-1].time_s == pytest.approx(5.0, rel=0.05)
    assert np.mean([each.prompt for each in requests]) == pytest.approx(1008, rel=rel)  # whole blocks
    assert np.mean([each.output for each in requests]) == pytest.approx(200, rel=rel)
    assert all(len(each.ids) * 16 == each.prompt for each in requests[:100])
    assert requests[0].ids[0] != requests[1].ids[0]


def test_documents_are_as_unequal_as_zipf_says():
    requests = list(generate("documents", rate=5.0, requests=20_000, seed=2, shared_count=100, zipf=1.0).start())
    blocks = 4096 // 16
    used = np.bincount([int(each.ids[0]) // blocks for each in requests], minlength=100)
    assert used[0] / used[9] == pytest.approx(10, rel=0.3)
    assert used[0] / 20_000 == pytest.approx(1 / sum(1 / k for k in range(1, 101)), rel=0.1)
    assert all(each.ids[0] // blocks == each.ids[blocks - 1] // blocks for each in requests[:100])


def test_turns_repeat_the_earlier_conversation():
    sessions = list(generate("chat", rate=10.0, requests=4000, seed=3).start())
    turns = [turns_of(session) for session in sessions]
    assert np.mean([len(session) for session in turns]) == pytest.approx(PRESETS["chat"].turns, rel=0.1)
    for session in turns[:200]:
        for before, after in pairwise(session):
            said = np.concatenate([before.ids, before.output_ids])
            assert (after.ids[: len(said)] == said).all()
            assert len(after.ids) > len(said)
            assert after.session == before.session
            assert after.prompt <= PRESETS["chat"].longest + 16
    assert len({session[0].session for session in turns}) == len(sessions)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("requests", [1, 2, 7, 50])
def test_the_number_of_requests_is_as_asked_for_and_more_begin_alike(name, requests):
    def drawn(count):
        starts = generate(name, rate=5.0, requests=count, seed=9).start()
        return [[(each.time_s, each.ids.tobytes(), each.output) for each in turns_of(start)] for start in starts]

    fewer, more = drawn(requests), drawn(requests + 30)
    assert sum(map(len, fewer)) == requests
    assert fewer[:-1] == more[: len(fewer) - 1]
    assert fewer[-1] == more[len(fewer) - 1][: len(fewer[-1])]


def test_fresh_ids_begin_again_when_all_are_used():
    ids = FreshIds(first=10)
    ids._next = 2**31 - 5
    assert ids.take(4).tolist() == list(range(2**31 - 5, 2**31 - 1))
    assert ids.take(3).tolist() == [10, 11, 12]


@pytest.mark.parametrize(
    "options",
    [
        {"shape": "nonsense"},
        {"rate": 0.0},
        {"requests": 0},
        {"block_tokens": 0},
        {"nonsense": 1},
        {"prompt": 0},
        {"tail": 1.0},
        {"turns": 0.5},
        {"zipf": -1.0},
        {"longest": 0},
    ],
)
def test_impossible_workloads_are_refused(options):
    with pytest.raises(ArgumentError):
        generate(**{"shape": "poisson", "rate": 1.0, "requests": 10, **options})
