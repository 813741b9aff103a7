"""Data-parallel ranks of one server: each is an instance with its own events, and requests name it."""

from __future__ import annotations

import pytest
from kit import BLOCK
from router.publishing import Publishing
from router.router_kit import eventually, fakes, logged, routing

from kvpool import cli
from kvpool.control.router import EventsSpec, InstanceSpec, RouterSettings, by_rank
from kvpool.errors import ArgumentError

BY_EVENTS = {"block_tokens": BLOCK, "policy": "longest-prefix", "warmup_s": 0.0, "cap": 1000.0}


def test_a_prompt_goes_to_the_rank_that_has_it_cached():
    prompts = [[each] * 12 * BLOCK for each in (7, 8)]
    with fakes("a") as (fake,), Publishing() as zero, Publishing() as one:
        instances, _ = by_rank([fake.spec], {}, {"a": 2})
        events = {"a-dp0": EventsSpec(zero.endpoint), "a-dp1": EventsSpec(one.endpoint)}
        with routing(*instances, events=events, **BY_EVENTS) as running:
            for publisher, prompt in zip((zero, one), prompts, strict=True):
                publisher.wait_until_heard()
                publisher.store(prompt)
            eventually(lambda: all(each["cached_blocks"] for each in running.states().values()))
            theirs = {"X-Data-Parallel-Rank": "9", "X-Override-Routed-DP-Rank": "9"}
            places = [running.where(prompts[each], headers=theirs) for each in (0, 1, 1, 0)]
            assert places == ["a-dp0", "a-dp1", "a-dp1", "a-dp0"]
            for header in ("x-data-parallel-rank", "x-override-routed-dp-rank"):
                assert [headers[header] for _, headers, _ in fake.seen] == ["0", "1", "1", "0"]
            assert [each["rank"] for each in running.states().values()] == [0, 1]
            url = {"url": fake.spec.url, "name": "third"}
            assert running.admin.post("/instances", json=url | {"rank": 1}).status_code == 400
            assert running.admin.post("/instances", json=url | {"rank": "1"}).status_code == 400
            assert running.admin.post("/instances", json=url | {"rank": 2}).status_code == 201


def test_events_of_another_rank_are_ignored_and_told():
    with logged() as records, fakes("a") as (fake,), Publishing() as publisher:
        instances, _ = by_rank([fake.spec], {}, {"a": 2})
        with routing(*instances, events={"a-dp1": EventsSpec(publisher.endpoint)}, **BY_EVENTS) as running:
            publisher.wait_until_heard()
            for publisher.rank in (0, 1):
                publisher.store([7 + publisher.rank] * 12 * BLOCK)
            eventually(lambda: running.states()["a-dp1"]["cached_blocks"] == 12)
            assert running.states()["a-dp1"]["events"]["of_others"] == 1
            eventually(lambda: [each for each in records if each.getMessage() == "events ignored"])


def test_a_client_names_the_rank_where_the_router_does_not():
    with fakes("a") as (fake,), routing(fake) as running:
        running.complete("x", headers={"X-Data-Parallel-Rank": "3"})
        assert fake.seen[0][1]["x-data-parallel-rank"] == "3"


def test_ranks_have_the_servers_role_and_the_next_ports():
    servers = [InstanceSpec("a", "http://h:1", "prefill"), InstanceSpec("b", "http://h:2")]
    events = {"a": EventsSpec("tcp://h:5557", "tcp://[fd00::1]:6000"), "b": EventsSpec("ipc:///b")}
    specs, told = by_rank(servers, events, {"a": 2})
    assert [(each.name, each.rank, each.role, each.url) for each in specs] == [
        ("a-dp0", 0, "prefill", "http://h:1"), ("a-dp1", 1, "prefill", "http://h:1"), ("b", None, "both", "http://h:2")
    ]  # fmt: skip
    assert told == {"a-dp0": events["a"], "a-dp1": EventsSpec("tcp://h:5558", "tcp://[fd00::1]:6001"), "b": events["b"]}
    RouterSettings((*specs, InstanceSpec("d", "http://h:3", "decode")), events=told)


@pytest.mark.parametrize(
    ("ranks", "endpoint", "message"),
    [
        ({"c": 2}, "tcp://h:1", "no such instance"),
        ({"a": 0}, "tcp://h:1", "has 0 data-parallel ranks"),
        ({"a": 5000}, "tcp://h:1", "has 5000 data-parallel ranks"),
        ({"a": 2}, "ipc:///a", "has no port"),
        ({"a": 2}, "tcp://h:65535", "an address to connect to"),
    ],
)
def test_ranks_that_cannot_be_are_refused(ranks, endpoint, message):
    with pytest.raises(ArgumentError, match=message):
        by_rank([InstanceSpec("a", "http://h:1")], {"a": EventsSpec(endpoint)}, ranks)


def test_two_instances_of_one_rank_are_refused():
    with pytest.raises(ArgumentError, match=r"http://h:1 \(rank 0\) is there twice"):
        RouterSettings((InstanceSpec("a", "http://h:1", rank=0), InstanceSpec("b", "http://h:1", rank=0)))
    for wrong in (-1, True, "1"):
        with pytest.raises(ArgumentError, match="must be a number"):
            InstanceSpec("a", "http://h:1", rank=wrong)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("a=x", "--data-parallel 'a=x': it must be NAME=RANKS, where RANKS is a number"),
        ("a=-1", "where RANKS is a number"),
        ("a=2,b", "--data-parallel 'b': it must be NAME=RANKS, and each name once"),
        ("a=2,a=3", "each name once"),
        ("a=", "must be NAME=RANKS"),
        ("a=0", "has 0 data-parallel ranks; 1 to 1024"),
        ("c=2", "data-parallel ranks of c: no such instance"),
    ],
)
def test_a_wrong_number_of_ranks_is_told_as_it_was_given(ranks, message, capsys):
    assert cli.main(["router", "--instances", "a=http://h:1", "--data-parallel", ranks]) != 0
    assert message in capsys.readouterr().err
