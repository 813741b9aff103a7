"""The prompts that the demo serves: agents that answer questions, each with a long prefix that all its requests share.

The text is the few-shot prompts of ReAct and the questions of HotpotQA when their archive is at hand: the file
`react_hotpotqa.tar.xz` in the folder that KVPOOL_TRACES names (by default ../shared/traces beside the repository).
Otherwise it is text of the same kind that ships in examples/data.
"""

from __future__ import annotations

import json
import os
import random
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
from llama import BOS, encode

_DATA = Path(__file__).parent / "data"
_ARCHIVE = "react_hotpotqa.tar.xz"
_EXAMPLES_BYTES_MAX = 1750  # few-shot examples of one agent; a byte is a token, and prefill takes time


@dataclass(frozen=True)
class Style:
    """A way of prompting: the agent's first instructions, how a question is put, how the next turn begins."""

    name: str
    instruction: str
    ask: str
    reply: str
    data_file: str
    react_key: str  # in the archive's prompts_naive.json


_STYLES = (
    Style(
        name="react",
        instruction="Solve a question answering task with interleaved Thought, Action and Observation steps. An Action "
        "is one of: Search[entity], which returns the first paragraph about the entity; Lookup[keyword], which "
        "returns the next sentence with the keyword; Finish[answer], which ends the task. Here are some examples.\n",
        ask="Question: {question}\nThought 1:",
        reply="\nObservation 1: {answer}\nThought 2:",
        data_file="react.txt",
        react_key="webthink_simple6",
    ),
    Style(
        name="act",
        instruction="Solve a question answering task with interleaved Action and Observation steps. An Action is one "
        "of: Search[entity], Lookup[keyword], Finish[answer]. Here are some examples.\n",
        ask="Question: {question}\nAction 1:",
        reply="\nObservation 1: {answer}\nAction 2:",
        data_file="act.txt",
        react_key="webact_simple6",
    ),
    Style(
        name="thought",
        instruction="Solve a question answering task. First think, then answer. Here are some examples.\n",
        ask="Question: {question}\nThought:",
        reply="\nThe right answer would have been: {answer}\nThought:",
        data_file="thought.txt",
        react_key="cotqa_simple6",
    ),
    Style(
        name="direct",
        instruction="Answer the question in a few words. Here are some examples.\n",
        ask="Question: {question}\nAnswer:",
        reply="\nThe right answer would have been: {answer}\nAnswer:",
        data_file="direct.txt",
        react_key="webqa_simple6",
    ),
)


@dataclass(frozen=True)
class Agent:
    """A style with its examples filled in."""

    style: Style
    prefix: str  # instruction and examples: the same in all requests of the agent


@dataclass(frozen=True)
class Question:
    """A question, and the answer that a tool or a user will give in the next turn."""

    text: str
    answer: str


@dataclass(frozen=True)
class Corpus:
    """All text of a run."""

    source: str  # for people
    agents: tuple[Agent, ...]
    questions: tuple[Question, ...]


@dataclass
class Conversation:
    """One question to one agent, over several turns. The prompt of a turn is all that was said before, and more."""

    agent: Agent
    question: Question
    history: list[int] = field(default_factory=list)  # tokens

    def prompt(self) -> npt.NDArray[np.int32]:
        """The next turn's prompt, which becomes part of the history."""
        if not self.history:
            text = self.agent.prefix + self.agent.style.ask.format(question=self.question.text)
            self.history = [BOS, *encode(text)]
        else:
            self.history += encode(self.agent.style.reply.format(answer=self.question.answer))
        return np.array(self.history, np.int32)

    def answered(self, generated: list[int]) -> None:
        self.history += generated


def load_corpus() -> Corpus:
    folder = Path(os.environ.get("KVPOOL_TRACES") or Path(__file__).parents[2] / "shared" / "traces")
    archive = folder / _ARCHIVE
    return _from_archive(archive) if archive.is_file() else _from_data()


def schedule(corpus: Corpus, requests: int, seed: int) -> list[Conversation]:
    """Who is served when: one entry a turn, `requests` in all.

    Traffic comes in waves: two conversations of one agent take two turns each, then another agent is in demand. So an
    agent's prefix is hot for a while, cools, and is wanted again.
    """
    rng = random.Random(seed)
    questions = rng.sample(corpus.questions, len(corpus.questions))
    agents = rng.sample(corpus.agents, len(corpus.agents))
    turns: list[Conversation] = []
    wave = 0
    while len(turns) < requests:
        agent = agents[wave % len(agents)]
        pair = [Conversation(agent, questions[(2 * wave + i) % len(questions)]) for i in range(2)]
        turns += [*pair, *pair]
        wave += 1
    return turns[:requests]


def _from_archive(archive: Path) -> Corpus:
    with tarfile.open(archive) as tar:
        few_shot = json.load(_member(tar, "react_hotpotqa/prompts/prompts_naive.json"))
        rows = json.load(_member(tar, "react_hotpotqa/hotpot_dev_v1_simplified.json"))
    return Corpus(
        source="ReAct few-shot prompts, HotpotQA questions",
        agents=tuple(_agent(style, few_shot[style.react_key]) for style in _STYLES),
        questions=tuple(Question(row["question"], row["answer"]) for row in rows),
    )


def _from_data() -> Corpus:
    lines = (_DATA / "questions.tsv").read_text(encoding="utf-8").splitlines()
    return Corpus(
        source="few-shot prompts and questions of examples/data",
        agents=tuple(_agent(style, (_DATA / style.data_file).read_text(encoding="utf-8")) for style in _STYLES),
        questions=tuple(Question(*line.split("\t")) for line in lines),
    )


def _member(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    file = tar.extractfile(name)
    if file is None:
        raise FileNotFoundError(f"{name} is a folder in {_ARCHIVE}")
    return file


def _agent(style: Style, few_shot: str) -> Agent:
    """Takes as many whole examples as fit, and at least one."""
    prefix, size = style.instruction, 0
    for example in few_shot.split("Question:")[1:]:
        text = f"Question:{example.rstrip()}\n"
        size += len(text.encode())
        if size > _EXAMPLES_BYTES_MAX and prefix != style.instruction:
            break
        prefix += text
    return Agent(style, prefix)
