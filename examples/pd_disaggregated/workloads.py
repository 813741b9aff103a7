"""The requests to the instances: the three workloads of MemServe §8.2 (Table 7, Fig 7), cut to a small model.

    workload   what a session is                              every prompt holds          lengths
    chat       one conversation of five turns                 all that was said before    azure2023_conv
    documents  five questions on a document of 1,000 tokens   the document                LooGLE's, as the paper cuts it
    react      an agent that thinks, acts and observes        all that was said before    ReAct on HotpotQA

A workload is made from its seed and comes out the same every time. Sessions begin as a Poisson process; within a
session a turn is asked when the one before it was answered. The model's context has 4,096 tokens and a token is a byte,
so the lengths of turns and answers are a quarter of what was recorded (SCALE). Prefixes keep their length: they
are what caching is about.

The recorded lengths are read from the folder of public traces (docs/traces.md) where it is. Elsewhere those of chat are
drawn from the trace's percentiles, which are in examples/data, and those of react by the means of its trace.
`Workload.source` says which.
"""

from __future__ import annotations

import itertools
import json
import lzma
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llama import BOS, encode
from prompts import load_corpus

from kvpool.sim import workload as recorded
from pd_disaggregated.records import Session, Tokens, Turn

SCALE = 4
CONTEXT_TOKENS_MAX = 4096

_CHAT_TURNS = 5
_CHAT_TOKENS_MAX = 1536  # of a conversation before its last answer: beyond it one session takes as long as ten others
_ADDED_TOKENS_MIN = 16
_ANSWER_TOKENS_MIN = 2  # fewer, and there is no second token to wait for

_DOCUMENT_TOKENS = 1000
_QUESTIONS = 5
_QUESTION_TOKENS = 24
_ANSWER_TOKENS = 20

_CHAT_TRACE = "azure2023_conv.csv.xz"
_REACT_TRACE = "derived_react_hotpotqa_blk16.jsonl.xz"
_CHAT_PERCENTILES = Path(__file__).parents[1] / "data" / "azure2023_conv_percentiles.csv"
# Of the ReAct trace: how many sessions have so many turns, and the mean lengths of an answer and of an observation.
_REACT_TURNS = {2: 35, 3: 294, 4: 72, 5: 39, 6: 72}
_REACT_ANSWER_TOKENS = 43
_REACT_OBSERVATION_TOKENS = 190


@dataclass(frozen=True)
class Workload:
    """Sessions, and where their lengths come from.

    Attributes:
        name: One of `WORKLOADS`.
        source: For people.
        sessions: In the order of their arrival.
    """

    name: str
    source: str
    sessions: tuple[Session, ...]

    @property
    def requests(self) -> int:
        """Turns of all sessions."""
        return sum(len(session.turns) for session in self.sessions)


def make(name: str, sessions: int, requests_per_s: float, seed: int = 0) -> Workload:
    """A workload by its name.

    Args:
        name: One of `WORKLOADS`.
        sessions: How many; 1 or more.
        requests_per_s: Of all instances together, above 0: sessions arrive at this rate divided by their mean number
            of turns. It is what is offered; instances that are slower than that answer fewer.
        seed: Of everything. The sessions' texts do not depend on the rate, only their arrivals do.

    Raises:
        ValueError: An argument is invalid.
    """
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}: there are {', '.join(WORKLOADS)}")
    if sessions < 1 or not requests_per_s > 0:
        raise ValueError(f"{sessions} sessions at {requests_per_s} requests/s: at least 1, and above 0")
    source, scripts = WORKLOADS[name](sessions, np.random.default_rng([seed, 0]))
    turns = sum(len(script.turns) for script in scripts) / sessions
    gaps = np.random.default_rng([seed, 1]).exponential(turns / requests_per_s, sessions)
    arrivals = np.cumsum(gaps) - gaps[0]  # nobody learns anything from a wait before the first
    made = tuple(
        Session(number, float(arrival), script.prefix, script.turns, script.remembers)
        for number, (arrival, script) in enumerate(zip(arrivals, scripts, strict=True))
    )
    longest = max(map(prompt_tokens_max, made))
    if longest > CONTEXT_TOKENS_MAX:
        raise ValueError(f"a session of {name} needs {longest} tokens, the model has {CONTEXT_TOKENS_MAX}")
    return Workload(name, source, made)


def prompt_tokens_max(session: Session) -> int:
    """Tokens of the session's longest sequence: a prompt and what is generated after it."""
    said = longest = len(session.prefix)
    for turn in session.turns:
        end = said + len(turn.added) + turn.new_tokens
        longest = max(longest, end)
        if session.remembers:
            said = end
    return longest


# ---- the three


@dataclass(frozen=True)
class _Script:
    """A session before it has a time."""

    prefix: Tokens
    turns: tuple[Turn, ...]
    remembers: bool


