"""The demo: its prompts, what it measures, and that it runs as a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

import prompts  # noqa: E402
from comparison import curve_requests, serve_off_and_on, ttft_curve  # noqa: E402
from llama import BOS, Llama  # noqa: E402

if TYPE_CHECKING:
    from conftest import MakePool  # noqa: F401

EXAMPLES = Path(prompts.__file__).parent


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> prompts.Corpus:
    """The text that ships with the project, as on a machine without the archive."""
    monkeypatch.setenv("KVPOOL_TRACES", str(tmp_path))
    return prompts.load_corpus()


def test_the_shipped_text_has_four_agents_and_enough_questions(shipped: prompts.Corpus) -> None:
    assert [agent.style.name for agent in shipped.agents] == ["react", "act", "thought", "direct"]
    assert len({question.text for question in shipped.questions}) == len(shipped.questions) >= 40
    assert all(question.text.endswith(("?", ".")) and question.answer for question in shipped.questions)
    for agent in shipped.agents:
        assert agent.prefix.startswith(agent.style.instruction)
        assert agent.prefix.count("Question: ") >= 2
        assert 500 < len(agent.prefix.encode()) < 2200


def test_the_archive_is_used_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(os.environ.get("KVPOOL_TRACES") or EXAMPLES.parents[1] / "shared" / "traces")
    if not (folder / "react_hotpotqa.tar.xz").is_file():
        pytest.skip(f"no traces in {folder}; KVPOOL_TRACES names another folder")
    corpus = prompts.load_corpus()
    assert len(corpus.questions) == 7405
    assert all(500 < len(agent.prefix.encode()) < 2200 for agent in corpus.agents)


def test_a_later_turn_repeats_the_whole_conversation(shipped: prompts.Corpus) -> None:
    conversation = prompts.Conversation(shipped.agents[0], shipped.questions[0])
    first = conversation.prompt()
    conversation.answered([7, 8, 9])
    second = conversation.prompt()
    assert first[0] == BOS
    assert second[: len(first) + 3].tolist() == [*first.tolist(), 7, 8, 9]
    assert len(second) > len(first) + 3


@pytest.mark.parametrize("requests", [1, 7, 8, 100])
def test_the_schedule_depends_on_the_seed_alone(shipped: prompts.Corpus, requests: int) -> None:
    def names(seed: int) -> list[tuple[str, str]]:
        turns = prompts.schedule(shipped, requests, seed)
        return [(turn.agent.style.name, turn.question.text) for turn in turns]

    assert names(1) == names(1)
    assert len(names(1)) == requests
    assert names(1) != names(2)


def test_agents_of_one_kind_share_their_prefix_and_others_do_not(shipped: prompts.Corpus) -> None:
    turns = prompts.schedule(shipped, 20, seed=0)
    first, second, other = turns[0].prompt(), turns[1].prompt(), turns[4].prompt()
    prefix = len(turns[0].agent.prefix.encode())
    assert first[:prefix].tolist() == second[:prefix].tolist()
    assert first[:200].tolist() != other[:200].tolist()


def test_a_served_stream_is_compared_request_by_request(model: Llama, shipped: prompts.Corpus) -> None:
    turns = [
        prompts.Conversation(prompts.Agent(agent.style, agent.prefix[:60]), shipped.questions[number % 2])
        for number, agent in enumerate(shipped.agents * 3)
    ]
    seen = []
    result = serve_off_and_on(model, turns, 4, hbm_blocks=64, dram_blocks=64, progress=seen.append)
    assert seen == result.pairs
    assert len(result.pairs) == 12
    assert result.different == []
    assert result.logit_difference == 0.0
    assert result.margin > 0.0
    assert 0.0 < result.hit_ratio < 1.0
    assert result.generated_tokens == 48


def test_the_curve_has_a_point_for_each_length_and_share(model: Llama) -> None:
    lengths, calls = (32, 64), []
    points = ttft_curve(model, lengths, seed=0, progress=lambda: calls.append(1))
    assert len(calls) == curve_requests(lengths)
    assert [(point.prompt_tokens, point.cached_tokens) for point in points] == [
        *((32, cached) for cached in (0, 8, 16, 24, 28)),
        *((64, cached) for cached in (0, 16, 32, 48, 60)),
    ]
    assert all(point.ttft_s > 0 for point in points)


def run_demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KVPOOL_TRACES": str(folder), "COLUMNS": "100", "MPLCONFIGDIR": str(folder)}
    command = [sys.executable, str(EXAMPLES / "serve_with_cache.py"), *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, check=False, text=True, timeout=110
    )


@pytest.mark.usefixtures("rich")
def test_the_demo_prints_its_table_and_nothing_on_stderr(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--requests", "6", "--no-plot")
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("hit ratio", "TTFT p50", "TTFT p99", "swapped out", "evicted for good", "Same tokens", "bit for bit"):
        assert text in done.stdout


@pytest.mark.usefixtures("rich")
def test_the_demo_speaks_json(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--requests", "5", "--no-plot", "--json", "--seed", "3")
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    assert figures["same_tokens"] is True
    assert figures["logit_difference_max"] == 0.0
    assert figures["requests"] == 5
    assert figures["cached_tokens"] > figures["prompt_tokens"] / 2
    assert figures["curve"] == []


@pytest.mark.usefixtures("rich")
def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from comparison import CurvePoint
    from show import save_plot

    points = [CurvePoint(length, cached, 0.1) for length in (256, 512) for cached in (0, 128, 240)]
    save_plot(points, tmp_path / "deep" / "plot.png")
    assert (tmp_path / "deep" / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [("--requests", "0"), ("--requests", "-3"), ("--requests", "many")])
@pytest.mark.usefixtures("rich")
def test_a_wrong_argument_is_reported_and_nothing_runs(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run_demo(tmp_path, *arguments)
    assert done.returncode == 2
    assert "--requests" in done.stderr
    assert done.stdout == ""


@pytest.fixture
def rich() -> None:
    pytest.importorskip("rich")
