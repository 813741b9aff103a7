"""The study of the PD example, its report and its command."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytest.importorskip("rich")

from pd_disaggregated import checks, plots, progress, report, study
from pd_made_up import made_up, measured
from rich.console import Console


@pytest.fixture(autouse=True)
def no_traces(monkeypatch, tmp_path):
    """Lengths are drawn here, not read: that is quicker."""
    monkeypatch.setenv("KVPOOL_TRACES", str(tmp_path))


# ---- the study


@pytest.mark.parametrize("size", ["quick", "standard", "long"])
def test_the_plan_compares_at_equal_numbers_of_instances(size):
    cells = study.plan(["chat", "react"], size=size)
    assert len(set(cells)) == len(cells)
    alone = [cell for cell in cells if not cell.kill]
    for workload in ("chat", "react"):
        for rate in {cell.rate for cell in alone if cell.workload == workload}:
            for count in {cell.instances for cell in alone}:
                settings = [
                    cell.setting
                    for cell in alone
                    if (cell.workload, cell.rate, cell.instances) == (workload, rate, count)
                ]
                if settings:
                    assert {True, False} == {setting.colocated for setting in settings}
    assert {cell.instances for cell in alone} == ({2} if size == "quick" else {2, 3})
    assert any(cell.kill for cell in cells)
    for cell in cells:
        assert {name for name, _ in cell.kill} <= set(cell.setting.instances)


def test_the_standard_study_can_show_everything_required():
    """Its settings; other tests check that the figures of such runs are right."""
    cells = study.plan(list(study.RATES), size="standard")
    ran = {(cell.workload, cell.rate, cell.setting) for cell in cells if not cell.kill}
    for workload, (_, middle, high) in study.RATES.items():
        for setting in study.TWO:  # hits by turn, bytes from design to design
            assert (workload, middle, setting) in ran
        if workload != "documents":  # TTFT with and without a cache, under more than one load
            assert {setting.design for name, rate, setting in ran if (name, rate) == (workload, high)} == {
                "PD", "PD-CC", "PD-Basic", "PD-Caching-3",
            }  # fmt: skip
    settings = {setting for _, _, setting in ran}
    assert {(one.prefill, one.decode) for one in settings} >= {(1, 1), (2, 1), (1, 2)}
    assert {one.strategy for one in settings} == {"by_layer", "by_request_agg"}
    (killed,) = [cell for cell in cells if cell.kill]
    assert {name.partition("-")[0] for name, _ in killed.kill} == {"prefill", "decode"}
    assert killed.rate > max(study.RATES[killed.workload])  # all are at work
    assert len(cells) * 4 < len(study.plan(list(study.RATES), size="long")) * 3


def test_all_settings_of_a_comparison_get_the_same_requests():
    colocated, split = (cell.made().sessions for cell in (measured("PD").cell, measured("PD-Basic").cell))
    for one, other in zip(colocated, split, strict=True):
        assert one.arrival_s == other.arrival_s
        assert [turn.added.tolist() for turn in one.turns] == [turn.added.tolist() for turn in other.turns]


def test_kills_come_after_a_share_of_the_tokens():
    orders = []

    def run(*given, kill=(), **options):
        orders.extend(kill)
        return made_up(*given, **options)

    cell = dataclasses.replace(measured().cell, kill=(("prefill-0", 0.0), ("decode-0", 0.5)))
    study.measure(cell, run)
    tokens = sum(turn.new_tokens for session in cell.made().sessions for turn in session.turns)
    assert [(order.instance, order.after_tokens) for order in orders] == [
        ("prefill-0", 1),
        ("decode-0", round(tokens / 2)),
    ]


# ---- the report


def test_the_report_holds_all_runs_and_promises(tmp_path):
    runs = [measured(design) for design in ("PD", "PD-Caching-1", "PD-Caching-2", "PD-Caching-3")]
    runs.append(measured(kill=(("prefill-0", 0.3),)))
    found = checks.check(runs)
    path = report.write(tmp_path / "new", runs, found, 12.0)
    text = path.read_text(encoding="utf-8")
    for run in runs:
        assert run.cell.setting.name in text
    for check in found:
        assert check.what in text
    assert "killed in the middle" in text
    assert "12.60 s | prefill-0 | gives its first token" in text
    assert "10.10 s | decode-0 | is told that prefill-0 is lost" in text
    content = json.loads((path.parent / "report.json").read_text(encoding="utf-8"))
    assert len(content["runs"]) == len(runs)
    assert [check["met"] for check in content["checks"]] == [check.met for check in found]
    for picture in content["pictures"]:
        assert f"({picture})" in text
        assert (path.parent / picture).read_bytes().startswith(b"\x89PNG")
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("| setting")}
    assert len(widths) == 1


def test_the_report_does_without_matplotlib(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    path = report.write(tmp_path, [measured()], [], 1.0)
    assert "](" not in path.read_text(encoding="utf-8")
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("value", [0.0, 0.002, 0.0999, 0.1, 2.5])
def test_times_are_shown_in_milliseconds(value):
    shown = report.setting_rows([measured(ttft_s=value)])[1][0][2]
    assert float(shown.replace(",", "")) == pytest.approx(1000 * measured(ttft_s=value).summary.ttft_s.mean, abs=0.5)


def test_the_header_says_the_unit_of_times():
    header, _ = report.setting_rows([measured()])
    assert [name for name in header if name.endswith(" ms")] == ["TTFT ms", "2nd token ms", "TPOT ms", "JCT ms"]


# ---- the command line


def test_without_a_terminal_progress_is_plain_lines(monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    out = io.StringIO()
    with progress.shown(Console(file=out, force_terminal=False), 9) as (name, answered):
        name("1/1 chat")
        assert out.getvalue() == "1/1 chat: starts (0 s)\n"
        for _ in range(6):
            answered(None)
            now += 2.0
        assert out.getvalue().splitlines()[1:] == ["1/1 chat: 4 of 9 requests answered (6 s)"]


@pytest.fixture
def command(monkeypatch):
    main = importlib.import_module("pd_disaggregated.__main__")
    return main.main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["run", "--design", "PD-Caching-4"], "invalid choice"),
        (["run", "--design", "PD", "--decode", "1"], "PD needs at least one instance that prefills and none"),
        (["run", "--prefill", "0"], "0 is not a positive whole number"),
        (["run", "--sessions", "some"], "some is not a positive whole number"),
        (["run", "--rate", "nan"], "nan is not a positive number"),
        (["run", "--rate", "fast"], "fast is not a positive number"),
        (["run", "--seed", "-1"], "-1 is not a whole number from 0"),
        (["all", "--seed", "-1"], "-1 is not a whole number from 0"),
        (["run", "--kill", "prefill-0"], "NAME@SHARE"),
        (["run", "--kill", "prefill-0@2"], "NAME@SHARE"),
        (["run", "--kill", "prefill-0@soon"], "prefill-0@soon is not NAME@SHARE"),
        (["run", "--kill", "prefill-1@0.5"], "the instances are prefill-0, decode-0"),
        (["all", "--workloads", "sharegpt"], "invalid choice"),
    ],
)
def test_a_mistake_is_explained(command, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        command(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_help_names_every_workload_and_design(command, capsys):
    from pd_disaggregated.records import DESIGNS
    from pd_disaggregated.workloads import WORKLOADS

    with pytest.raises(SystemExit) as ended:
        command(["run", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*DESIGNS, *WORKLOADS))


@pytest.fixture
def instances(monkeypatch):
    """Makes up runs; returns a dictionary through which a test changes them."""
    changes = {}
    dispatcher = importlib.import_module("pd_disaggregated.dispatcher")

    def run(*given, reference, **options):
        assert reference.config.tokens_max  # one for all runs
        return dataclasses.replace(made_up(*given, **options), **changes)

    monkeypatch.setattr(dispatcher, "run", run)
    return changes


def test_the_study_leaves_a_report(command, instances, tmp_path, capsys):
    assert command(["all", "--quick", "--workloads", "documents", "chat", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "missed" not in shown
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "## chat" in text
    assert "## documents" in text


def test_a_study_that_misses_something_says_so(command, instances, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "draw", lambda runs, folder: [])  # takes seconds, and was drawn above
    instances["verified"] = False
    assert command(["all", "--quick", "--workloads", "react", "--out", str(tmp_path)]) == 1
    assert "missed" in capsys.readouterr().out


def test_one_run_shows_its_figures(command, instances, capsys):
    assert command(["run", "--workload", "documents", "--kill", "prefill-0@0.5"]) == 0
    shown = capsys.readouterr().out
    assert "30 requests of 6 sessions" in shown
    assert all(name in shown for name in ("TTFT", "JCT", "hit P", "decoded", "killed", "of one process"))
    instances["verified"] = False
    assert command(["run"]) == 1


def test_every_figure_of_a_run_is_shown_on_a_narrow_terminal(command, monkeypatch, capsys):
    slow = measured(ttft_s=4321.0)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("pd_disaggregated.study.measure", lambda *_: slow)
    assert command(["run"]) == 0
    shown = capsys.readouterr().out
    header, (row,) = report.setting_rows([slow])
    assert set(header[2:]) <= set(re.split(r"\s{2,}|\n", shown))
    assert set(row[2:]) <= set(re.split(r"\s{2,}|\n", shown))


@pytest.mark.timeout(400)
def test_the_command_works_from_the_root_of_the_repository():
    """The only run here with real instances; what they do is tested in test_pd_designs.py and beside it."""
    run = [
        sys.executable,
        "-m",
        "examples.pd_disaggregated",
        "run",
        "--workload",
        "documents",
        "--sessions",
        "1",
        "--rate",
        "50",
    ]
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run(run, cwd=root, capture_output=True, text=True, timeout=360, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "0 blocks lost" in ended.stdout