def _chat(sessions: int, rng: np.random.Generator) -> tuple[str, list[_Script]]:
    """Conversations. A row of the trace is one request: its context is all that was said so far.

    So a conversation's length at its last turn is a recorded context, and its answers are recorded answers; what is
    left of the context is what the user said, in equal parts. Where that is nothing, the user still says a little.
    """
    path = _traces() / _CHAT_TRACE
    if path.is_file():
        rows = recorded.azure(path)
        source = "lengths of azure2023_conv (Azure, CC BY 4.0)"
        contexts = rng.choice([row.prompt for row in rows], sessions)
        answers = rng.choice([row.response for row in rows], (sessions, _CHAT_TURNS))
    else:
        source = "lengths drawn from the percentiles of azure2023_conv (Azure, CC BY 4.0)"
        percents, inputs, outputs = np.loadtxt(_CHAT_PERCENTILES, delimiter=",", skiprows=3).T
        contexts = np.interp(rng.uniform(0, 100, sessions), percents, inputs).astype(np.int64)
        answers = np.interp(rng.uniform(0, 100, (sessions, _CHAT_TURNS)), percents, outputs).astype(np.int64)
    contexts = np.minimum(contexts // SCALE, _CHAT_TOKENS_MAX)
    answers = np.maximum(answers // SCALE, _ANSWER_TOKENS_MIN)
    added = np.maximum((contexts - answers[:, :-1].sum(axis=1)) // _CHAT_TURNS, _ADDED_TOKENS_MIN)
    nothing = np.empty(0, np.int32)
    return source, [
        _Script(nothing, tuple(Turn(_text(rng, int(said)), int(answer)) for answer in row), remembers=True)
        for said, row in zip(added, answers, strict=True)
    ]


def _documents(sessions: int, rng: np.random.Generator) -> tuple[str, list[_Script]]:
    """Each question stands for itself behind the document: it does not see the questions before it."""
    scripts = []
    for _ in range(sessions):
        document = np.concatenate([np.array([BOS], np.int32), _text(rng, _DOCUMENT_TOKENS - 1)])
        turns = tuple(
            Turn(_text(rng, _about(_QUESTION_TOKENS, rng)), _about(_ANSWER_TOKENS, rng)) for _ in range(_QUESTIONS)
        )
        scripts.append(_Script(document, turns, remembers=False))
    return f"documents of {_DOCUMENT_TOKENS:,} tokens, {_QUESTIONS} questions each, as the paper cuts LooGLE", scripts


def _react(sessions: int, rng: np.random.Generator) -> tuple[str, list[_Script]]:
    """One agent for all: its instruction and examples stand before every prompt of every session."""
    corpus = load_corpus()
    agent = corpus.agents[0]
    prefix = np.array([BOS, *encode(agent.prefix)], np.int32)
    lengths, source = _react_lengths(sessions, rng)
    scripts = []
    numbers = itertools.cycle(rng.permutation(len(corpus.questions)))  # nothing is asked twice before all was asked
    for (observations, answers), number in zip(lengths, numbers, strict=False):
        question = np.array(encode(agent.style.ask.format(question=corpus.questions[number].text)), np.int32)
        added = [question, *(_text(rng, observation) for observation in observations)]
        scripts.append(_Script(prefix, tuple(map(Turn, added, answers)), remembers=True))
    return f"{corpus.source}; {source}", scripts


def _react_lengths(sessions: int, rng: np.random.Generator) -> tuple[list[tuple[list[int], list[int]]], str]:
    """For each session the tokens of its observations, and those of its answers, of which there is one more."""
    path = _traces() / _REACT_TRACE
    if path.is_file():
        recorded_sessions = _recorded_sessions(path)
        chosen = rng.integers(0, len(recorded_sessions), sessions)
        return [recorded_sessions[number] for number in chosen], "lengths of recorded ReAct sessions"
    counts = np.array(list(_REACT_TURNS.values()), np.float64)
    turns = rng.choice(list(_REACT_TURNS), sessions, p=counts / counts.sum())
    return [
        (
            [_about(_REACT_OBSERVATION_TOKENS // SCALE, rng) for _ in range(int(count) - 1)],
            [_about(_REACT_ANSWER_TOKENS // SCALE, rng) for _ in range(int(count))],
        )
        for count in turns
    ], "lengths drawn by the means of recorded ReAct sessions"


def _recorded_sessions(path: Path) -> list[tuple[list[int], list[int]]]:
    """A prompt of the trace holds the one before it and its answer; the rest is what was observed."""
    sessions: dict[int, list[tuple[int, int]]] = {}
    with lzma.open(path, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            sessions.setdefault(row["session"], []).append((row["input_length"], row["output_length"]))
    return [
        (
            [
                max((after - before - answer) // SCALE, _ADDED_TOKENS_MIN)
                for (before, answer), (after, _) in itertools.pairwise(turns)
            ],
            [max(answer // SCALE, _ANSWER_TOKENS_MIN) for _, answer in turns],
        )
        for turns in sessions.values()
    ]


# ---- small things


def _text(rng: np.random.Generator, tokens: int) -> Tokens:
    """The weights are random, so it does not matter what is said, only that nobody else said it."""
    return rng.integers(0, 256, tokens, dtype=np.int32)


def _about(mean: int, rng: np.random.Generator) -> int:
    return _ANSWER_TOKENS_MIN + int(rng.poisson(mean - _ANSWER_TOKENS_MIN))


def _traces() -> Path:
    return Path(os.environ.get("KVPOOL_TRACES") or Path(__file__).parents[3] / "shared" / "traces")


WORKLOADS: dict[str, Callable[[int, np.random.Generator], tuple[str, list[_Script]]]] = {
    "chat": _chat,
    "documents": _documents,
    "react": _react,
}
