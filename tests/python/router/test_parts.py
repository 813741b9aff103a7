"""The router's parts without sockets: settings, the cutter of events, the fleet's books, the default cost model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy.kit import made_model, made_profile
from router.router_kit import logged

from kvpool.control import save_profile
from kvpool.control.router import HealthSettings, InstanceSpec, RouterSettings
from kvpool.control.router.costs import cost_model
from kvpool.control.router.errors import Refusal
from kvpool.control.router.events import EventCutter
from kvpool.control.router.fleet import Fleet
from kvpool.control.router.metrics import Metrics
from kvpool.control.router.paths import check_path
from kvpool.control.router.prompts import Asked
from kvpool.control.router.settings import POLICIES
from kvpool.control.router.upstream import passed_on
from kvpool.errors import ArgumentError
from kvpool.policy.routing import Kind

A = InstanceSpec("a", "http://127.0.0.1:1")
B = InstanceSpec("b", "http://127.0.0.1:2")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made_fleet(*specs: InstanceSpec, **settings) -> tuple[Fleet, Clock]:
    clock = Clock()
    health = settings.pop("health", HealthSettings(interval_s=0, errors=1, backoff_s=1.0))
    return Fleet(RouterSettings(specs, health=health, warmup_s=0.0, **settings), Metrics(), clock), clock


def prompt(number: int, size: int = 64) -> Asked:
    return Asked("completions", np.arange(number * size, (number + 1) * size, dtype=np.int32))


# ---- settings


def test_an_instance_is_named_by_its_address_or_by_a_given_name():
    assert InstanceSpec.parse("http://127.0.0.1:8001/") == InstanceSpec("127.0.0.1:8001", "http://127.0.0.1:8001")
    assert InstanceSpec.parse("http://[::1]:80") == InstanceSpec("::1:80", "http://[::1]:80")
    assert InstanceSpec.parse(" big=https://host/engine ") == InstanceSpec("big", "https://host/engine")


@pytest.mark.parametrize(
    "text",
    ["", "x", "ftp://x", "http://", "http://x:0", "http://x:99999", "http://u:p@x", "http://x?q", "a b=http://x", "=/"],
)
def test_a_wrong_instance_is_refused(text):
    with pytest.raises(ArgumentError):
        InstanceSpec.parse(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "best"}, {"port": -1}, {"port": 65536}, {"port": 5, "admin_port": 5}, {"retries": -1},
        {"in_flight_max": 0}, {"held_bytes_max": 1},
        {"body_bytes_max": 0}, {"deadline_s": float("inf")}, {"stall_timeout_s": float("nan")},
        {"ttl_s": 0}, {"warmup_s": -1}, {"instances": (A, A)}, {"instances": (A, InstanceSpec("c", A.url))},
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ArgumentError):
        RouterSettings(**{"instances": (A, B)} | wrong)


@pytest.mark.parametrize("wrong", [{"interval_s": -1}, {"timeout_s": 0}, {"fails": 0}, {"path": "health"}])
def test_wrong_health_settings_are_refused(wrong):
    with pytest.raises(ArgumentError):
        HealthSettings(**wrong)


# ---- events

EVENTS = st.lists(st.sampled_from([b"data: 1", b"data: {}\ndata: x", b": ping", b"data: [DONE]"]), max_size=6)


@given(EVENTS, st.sampled_from([b"\n\n", b"\r\n\r\n"]), st.data())
def test_data_is_passed_on_up_to_the_end_of_an_event_and_none_is_lost(parts, mark, data):
    whole = b"".join(part + mark for part in parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    cutter, passed = EventCutter(), b""
    for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        piece = cutter.feed(whole[start:stop])
        passed += piece
        assert not piece or piece.endswith(mark)
        assert whole[:stop].startswith(passed)
        assert cutter.done == (b"data: [DONE]" in passed)
    assert passed + cutter.rest() == whole


def test_an_event_without_an_end_does_not_fill_the_memory():
    cutter = EventCutter()
    passed = sum(len(cutter.feed(b"x" * 65536)) for _ in range(64))
    assert passed >= 2 << 20


@pytest.mark.parametrize(
    ("pieces", "done"),
    [
        ([b'data: {"text": "data: [DONE]"}\n\n'], False),  # a model may write that
        ([b"data:[DONE]\n\n"], True),
        ([b": ping\r\ndata: [DONE]\r\n\r\n"], True),
        ([b"data: 1\n\nda", b"ta: [DONE]\n", b"\n"], True),
        ([b"x" * (2 << 20), b"data: [DONE]\n\n"], False),  # the end of a long line that was passed on in parts
        ([b"x" * (2 << 20), b"\n\ndata: [DONE]\n\n"], True),
    ],
)
def test_a_stream_is_ended_by_a_line_and_not_by_text(pieces, done):
    cutter = EventCutter()
    assert b"".join(map(cutter.feed, pieces)) == b"".join(pieces)
    assert cutter.done == done


# ---- paths


@pytest.mark.parametrize("path", [b"/v1/x#y", b"/v1/x?a#b", b"/v1/x y", b"/v1/x\x00", b"/v1/%2E%2e/x", b"/v1/\\x"])
def test_a_path_that_leads_elsewhere_is_refused(path):
    with pytest.raises(Refusal) as caught:
        check_path(path)
    assert caught.value.status == 400


@pytest.mark.parametrize("path", [b"/v1/models", b"/v1/models/a..b/.c?d=../e\\", b"/v1/files/a%20b%252e;x=1", b"/v1/"])
def test_a_path_with_dots_that_lead_nowhere_passes(path):
    check_path(path)


# ---- headers


def test_headers_of_one_connection_are_not_passed():
    headers = [
        (b"Connection", b"close, X-Mine"), (b"X-Mine", b"1"), (b"Host", b"h"), (b"Transfer-Encoding", b"chunked"),
        (b"Authorization", b"k"), (b"X-Kvpool-Instance", b"forged"), (b"Set-Cookie", b"a"), (b"Set-Cookie", b"b"),
    ]  # fmt: skip
    assert passed_on(headers) == [(b"authorization", b"k"), (b"set-cookie", b"a"), (b"set-cookie", b"b")]


# ---- the fleet


def test_each_lease_ends_once_and_the_books_close():
    fleet, _ = made_fleet(A, B)
    leases = [fleet.lease(prompt(number)) for number in range(6)]
    assert sum(instance.in_flight for instance in fleet) == fleet.scheduler.in_flight == 6
    for number, lease in enumerate(leases):
        with lease:
            if number % 3 == 0:
                lease.computed()
                lease.finished()
            elif number % 3 == 1:
                lease.computed()
    assert sum(instance.in_flight for instance in fleet) == fleet.scheduler.in_flight == 0


def test_a_request_that_is_tried_elsewhere_counts_once_among_the_uses_of_its_prefix():
    fleet, _ = made_fleet(A, B)
    with fleet.lease(prompt(0)) as lease:
        lease.computed()
        lease.finished()
    uses = fleet.scheduler._policy._uses
    with fleet.lease(prompt(0)) as lease:
        pass  # its instance refused
    counted = dict(uses._now)
    assert (set(counted.values()), uses.requests) == ({1}, 2)
    with fleet.lease(prompt(0), tried=[lease.seat.instance.number]) as second:
        assert second.seat.instance is not lease.seat.instance
    assert (uses._now, uses.requests) == (counted, 2)


def test_requests_sent_before_an_ejection_say_nothing_of_a_returned_instance():
    fleet, clock = made_fleet(A)
    old = [fleet.lease(prompt(number)) for number in range(3)]
    instance = fleet.get("a")
    with old[0]:
        old[0].seat.broken()
    assert instance.breaker.state.value == "out"
    clock.now += 1.0
    fleet.tick()
    assert instance.breaker.state.value == "trial"
    with old[1]:
        assert old[1].seat.fell
        old[1].seat.broken()  # reported late
    assert instance.breaker.state.value == "trial"
    with fleet.lease(prompt(9)) as trial:
        with pytest.raises(Refusal):  # one at a time
            fleet.lease(prompt(10))
        with old[2]:
            pass
        with pytest.raises(Refusal):
            fleet.lease(prompt(10))
        trial.computed()
        trial.finished()
    assert instance.breaker.state.value == "healthy"
    assert instance.in_flight == 0


def test_a_trial_whose_client_left_can_be_made_again():
    fleet, clock = made_fleet(A)
    with fleet.lease(prompt(0)) as lease:
        lease.seat.broken()
    clock.now += 1.0
    fleet.tick()
    for _ in range(3):
        with fleet.lease(prompt(1)):
            pass


def test_the_reason_that_keeps_a_newcomer_out_is_logged_when_it_changes():
    fleet, _ = made_fleet(A, B, health=HealthSettings(path="/ok", fails=1))
    (a, b) = fleet
    with logged() as records:
        for wrong in ("refused", "refused", "status 503", "refused"):
            fleet.probed(a, wrong)
        fleet.probed(b, None)
        fleet.probed(b, "refused")
        fleet.probed(a, None)
    told = [(each.getMessage(), each.fields.get("cause")) for each in records]
    assert told == [
        *[("instance not up", cause) for cause in ("refused", "status 503", "refused")],
        ("instance up", None),
        ("instance ejected", None),  # b
        ("instance up", None),
    ]
    assert {name: records[0].fields[name] for name in ("instance", "url", "path")} == {
        "instance": "a",
        "url": A.url,
        "path": "/ok",
    }


def test_the_tree_does_not_grow_forever():
    """At once, and by its longest unused: repeated prompts stay, however old they are."""
    fleet, clock = made_fleet(A, tree_blocks_max=100)
    tree = fleet.scheduler.tree(Kind.COLOCATED)
    for number in range(50):
        for asked in (prompt(0), prompt(number)):  # of four blocks each
            with fleet.lease(asked) as lease:
                lease.computed()
                lease.finished()
            assert len(tree) <= 100
        clock.now += 1.0
    assert len(tree) == 100
    assert [tree.match(prompt(number).tokens)[1].tolist() for number in (0, 49, 26, 25)] == [[64], [64], [64], []]
    fleet.measure()
    assert fleet._metrics.registry.get_sample_value("kvpool_router_tree_blocks_evicted_total") == 25 * 4


def test_a_reused_id_inherits_nothing():
    fleet, _ = made_fleet(A, B)
    with fleet.lease(prompt(0)) as lease:
        home = lease.seat.instance
        lease.computed()
        lease.finished()
    fleet.remove(home.spec.name)
    fleet._last_number = home.number - 1  # as if all others had had their turn
    again = fleet.add(InstanceSpec("c", "http://127.0.0.1:3"))
    assert again.number == home.number
    assert fleet.report(urls=True)[-1]["cached_blocks"] == 0
    fleet.refresh(home)  # a probe of the one that left, come late
    assert {instance.spec.name for instance in fleet} == {"b", "c", "a"} - {home.spec.name}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_chooses(policy):
    fleet, _ = made_fleet(A, B, policy=policy)
    with fleet.lease(prompt(0)) as lease:
        assert lease.seat.instance.spec in (A, B)
    with fleet.lease(prompt(0), tried=[lease.seat.instance.number]) as other:
        assert other.seat.instance is not lease.seat.instance


# ---- costs


def test_the_default_model_is_plausible():
    model = cost_model(None)
    assert 0.005 < model.exec_s(16) < 0.1
    assert 0.1 < model.exec_s(4096) < 2.0
    assert model.exec_s(4096, 4000) < model.exec_s(4096) / 5
    assert model.exec_s(32768) > 8 * model.exec_s(4096)  # attention shows


def test_a_profile_makes_the_model(tmp_path):
    truth = made_model()
    save_profile(made_profile(truth), tmp_path / "profile.json")
    assert cost_model(tmp_path / "profile.json").exec_s(1000) == pytest.approx(truth.exec_s(1000), rel=0.1)
    with pytest.raises(ArgumentError, match="No such file"):
        cost_model(tmp_path / "none.json")
