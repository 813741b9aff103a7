"""Figures and promises of the PD example, from made-up runs with known results."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytest.importorskip("torch")

from pd_disaggregated import checks, deaths, metrics, report
from pd_disaggregated.records import Event, RunResult, Session, Setting, Turn
from pd_made_up import ANSWER, BLOCK, TOKEN_BYTES, conversation, made_up, measured

import kvpool

TWO_EACH = Setting("PD-Caching-3", 2, 2)


@pytest.fixture(autouse=True)
def no_traces(monkeypatch, tmp_path):
    """Lengths are drawn here, not read: that is quicker."""
    monkeypatch.setenv("KVPOOL_TRACES", str(tmp_path))


def of(found, words):
    """The one promise with these words."""
    (check,) = [check for check in found if all(word in check.what for word in words)]
    return check


# ---- figures


def test_times_are_taken_from_the_answers():
    sessions = [conversation(0, turns=1), conversation(1, turns=1)]
    result = made_up(Setting("PD-Basic", 1, 1), sessions, ttft_s=0.4, token_s=0.01)
    late = dataclasses.replace(result.answers[1], first_s=0.6, second_s=0.7, done_s=1.5)
    summary = metrics.summarize(dataclasses.replace(result, answers=[result.answers[0], late]), sessions)
    assert summary.ttft_s.mean == pytest.approx(0.5)
    assert summary.ttft_s.p50 == pytest.approx(0.5)
    assert summary.ttft_s.p99 == pytest.approx(0.598)
    assert summary.ttst_s.mean == pytest.approx((0.42 + 0.7) / 2)
    assert summary.jct_s.mean == pytest.approx((0.4 + 0.48 + 1.5) / 2)
    assert summary.tpot_s.mean == pytest.approx((0.48 + 0.9) / 2 / (ANSWER - 1))
    assert summary.kvpool_share == pytest.approx(0.004 / (0.88 + 1.5))


def test_an_answer_of_one_token_has_no_second_one():
    session = Session(0, 0.0, np.zeros(8, np.int32), (Turn(np.zeros(4, np.int32), 1),), True)
    result = made_up(Setting("PD", 1, 0), [session])
    answer = dataclasses.replace(result.answers[0], second_s=None)
    summary = metrics.summarize(dataclasses.replace(result, answers=[answer]), [session])
    assert summary.ttst_s is None
    assert summary.tpot_s is None
    assert "-" in report.setting_rows([measured()])[1][0] or summary.as_json()["tpot_s"] is None


@pytest.mark.parametrize("change", ["missing", "twice", "unknown", "nothing"])
def test_answers_to_other_questions_are_refused(change):
    sessions = [conversation(0), conversation(1)]
    result = made_up(Setting("PD", 1, 0), sessions)
    answers = {
        "missing": result.answers[1:],
        "twice": [*result.answers[1:], result.answers[-1]],
        "unknown": [*result.answers[1:], dataclasses.replace(result.answers[0], session=9)],
        "nothing": [],
    }[change]
    with pytest.raises(ValueError, match="are not those to 8 turns"):
        metrics.summarize(dataclasses.replace(result, answers=answers), sessions)


def test_an_empty_list_of_sessions_is_refused():
    with pytest.raises(ValueError, match="0 turns"):
        metrics.summarize(made_up(Setting("PD", 1, 0), []), [])


@pytest.mark.parametrize("design", ["PD-Caching-1", "PD-Caching-2", "PD-Caching-3"])
def test_hits_and_bytes_by_turn(design):
    """Prompts of 32, 112, 192 and 272 tokens; prefill finds the one before, with -3 its answer too, in whole blocks."""
    sessions = [conversation(0), conversation(1)]
    turns = metrics.summarize(made_up(Setting(design, 1, 1), sessions), sessions).turns
    assert [(turn.turn, turn.requests, turn.prompt_tokens) for turn in turns] == [
        (1, 2, 32), (2, 2, 112), (3, 2, 192), (4, 2, 272),
    ]  # fmt: skip
    found = [0, 64, 144, 224] if design == "PD-Caching-3" else [0, 32, 112, 192]
    assert [turn.hit_at_prefill * turn.prompt_tokens for turn in turns] == pytest.approx(found)
    held = [0, 0, 0, 0] if design == "PD-Caching-1" else [0, 64, 144, 224]
    assert [turn.bytes_to_decode / TOKEN_BYTES for turn in turns] == pytest.approx(
        [prompt - here for prompt, here in zip((32, 112, 192, 272), held, strict=True)]
    )


def test_tokens_computed_by_decode_and_by_prefill_are_counted_separately():
    """With -3 all that prefill finds of the answers came from decode; with -2 it has computed everything itself."""
    sessions = [conversation(0)]

    def decoded(design):
        result = made_up(Setting(design, 1, 1), sessions)
        return list(metrics.decoded_hits(result.answers, sessions).values())

    assert decoded("PD-Caching-2") == [0, 0, 0, 0]
    # 64 cached tokens of turn 2: 32 asked, 32 answered. The other 16 of the answer are computed then, and so on.
    assert decoded("PD-Caching-3") == [0, 32, 64, 96]


def test_a_retry_on_another_instance_finds_nothing_that_it_computed():
    """Another instance has not prefilled what this one has: a hit there came from elsewhere."""
    sessions = [conversation(0, turns=2)]
    first, second = made_up(Setting("PD-Caching-3", 1, 1), sessions).answers
    second = dataclasses.replace(second, cached_at_prefill=80, prefill="prefill-1")
    assert metrics.decoded_hits([first, second], sessions) == {(0, 0): 0, (0, 1): ANSWER}


def test_questions_on_a_document_reuse_no_answers():
    sessions = [conversation(0, remembers=False, prefix=160)]
    result = made_up(Setting("PD-Caching-3", 1, 1), sessions)
    assert set(metrics.decoded_hits(result.answers, sessions).values()) == {0}
    assert [answer.cached_at_prefill for answer in result.answers] == [0, 160, 160, 160]


# ---- kills


def played(*events, setting=TWO_EACH):
    """A run of these events: when, who, what, and what else an event has; all have joined before."""
    joined = [Event(-1.0, name, "joined") for name in setting.instances]
    return RunResult(setting, [], 9.0, {}, [*joined, *(Event(*event) for event in events)])


def test_after_a_kill_every_other_instance_is_told_and_goes_on():
    result = played(
        (2.0, "prefill-0", "killed"),
        (2.05, "decode-1", "went_on", "", 1.0),  # on its earlier work: it does not know yet
        (2.1, "decode-0", "noticed", "prefill-0"),
        (2.2, "prefill-1", "went_on", "", 1.5),  # it was never connected to the killed one
        (2.4, "decode-1", "noticed", "prefill-0"),
        (2.5, "decode-1", "went_on", "", 1.0),
        (2.8, "decode-0", "went_on", "", 1.0),
    )
    assert deaths.noticed_s(result) == pytest.approx([0.1, 0.4])
    assert deaths.silences_s(result) == pytest.approx([0.2, 0.8, 0.5])
    assert deaths.noticed_s(played()) == deaths.silences_s(played()) == []


def test_noticing_the_loss_of_another_peer_does_not_count_for_a_kill():
    result = played(
        (2.0, "prefill-0", "killed"),
        (2.1, "decode-0", "noticed", "decode-1"),
        (2.2, "decode-0", "went_on", "", 1.0),
        (3.0, "decode-0", "noticed", "prefill-0"),
        (3.5, "decode-0", "went_on", "", 1.0),
    )
    assert deaths.noticed_s(result) == pytest.approx([1.0])
    assert deaths.silences_s(result) == pytest.approx([1.5])


def test_an_idle_instance_is_not_slow():
    def silences(*events):
        return deaths.silences_s(played((2.0, "prefill-0", "killed"), *events))

    assert silences((7.0, "decode-0", "went_on", "", 6.5)) == pytest.approx([0.5])
    assert silences((7.0, "decode-0", "went_on", "", 0.5)) == pytest.approx([5.0])
    assert silences((7.0, "decode-0", "served", "", 6.0)) == pytest.approx([1.0])  # its first since it joined
    assert silences((3.0, "decode-0", "noticed", "prefill-0")) == []  # nothing was left to do


def test_only_a_live_instance_is_a_survivor():
    """The first one that is killed is not up when the second one is; the second one was, and had no time."""
    result = played(
        (2.0, "prefill-0", "killed"),
        (2.5, "decode-0", "killed"),
        (2.6, "prefill-0", "lost"),
        (3.0, "prefill-0", "joined"),
        (3.5, "prefill-0", "served", "", 3.1),
        (4.0, "decode-0", "joined"),
        (4.5, "decode-0", "noticed", "prefill-0"),  # of its next life
        (4.6, "decode-0", "served", "", 4.2),
        setting=Setting("PD-Caching-3", 1, 1),
    )
    assert deaths.noticed_s(result) == deaths.silences_s(result) == []
    assert deaths.returns_s(result) == pytest.approx([0.4, 0.4])


def test_a_return_counts_from_the_first_work():
    events = [
        (0.5, "prefill-0", "served", "", 0.1),
        (2.0, "prefill-0", "killed"),
        (2.1, "prefill-0", "lost"),
        (4.0, "prefill-0", "joined"),
    ]
    for since_s, waited_s in ((5.5, 0.5), (3.0, 2.0), (4.0, 2.0)):
        served = (6.0, "prefill-0", "served", "", since_s)
        assert deaths.returns_s(played(*events, served)) == pytest.approx([waited_s])
    assert deaths.returns_s(played(*events)) == []
    assert deaths.returns_s(played(*events[:2])) == []
    assert deaths.returns_s(played(*events, (5.0, "prefill-0", "killed"), (6.0, "prefill-0", "served", "", 4.0))) == []


def test_an_instance_that_ends_by_itself_is_told_from_a_killed_one():
    assert deaths.strays(played((2.0, "prefill-0", "killed"), (2.1, "prefill-0", "lost"))) == 0
    assert deaths.strays(played((2.0, "prefill-0", "killed"), (2.1, "decode-1", "lost"))) == 1
    back = ((2.0, "prefill-0", "killed"), (2.1, "prefill-0", "lost"), (3.0, "prefill-0", "joined"))
    assert deaths.strays(played(*back, (4.0, "prefill-0", "lost"))) == 1


# ---- promises


def test_a_study_as_designed_meets_every_promise():
    runs = [measured(design) for design in ("PD-Caching-1", "PD-Caching-2", "PD-Caching-3")]
    runs += [measured(design, "react") for design in ("PD", "PD-CC", "PD-Basic", "PD-Caching-3")]
    runs.append(measured(kill=(("prefill-0", 0.3), ("decode-0", 0.6))))
    found = checks.check(runs)
    assert [check.what for check in found if check.met is False] == []
    assert of(found, ["PD-Caching-3", "decode computed"]).value > 0
    assert of(found, ["PD-Caching-2", "decode computed"]).value == 0
    assert of(found, ["chat", "bytes"]).value == of(found, ["chat", "bytes"]).target > 0
    assert of(found, ["PD over", "react"]).value > 1.8
    assert of(found, ["joining"]).value == pytest.approx(0.6)
    assert of(found, ["next token"]).value == pytest.approx(0.3)
    assert of(found, ["tokens of one process"]).value == runs[-1].cell.made().requests


def test_broken_promises_are_seen():
    """Each change breaks one of them."""
    first, second, third = (measured(f"PD-Caching-{number}") for number in (1, 2, 3))

    def missed(words, *runs):
        found = [check.what for check in checks.check(runs) if check.met is False]
        return len(found) == 1 and words in found[0]

    def with_summary(run, **changes):
        return dataclasses.replace(run, summary=dataclasses.replace(run.summary, **changes))

    def with_turns(run, **changes):
        turns = run.summary.turns
        return with_summary(run, turns=(*turns[:-1], dataclasses.replace(turns[-1], **changes)))

    more = with_summary(second, bytes_to_decode=second.summary.bytes_to_decode + 1)
    assert missed("bytes to decode saved", first, more)
    assert missed("kvpool's share", with_summary(second, kvpool_share=0.031))
    assert missed("PD-Caching-2: found at prefill of what decode", with_turns(second, decoded_tokens=0.5))
    assert missed("PD-Caching-3: found at prefill of what decode", with_turns(third, decoded_tokens=0.0))
    assert missed("PD-Caching-3: prefill hit ratio in all", with_turns(third, hit_at_prefill=0.5))
    assert missed("answers that differ", third, dataclasses.replace(second, tokens={**second.tokens, (1, 2): (8,)}))
    assert missed("not compared", dataclasses.replace(second, verified=False))
    assert missed("neither free nor cached", dataclasses.replace(second, lost_blocks=1))
    assert missed("mean TTFT of PD over", measured("PD", "react"), measured("PD-CC", "react", ttft_s=5.0))


def test_damage_by_a_kill_is_seen():
    run = measured(kill=(("prefill-0", 0.5),))
    assert [check.what for check in checks.check([run]) if check.met is False] == []
    fewer = dataclasses.replace(run.summary, requests=run.summary.requests - 1)
    idle = dataclasses.replace(run.summary, retried=0)
    for words, changes in {
        "from joining": {"returns_s": (0.5, 2.1)},
        "have served": {"returns_s": ()},
        "is told": {"noticed_s": (0.1, 3.1)},
        "next token of another": {"silences_s": (0.1, 4.1)},
        "gave tokens": {"silences_s": ()},
        "instances killed": {"events": ()},
        "were not killed": {"strays": 1},
        "requests that ended": {"summary": fewer},
        "begun again": {"summary": idle},
        "audited": {"audited": 1},
    }.items():
        missed = [check.what for check in checks.check([dataclasses.replace(run, **changes)]) if check.met is False]
        assert len(missed) == 1
        assert words in missed[0]
    # These are seen of all runs, and of this one.
    for words, changes in {"requests that ended": {"verified": False}, "blocks lost": {"lost_blocks": 1}}.items():
        missed = [check.what for check in checks.check([dataclasses.replace(run, **changes)]) if check.met is False]
        assert len(missed) == 2
        assert words in missed[1]


def test_a_block_that_is_lost_counts():
    layout = kvpool.KVLayout(layers=1, kv_heads=1, head_dim=8, dtype="float32", block_tokens=BLOCK)
    with kvpool.Pool(layout, hbm_blocks=4) as pool:
        assert measured(audits={"prefill-0": pool.stats()}).lost_blocks == 0
        addrs = pool.alloc(1)
        assert measured(audits={"prefill-0": pool.stats()}).lost_blocks == 1
        pool.free(addrs)


def test_nothing_is_promised_without_a_comparison():
    assert checks.check([]) == []
    assert not any("bytes" in check.what or "TTFT" in check.what for check in checks.check([measured()]))
