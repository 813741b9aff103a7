"""The parts of the PD example that need no process: settings, messages, what a request accepts."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from llama import Llama, LlamaConfig, PagedKV  # noqa: E402
from pd_disaggregated import messages  # noqa: E402
from pd_disaggregated.dispatcher import Dispatcher  # noqa: E402
from pd_disaggregated.fleet import Fleet, Instance  # noqa: E402
from pd_disaggregated.letter import Letter  # noqa: E402
from pd_disaggregated.places import Places  # noqa: E402
from pd_disaggregated.records import DESIGNS, Event, Setting  # noqa: E402
from pd_disaggregated.requests import Request, RequestFailed  # noqa: E402
from pd_disaggregated.worker import Plan  # noqa: E402


@pytest.mark.parametrize(
    "wrong",
    [
        ("PD-Caching-4", 1, 1),
        ("PD-Basic", 0, 1),
        ("PD-Basic", 1, 0),
        ("PD", 1, 1),
        ("PD-CC", 0, 0),
        ("PD-Basic", 1, 1, "by_mail"),
    ],
)
def test_a_setting_that_cannot_run_is_refused(wrong: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be one of|needs at least"):
        Setting(*wrong)  # type: ignore[arg-type]


def test_settings_have_names() -> None:
    assert Setting("PD-CC", 2, 0).name == "PD-CC x2"
    assert Setting("PD-Caching-3", 2, 1, "by_layer").name == "PD-Caching-3 2P1D by layer"
    assert Setting("PD-Basic", 2, 1).instances == ("prefill-0", "prefill-1", "decode-0")
    assert len(DESIGNS) == 6


@pytest.mark.parametrize("first", [None, 0, 258])
@pytest.mark.parametrize("length", [1, 10])  # 10 is a line end: the prompt is bytes
def test_a_message_arrives_as_it_was_written(first: int | None, length: int) -> None:
    prompt = np.full(length, 10, np.int32)
    letter = Letter.unpack(Letter(3, 2, prompt, 7, first).pack())
    assert (letter.request, letter.attempt, letter.new_tokens, letter.first) == (3, 2, 7, first)
    assert letter.prompt.tolist() == prompt.tolist()
    assert letter.prompt.dtype == np.int32


@pytest.mark.parametrize("content", [b"", b"{}", b"{}\n", b"[]\n", b"no\n", b'{"request": 1}\n', b"{}\nabc"])
def test_bytes_that_are_no_message_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError):
        Letter.unpack(content)


def test_a_token_comes_once_and_in_order() -> None:
    request = Request(0, 0, np.zeros(3, np.int32), 5)
    here = Instance("i", prefills=True, decodes=True)
    request.begin(here, here)
    assert request.accept(messages.Token(0, 1, 0, 40))
    assert not request.accept(messages.Token(0, 1, 0, 40))  # prefill and decode both tell it
    assert request.accept(messages.Token(0, 1, 1, 41))
    with pytest.raises(RequestFailed, match="was 41, and is 42"):
        request.accept(messages.Token(0, 1, 1, 42))
    with pytest.raises(RequestFailed, match="token 3 comes after 2"):
        request.accept(messages.Token(0, 1, 3, 43))
    order = request.begin(here, here)  # another attempt asks for the missing tokens
    assert order.prompt.tolist() == [0, 0, 0, 40, 41]
    assert (order.attempt, order.new_tokens) == (2, 3)
    assert request.accept(messages.Token(0, 2, 0, 42))
    assert request.tokens == [40, 41, 42]


def instances(*names: str) -> list[Instance]:
    found = [
        Instance(name, prefills=not name.startswith("decode"), decodes=not name.startswith("prefill")) for name in names
    ]
    for one in found:
        one.joined = True
    return found


PD_3 = Setting("PD-Caching-3", 2, 2)


def request_of(number: int, session: int, blocks: int, shared: int = 0, new_tokens: int = 1) -> Request:
    """Its prompt has a token less than so many blocks: `shared` blocks that all sessions have, then its own."""
    prompt = np.full(blocks * 4 - 1, 1 + session, np.int32)
    prompt[: shared * 4] = 0
    return Request(number, session, prompt, new_tokens)


def prefilled(places: Places, *requests: Request) -> list[str]:
    """Begins each when the ones before it have begun: the numbers of the instances."""
    for count, request in enumerate(requests, 1):
        if request.prefill is None:
            places.begin(requests[:count])
    return ["-" if request.prefill is None else request.prefill.name[-1] for request in requests]


def test_sessions_stay_and_new_ones_go_to_the_least_busy_instance() -> None:
    p0, p1, d0 = instances("prefill-0", "prefill-1", "decode-0")
    places = Places([p0, p1, d0], PD_3, 4, 100)
    requests = [request_of(0, 0, 9), request_of(1, 1, 3), request_of(2, 2, 3), request_of(3, 0, 10)]
    places.begin(requests)
    assert [request.prefill for request in requests] == [p0, p1, p1, p0]
    p1.joined = False
    later = request_of(4, 1, 1)
    places.begin([later])
    assert later.prefill is p0


def test_an_instance_that_returns_takes_over_half_of_the_sessions_each_at_its_next_turn() -> None:
    p0, p1, d0, d1 = instances("prefill-0", "prefill-1", "decode-0", "decode-1")
    places = Places([p0, p1, d0, d1], PD_3, 4, 1000)

    def turn(*sessions: int) -> list[tuple[str, str]]:
        """They come one after another, and are over at once."""
        found = []
        for session in sessions:
            request = request_of(0, session, 3)
            places.begin([request])
            assert request.prefill is not None
            assert request.decode is not None
            found.append((request.prefill.name[-1], request.decode.name[-1]))
        return found

    assert turn(0, 1, 2, 3) == [("0", "0"), ("1", "1"), ("0", "0"), ("1", "1")]
    assert turn(3, 2, 1, 0) == [("1", "1"), ("0", "0"), ("1", "1"), ("0", "0")]
    d0.joined = False
    assert turn(0, 1, 2, 3) == [("0", "1"), ("1", "1"), ("0", "1"), ("1", "1")]
    d0.joined, d0.joins = True, 1
    assert turn(3, 2, 1, 0) == [("1", "0"), ("0", "0"), ("1", "1"), ("0", "1")]
    assert turn(0, 1, 2, 3) == [("0", "1"), ("1", "1"), ("0", "0"), ("1", "0")]  # and there they stay
    p0.joined = False
    assert turn(0) == [("1", "1")]
    p0.joined, p0.joins = True, 1  # back before the others were asked: they are where they were
    assert turn(0, 1, 2, 3) == [("0", "1"), ("1", "1"), ("0", "0"), ("1", "0")]


def test_prompts_that_begin_alike_meet_where_that_is_cached_unless_they_wait_too_long() -> None:
    two = instances("prefill-0", "prefill-1", "decode-0")
    places = Places(two, PD_3, 4, 1000)
    first = request_of(0, 0, 10, shared=8)
    assert prefilled(places, first) == ["0"]
    first.accept(messages.Token(0, 1, 0, 40))  # it is computed: nothing waits
    # Each has 7 tokens to compute at prefill-0, and 39 at the other one: so many wait as that is worth.
    later = [request_of(1 + number, 1 + number, 10, shared=8) for number in range(8)]
    homes = prefilled(places, first, *later)[1:]
    assert homes[:5] == ["0"] * 5
    assert homes[5:] == ["1", "0", "1"]  # and the other one has what they share


def test_what_no_instance_keeps_is_not_waited_for() -> None:
    places = Places(instances("prefill-0", "prefill-1", "decode-0"), Setting("PD-Basic", 2, 1), 4, 1000)
    assert prefilled(places, *(request_of(number, number, 10, shared=8) for number in range(4))) == ["0", "1", "0", "1"]


@pytest.mark.parametrize(("blocks", "instance"), [(6, "0"), (30, "1")])
def test_a_session_leaves_only_where_it_would_wait_too_long(blocks: int, instance: str) -> None:
    places = Places(instances("prefill-0", "prefill-1", "decode-0"), PD_3, 4, 1000)
    assert prefilled(places, request_of(0, 0, 10)) == ["0"]
    busy = [request_of(1, 1, 4), request_of(2, 2, blocks)]
    assert prefilled(places, *busy) == ["1", "0"]  # the one before is over
    # To compute are 7 tokens at prefill-0, after those that wait there; and 43 at the other one, after 15.
    assert prefilled(places, *busy, request_of(3, 0, 11)) == ["1", "0", instance]


def test_what_an_instance_had_is_forgotten_when_it_is_lost() -> None:
    p0, p1, d0 = instances("prefill-0", "prefill-1", "decode-0")
    places = Places([p0, p1, d0], PD_3, 4, 1000)
    assert prefilled(places, request_of(0, 0, 10, shared=8)) == ["0"]
    assert prefilled(places, request_of(1, 1, 10, shared=8)) == ["0"]
    p0.joined = False
    assert prefilled(places, request_of(2, 2, 10, shared=8)) == ["1"]
    p0.joined, p0.joins = True, 1
    assert prefilled(places, request_of(3, 3, 10, shared=8)) == ["1"]  # the other one begins with nothing
    p1.joins = 1  # it was away and is back before anybody asked
    assert prefilled(places, request_of(4, 4, 10, shared=8)) == ["0"]  # neither has it


@pytest.mark.parametrize(("design", "instance"), [("PD-Caching-2", "1"), ("PD-Caching-3", "0")])
def test_answers_count_as_cached_where_prefill_has_them(design: str, instance: str) -> None:
    places = Places(instances("prefill-0", "prefill-1", "decode-0"), Setting(design, 2, 1), 4, 1000)
    first = request_of(0, 0, 5, new_tokens=22)
    places.begin([first])
    for position in range(22):
        first.accept(messages.Token(0, 1, position, 50))
    places.answered(first)
    # The same conversation, as another session, while 30 tokens wait at prefill-0.
    busy = Request(1, 0, np.concatenate([first.prompt, np.full(22, 60, np.int32)]), 1)
    assert prefilled(places, busy) == ["0"]
    again = Request(2, 2, np.concatenate([first.prompt, np.array(first.tokens, np.int32)]), 1)
    assert prefilled(places, busy, again) == ["0", instance]


def test_new_sessions_mind_what_one_instance_decodes_where_it_does_both() -> None:
    places = Places(instances("instance-0", "instance-1"), Setting("PD-CC", 2, 0), 4, 1000)
    first = request_of(0, 0, 10, shared=8, new_tokens=4)
    assert prefilled(places, first) == ["0"]
    first.accept(messages.Token(0, 1, 0, 40))
    assert prefilled(places, first, request_of(1, 1, 10, shared=8)) == ["0", "0"]  # 3 tokens are left: 30 of a prompt
    first.new_tokens = 40
    assert prefilled(places, first, request_of(2, 2, 10, shared=8)) == ["0", "1"]


def test_a_single_session_stays_when_an_instance_joins() -> None:
    p0, d0, d1 = instances("prefill-0", "decode-0", "decode-1")
    places = Places([p0, d0, d1], PD_3, 4, 100)
    d1.joined = False
    places.begin([request_of(0, 0, 3)])
    d1.joined, d1.joins = True, 1
    again = request_of(1, 0, 3)
    places.begin([again])
    assert again.decode is d0


def test_a_request_that_does_not_fit_waits_and_is_not_overtaken() -> None:
    one = instances("instance-0")
    places = Places(one, Setting("PD-CC", 1, 0), 4, 10)
    requests = [request_of(0, 0, 6), request_of(1, 1, 5), request_of(2, 2, 1)]
    places.begin(requests)
    assert [request.prefill is None for request in requests] == [False, True, True]
    places.begin(requests[1:])  # the first is over
    assert [request.prefill is None for request in requests] == [False, False, False]


def test_only_a_silent_instance_with_work_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[str] = []
    monkeypatch.setattr(Instance, "kill", lambda instance: killed.append(instance.name))

    async def test() -> None:
        plan = Plan(Setting("PD-Basic", 1, 1), "local://never-joined", LlamaConfig(), 0, 16, 3.0)
        fleet = Fleet(plan, None, patience_s=20.0)  # type: ignore[arg-type]
        for one in fleet.instances.values():
            one.joined, one.heard = True, time.monotonic() - 100
        fleet.watch(lambda one: one.name == "decode-0")
        assert killed == ["decode-0"]
        fleet.watch(lambda one: True)  # prefill-0 had nothing to do until now
        assert killed == ["decode-0"]

    asyncio.run(test())


def test_a_request_waits_for_one_instance_at_a_time() -> None:
    p0, d0 = instances("prefill-0", "decode-0")
    request = request_of(0, 0, 1)
    assert not request.waits_for(p0)
    request.begin(p0, d0)
    assert [request.waits_for(p0), request.waits_for(d0)] == [True, False]
    request.accept(messages.Token(0, 1, 0, 40))
    assert [request.waits_for(p0), request.waits_for(d0)] == [False, True]
    request.begin(p0, d0)
    assert [request.waits_for(p0), request.waits_for(d0)] == [True, False]


def test_a_kill_is_reported_with_who_noticed_it_and_who_went_on() -> None:
    """Each of the others: its next token after the kill, and the one after it was told; and since when it had work."""

    async def events() -> list[Event]:
        plan = Plan(Setting("PD-Caching-3", 1, 2), "local://none", LlamaConfig(), 0, 64, 3.0)
        dispatcher = Dispatcher(plan, deadline_s=60.0, patience_s=60.0)  # nothing is started
        by_name = dispatcher._fleet.instances
        for instance in by_name.values():
            instance.joined, instance.joins = True, 1
        for number in range(2):
            dispatcher.ask(number, np.zeros(20, np.int32), 5)
        prefill, first, second = by_name.values()
        assert [request.decode for request in dispatcher._requests.values()] == [first, second]
        dispatcher.kill("decode-0")
        dispatcher.said(prefill, messages.Token(1, 1, 0, 40))
        dispatcher.said(prefill, messages.Noticed("decode-0"))
        dispatcher.said(second, messages.Token(1, 1, 0, 40))
        dispatcher.said(second, messages.Token(1, 1, 1, 41))
        dispatcher.said(prefill, messages.Token(0, 1, 0, 50))
        return dispatcher.events(0.0)

    killed, went_on, noticed, other, again = asyncio.run(events())
    assert (killed.instance, killed.kind) == ("decode-0", "killed")
    assert (noticed.instance, noticed.kind, noticed.peer) == ("prefill-0", "noticed", "decode-0")
    assert [(one.instance, one.kind) for one in (went_on, other, again)] == [
        ("prefill-0", "went_on"), ("decode-1", "went_on"), ("prefill-0", "went_on"),
    ]  # fmt: skip
    # Prefill has had both prompts since before the kill; decode had nothing until the first token was out.
    assert went_on.since_s is not None
    assert again.since_s is not None
    assert other.since_s is not None
    assert went_on.since_s <= again.since_s <= killed.at_s
    assert killed.at_s <= other.since_s <= noticed.at_s <= other.at_s


def test_no_instance_is_up() -> None:
    p0, d0 = instances("prefill-0", "decode-0")
    d0.joined = False
    places = Places([p0, d0], PD_3, 4, 10)
    request = request_of(0, 0, 1)
    places.begin([request])
    assert request.prefill is None


def test_a_layer_is_announced_when_its_kv_is_there(model: Llama, config: LlamaConfig) -> None:
    """And no later layer has begun: so it can be sent while the next one is computed."""
    blocks = torch.zeros(5, config.layers, 2, config.kv_heads, config.block_tokens, config.head_dim)
    seen = []

    def on_layer(layer: int) -> None:
        written = blocks[1:5].abs().sum(dim=(0, 2, 3, 4, 5)) > 0
        seen.append((layer, written.tolist(), blocks[1:5, layer].clone()))

    ids = torch.arange(1, 5)
    model.forward(torch.arange(14), PagedKV(blocks), ids, 0, on_layer)
    assert [layer for layer, _, _ in seen] == list(range(config.layers))
    for layer, written, content in seen:
        assert written == [other <= layer for other in range(config.layers)]
        assert torch.equal(content, blocks[1:5, layer])
