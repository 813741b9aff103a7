"""The workloads of the example: the same every time, within the model's context, as the paper describes them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

pytest.importorskip("torch")

from pd_disaggregated import workloads  # the examples import torch

from kvpool.sim import workload as recorded

NAMES = sorted(workloads.WORKLOADS)


@pytest.fixture(params=["traces", "no traces"])
def folder(request, monkeypatch, tmp_path):
    """The workloads with recorded lengths, where they are at hand, and with published ones."""
    if request.param == "traces":
        monkeypatch.setenv("KVPOOL_TRACES", str(request.getfixturevalue("traces")))
    else:
        monkeypatch.setenv("KVPOOL_TRACES", str(tmp_path))
    return request.param


def turns_of(sessions):
    """How many sessions have so many turns."""
    return Counter(len(session.turns) for session in sessions)


def flat(workload):
    return [
        (
            session.number,
            session.arrival_s,
            session.prefix.tolist(),
            session.remembers,
            [(turn.added.tolist(), turn.new_tokens) for turn in session.turns],
        )
        for session in workload.sessions
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_is_made_from_its_seed(name, folder):
    made = workloads.make(name, 6, 2.0, seed=3)
    assert flat(workloads.make(name, 6, 2.0, seed=3)) == flat(made)
    assert flat(workloads.make(name, 6, 2.0, seed=4)) != flat(made)


@pytest.mark.parametrize("name", NAMES)
def test_the_rate_changes_arrivals_and_nothing_else(name, folder):
    slow, fast = workloads.make(name, 12, 1.0), workloads.make(name, 12, 4.0)
    assert [row[2:] for row in flat(slow)] == [row[2:] for row in flat(fast)]
    arrivals = np.array([session.arrival_s for session in slow.sessions])
    assert arrivals[0] == 0
    assert (np.diff(arrivals) > 0).all()
    assert np.array([session.arrival_s for session in fast.sessions]) == pytest.approx(arrivals / 4)


@pytest.mark.parametrize("name", NAMES)
def test_sessions_arrive_at_the_rate_that_is_asked_for(name, folder):
    workload = workloads.make(name, 400, 3.0, seed=1)
    offered = workload.requests / workload.sessions[-1].arrival_s
    assert offered == pytest.approx(3.0, rel=0.2)  # four deviations of 400 exponential gaps
    gaps = np.diff([session.arrival_s for session in workload.sessions])
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.3)  # as exponential ones have it, and regular ones have not


@pytest.mark.parametrize("name", NAMES)
def test_all_sessions_fit_into_the_model(name, folder):
    from llama import VOCAB, LlamaConfig

    assert LlamaConfig().tokens_max == workloads.CONTEXT_TOKENS_MAX
    for session in workloads.make(name, 200, 1.0, seed=2).sessions:
        assert workloads.prompt_tokens_max(session) <= workloads.CONTEXT_TOKENS_MAX
        for text in (session.prefix, *(turn.added for turn in session.turns)):
            assert text.dtype == np.int32
            assert ((text >= 0) & (text < VOCAB)).all()
        assert all(len(turn.added) and turn.new_tokens >= 2 for turn in session.turns)


def test_a_conversation_has_five_turns_that_no_other_repeats(folder):
    sessions = workloads.make("chat", 20, 1.0).sessions
    assert turns_of(sessions) == {5: 20}
    assert all(session.remembers and not len(session.prefix) for session in sessions)
    assert len({session.turns[0].added[:16].tobytes() for session in sessions}) == 20


def test_a_document_has_five_questions_that_do_not_see_each_other(folder):
    sessions = workloads.make("documents", 20, 1.0).sessions
    assert turns_of(sessions) == {5: 20}
    assert {len(session.prefix) for session in sessions} == {1000}
    assert not any(session.remembers for session in sessions)
    assert len({session.prefix.tobytes() for session in sessions}) == 20


def test_agents_share_a_prefix_that_is_most_of_their_prompts(folder):
    sessions = workloads.make("react", 60, 1.0).sessions
    assert len({session.prefix.tobytes() for session in sessions}) == 1
    assert all(session.remembers for session in sessions)
    first = [len(session.prefix) / (len(session.prefix) + len(session.turns[0].added)) for session in sessions]
    assert min(first) > 0.7
    turns = turns_of(sessions)
    assert set(turns) <= {2, 3, 4, 5, 6}
    assert turns.most_common(1)[0][0] == 3


def test_lengths_follow_the_trace(traces, monkeypatch):
    """A quarter of what was recorded: the mean answer of azure2023_conv has 211 tokens, its mean context 1,155."""
    monkeypatch.setenv("KVPOOL_TRACES", str(traces))
    workload = workloads.make("chat", 2000, 1.0)
    assert "azure2023_conv (Azure" in workload.source
    answers = [turn.new_tokens for session in workload.sessions for turn in session.turns]
    assert np.mean(answers) == pytest.approx(211 / 4, rel=0.05)
    # Longer than the recorded context only where the answers alone are.
    ends = [workloads.prompt_tokens_max(session) - session.turns[-1].new_tokens for session in workload.sessions]
    assert 1155 / 4 < np.mean(ends) < 2 * 1155 / 4


def test_without_the_trace_lengths_come_from_its_percentiles(tmp_path, monkeypatch):
    """Its median answer has 129 tokens, a tenth have more than 424, none more than 1,000 (mean 211)."""
    monkeypatch.setenv("KVPOOL_TRACES", str(tmp_path))
    workload = workloads.make("chat", 2000, 1.0)
    assert "percentiles of azure2023_conv (Azure" in workload.source
    answers = [turn.new_tokens for session in workload.sessions for turn in session.turns]
    assert np.mean(answers) == pytest.approx(211 / 4, rel=0.05)
    assert np.percentile(answers, [50, 90]) == pytest.approx([129 / 4, 424 / 4], rel=0.05)
    assert max(answers) <= 1000 / 4
    ends = [workloads.prompt_tokens_max(session) - session.turns[-1].new_tokens for session in workload.sessions]
    assert 1155 / 4 < np.mean(ends) < 2 * 1155 / 4


def test_the_percentiles_are_those_of_the_trace(traces):
    rows = recorded.azure(traces / "azure2023_conv.csv.xz")
    percents, *columns = np.loadtxt(workloads._CHAT_PERCENTILES, delimiter=",", skiprows=3).T
    for column, lengths in zip(columns, ([row.prompt for row in rows], [row.response for row in rows]), strict=True):
        assert np.rint(np.percentile(lengths, percents)) == pytest.approx(column)


def test_the_longest_sequence_is_counted():
    chat = workloads.make("chat", 1, 1.0).sessions[0]
    assert workloads.prompt_tokens_max(chat) == sum(len(turn.added) + turn.new_tokens for turn in chat.turns)
    document = workloads.make("documents", 1, 1.0).sessions[0]
    assert workloads.prompt_tokens_max(document) == 1000 + max(
        len(turn.added) + turn.new_tokens for turn in document.turns
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sharegpt", 1, 1.0), "no workload 'sharegpt'"),
        (("chat", 0, 1.0), "0 sessions"),
        (("chat", 1, 0.0), "at 0.0 requests"),
        (("chat", 1, float("nan")), "at nan requests"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        workloads.make(*arguments)
