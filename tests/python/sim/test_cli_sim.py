"""`kvpool sim`: what it prints and writes, and its errors."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from kvpool import cli
from kvpool.cli import sim_show

QUICK = ["sim", "--workload", "chat", "--requests", "120", "--gpus", "2", "--quiet"]


@pytest.fixture(autouse=True)
def _clean(clean_environment):
    pass


def asked(capsys, *arguments):
    """The JSON output of the command."""
    assert cli.main([*QUICK, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    """The one line that the command says."""
    assert cli.main([*QUICK, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvpool: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_the_output_is_a_table(capsys):
    assert cli.main(QUICK) == 0
    out = capsys.readouterr().out
    for text in ("chat", "keep-hits", "hits", "TTFT", "TPOT", "JCT", "llama-3-8b on A100-80GB"):
        assert text in out


def test_json_is_the_same_bytes_every_time(capsys, tmp_path):
    found = asked(capsys)
    run = found["runs"][0]
    assert run["requests"]["ended"] == run["requests"]["arrived"] == 120
    assert 0 < run["hit_ratio"] < 1
    assert 0 < run["ttft_s"]["p50"] <= run["ttft_s"]["p99"] <= run["jct_s"]["p99"]
    written = []
    for name in ("a", "b"):
        assert cli.main([*QUICK, "--out", str(tmp_path / name)]) == 0
        written.append((tmp_path / name / "sim.json").read_bytes())
    assert written[0] == written[1]
    assert json.loads(written[0]) == found
    assert (tmp_path / "a" / "sim.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_a_sweep_is_one_run_for_each_value(capsys):
    runs = asked(capsys, "--sweep", "dram=0,1,8", "--hbm-gb", "0.5")["runs"]
    assert [run["value"] for run in runs] == [0.0, 1.0, 8.0]
    assert runs[0]["hit_ratio_dram"] == 0
    assert runs[0]["hit_ratio"] <= runs[1]["hit_ratio"] <= runs[2]["hit_ratio"]
    runs = asked(capsys, "--sweep", "policy=least-load,longest-prefix")["runs"]
    assert [run["policy"] for run in runs] == ["least-load", "longest-prefix"]


def test_prompts_are_cut_into_chunks_unless_they_are_to_be_whole(capsys):
    """Chunks of long prompts make what decodes wait for less at a time, and first tokens come later."""
    long = ["--workload", "poisson", "--gpus", "1", "--rate", "0.5"]
    chunked = asked(capsys, *long, "--batch-tokens", "256")["runs"][0]
    whole = asked(capsys, *long, "--whole-prompts")["runs"][0]
    assert chunked["requests"]["ended"] == whole["requests"]["ended"] == 120
    assert chunked["ttft_s"]["mean"] > whole["ttft_s"]["mean"]
    assert chunked["events"] > whole["events"]


def test_a_trace_and_instances_apart(capsys, tmp_path):
    trace = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:15:{at % 60:02d}.5,{100 + at},{1 + at % 9}" for at in range(60)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    arguments = ["sim", "--trace", str(trace), "--prefill", "2", "--decode", "1", "--rate-scale", "2", "--quiet"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "3 (2P1D)" in out
    assert "nothing hits a cache" in out


def test_gpus_for_a_promise(capsys):
    found = asked(capsys, "--find-gpus", "--slo-ttft", "5")
    assert found["gpus_needed"] == 1
    assert found["runs"][0]["kept"] is True
    assert found["out_of_reach"] is None
    assert cli.main([*QUICK, "--find-gpus", "--slo-tpot", "1e-6"]) == 0
    assert (
        "No number of GPUs keeps TPOT of 1e-06 s for 0.99 of requests: a request that waits" in capsys.readouterr().out
    )
    crowded = ["--rate", "2000", "--model", "llama-2-13b", "--find-gpus", "--slo-ttft", "1", "--gpus-max", "1"]
    assert cli.main([*QUICK, *crowded]) == 0
    assert "1 GPUs do not keep TTFT" in capsys.readouterr().out


def test_refused_requests_break_the_promise_and_the_answer_says_so(capsys):
    assert cli.main([*QUICK, "--hbm-gb", "0.12", "--find-gpus", "--slo-ttft", "1000"]) == 0
    out = capsys.readouterr().out
    assert "No number of GPUs keeps TTFT of 1000 s" in out
    assert "requests need more KV than one instance has room for (0.12 GB)" in out


PACKED = ["sim", "--workload", "poisson", "--requests", "100", "--policy", "mell", "--hbm-gb", "2"]


def test_packing_reports_migrations_and_draws_gpus_over_time(capsys, tmp_path):
    assert cli.main([*PACKED, "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "migrations" in captured.out
    series = json.loads((tmp_path / "sim.json").read_text())["packed"]["gpus_over_time"]
    assert len(series["mean"]) == len(series["peak"]) == len(series["lower_bound"]) > 10
    assert (tmp_path / "sim.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_packing_reports_its_progress_unless_it_is_to_be_quiet(capsys, monkeypatch):
    monkeypatch.setattr(sim_show, "_LINE_EVERY_S", 0.0)
    assert cli.main(PACKED) == 0
    assert "mell: " in capsys.readouterr().err
    assert cli.main([*PACKED, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "useless",
    [
        ["--gpus", "8"],  # as it is without the option
        ["--prefill", "1", "--decode", "1"],
        ["--dram-gb", "0"],
        ["--link-gb-s", "10"],
        ["--fetch"],
        ["--learn", "response"],
        ["--ttl", "300"],
        ["--cap", "2"],
        ["--thrift", "0"],
        ["--batch-tokens", "8192"],
        ["--batch-requests", "256"],
        ["--whole-prompts"],
        ["--sweep", "dram=1"],
        ["--find-gpus"],
        ["--gpus-max", "4"],
        ["--slo-ttft", "1"],
        ["--slo-tpot", "1"],
        ["--slo-share", "0.9"],
    ],
)
def test_packing_refuses_options_that_it_cannot_use(capsys, useless):
    assert cli.main([*PACKED, *useless]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    for option in useless[::2]:
        assert option in captured.err
    for option in ("--gpus", "--fetch", "--slo-ttft"):
        assert (f"{option}," in captured.err or captured.err.endswith(f"{option}\n")) == (option in useless)


def test_a_limit_shows_the_share_of_requests_that_keep_it(capsys):
    found = asked(capsys, "--slo-ttft", "0.02", "--slo-tpot", "0.05")
    assert found["slo"] == {"ttft_s": 0.02, "tpot_s": 0.05, "share": 0.99}
    (run,) = found["runs"]
    assert run["within"]["tpot_s"] == 1
    assert 0 < run["within"]["ttft_s"] < 0.99
    assert run["ttft_s"]["p50"] <= 0.02 < run["ttft_s"]["p99"]
    assert run["kept"] is False
    assert asked(capsys, "--slo-ttft", "0.02", "--slo-share", "0.5")["runs"][0]["kept"] is True
    assert asked(capsys, "--slo-ttft", "0.02", "--sweep", "rate=1,2")["runs"][1]["within"].keys() == {"ttft_s"}
    plain = asked(capsys)
    assert plain["slo"] is None
    assert not {"kept", "within"} & plain["runs"][0].keys()
    assert cli.main([*QUICK, "--slo-ttft", "0.02"]) == 0
    out = capsys.readouterr().out
    assert "TTFT <= 0.02s" in out
    assert "not kept" in out


def test_the_routers_options_change_what_it_does(capsys):
    busy = ["--requests", "600", "--rate", "60", "--hbm-gb", "1.5", "--gpus", "4", "--model", "llama-2-13b"]
    plain, *others = (
        asked(capsys, *busy, *options)["runs"][0] for options in ([], ["--ttl", "0.5"], ["--thrift", "50"])
    )
    assert all(run["ttft_s"] != plain["ttft_s"] for run in others)
    same = asked(capsys, *busy, "--ttl", "300", "--cap", "1.2", "--thrift", "7")["runs"][0]
    assert same == plain


def test_the_table_has_utilisation_and_tokens_a_second(capsys):
    run = asked(capsys)["runs"][0]
    assert 0 < run["utilisation"] < 1
    assert run["tokens_per_s"] == pytest.approx(run["output_tokens"] / run["end_s"])
    assert cli.main(QUICK) == 0
    out = capsys.readouterr().out
    assert f"{run['utilisation']:.0%}" in out
    assert f"{run['tokens_per_s']:,.0f}" in out
    assert asked(capsys, "--skip", "60")["runs"][0]["tokens_per_s"] == run["tokens_per_s"]  # of all requests


def test_slack_trades_moves_for_gpus(capsys):
    packed = []
    for options in ([], ["--slack", "0.025"], ["--slack", "0"], ["--slack", "0.25"]):
        assert cli.main([*PACKED[:4], "2000", *PACKED[5:], "--rate", "20", "--json", "--quiet", *options]) == 0
        packed.append(json.loads(capsys.readouterr().out)["packed"])
    assert packed[0] == packed[1]
    moves = [each["moves_per_s"] for each in packed[1:]]
    assert moves[0] < moves[1]
    assert packed[3]["gpus"]["mean"] > packed[2]["gpus"]["mean"]
    assert cli.main([*PACKED, "--slack", "0.3"]) == 2
    assert "from 0 to 0.25" in capsys.readouterr().err


def test_a_block_size_that_contradicts_the_trace_and_a_byte_order_mark(capsys, tmp_path):
    rows = [{"timestamp": at, "input_length": 1024, "output_length": 2, "hash_ids": [1, at + 2]} for at in range(5)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\ufeff" + "\n".join(map(json.dumps, rows)))
    command = ["sim", "--trace", str(trace), "--quiet", "--gpus", "1"]
    assert cli.main([*command, "--block-tokens", "512"]) == 0
    capsys.readouterr()
    assert cli.main([*command, "--block-tokens", "16"]) == 2
    captured = capsys.readouterr()
    assert captured.err.endswith("row 1: 2 hash ids for 1024 tokens, which are 64 blocks of 16\n")
    assert captured.out == ""


def test_an_overloaded_cluster_and_refused_requests_are_reported(capsys):
    assert cli.main([*QUICK, "--rate", "1000", "--requests", "1500", "--gpus", "1", "--model", "llama-2-13b"]) == 0
    assert "overloaded" in capsys.readouterr().out
    assert cli.main([*QUICK, "--hbm-gb", "0.12"]) == 0
    assert "refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--prefill", "1"], "go together"),
        (["--sweep", "nonsense=1"], "--sweep"),
        (["--sweep", "dram"], "--sweep"),
        (["--sweep", "gpus=1,2", "--prefill", "1", "--decode", "1"], "is theirs"),
        (["--sweep", "dram=a"], "--sweep"),
        (["--sweep", "policy=random"], "policy 'random'"),
        (["--sweep", "dram=0,-1"], "dram_gb"),
        (["--find-gpus"], "promise"),
        (["--slo-share", "0.9"], "--slo-share"),
        (["--slo-ttft", "0"], "promised"),
        (["--slo-ttft", "1", "--gpus-max", "4"], "--gpus-max"),
        (["--find-gpus", "--slo-ttft", "1", "--gpus-max", "0"], "at most 0"),
        (["--find-gpus", "--slo-ttft", "1", "--sweep", "dram=1"], "exclude each other"),
        (["--policy", "mell", "--sweep", "dram=1"], "mell"),
        (["--model", "llama-3-70b"], "more GPUs"),
        (["--gpus", "3", "--tp", "2"], "do not divide"),
        (["--profile", "/nowhere/profile.json"], "--profile"),
        (["--rate", "0"], "rate"),
        (["--rate", "inf"], "rate"),
        (["--rate-scale", "inf"], "rate_scale"),
        (["--rate-scale", "nan"], "rate_scale"),
        (["--hbm-gb", "inf"], "hbm_gb"),
        (["--dram-gb", "inf"], "dram_gb"),
        (["--dram-gb", "nan"], "dram_gb"),
        (["--sweep", "dram=0,inf"], "dram_gb"),
        (["--link-gb-s", "inf"], "link_gb_s"),
        (["--seed", "-1"], "seed"),
        (["--sweep", "seed=0,-1"], "seed"),
        (["--prefill", "-1", "--decode", "1"], "prefill"),
        (["--prefill", "2", "--decode", "-1"], "decode"),
        (["--skip", "120"], "skip"),
        (["--block-tokens", "0"], "block"),
        (["--batch-requests", "0"], "batch_requests"),
        (["--batch-tokens", "255", "--batch-requests", "256"], "batch_requests"),
        (["--find-gpus", "--slo-ttft", "inf"], "promised"),
        (["--out", "/dev/null/x"], "--out"),
        (["--ttl", "-1"], "--ttl"),
        (["--ttl", "nan"], "--ttl"),
        (["--cap", "0.5"], "cap"),
        (["--cap", "nan"], "cap"),
        (["--thrift", "-1"], "thrift"),
        (["--thrift", "1", "--policy", "least-load"], "queue-plus-exec"),
        (["--slack", "0.1"], "--policy mell"),
        (["--slack", "0.1", "--policy", "best-fit"], "--policy mell"),
        (["--workload", "poisson", "--policy", "session-id"], "row 1 names no session"),
        (["--workload", "poisson", "--sweep", "policy=least-load,session-id"], "row 1 names no session"),
    ],
)
def test_a_wrong_question_is_one_line(capsys, arguments, text):
    assert text in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--skip", "5"], "skip is 5 of 5 requests"),
        (["--find-gpus", "--slo-ttft", "1", "--skip", "5"], "skip is 5 of 5 requests"),
        (["--find-gpus", "--slo-tpot", "1"], "no request was measured whose time"),
    ],
)
def test_a_question_that_a_trace_cannot_answer_is_one_line(capsys, tmp_path, arguments, text):
    trace = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:15:{at:02d}.5,100,1" for at in range(5)]  # answers of one token
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert cli.main(["sim", "--trace", str(trace), "--quiet", *arguments]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_file_that_is_no_trace_is_one_line(capsys, tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    assert cli.main(["sim", "--trace", str(tmp_path / "x.csv")]) == 2
    assert "no known format" in capsys.readouterr().err


def test_progress_goes_to_the_error_output_and_help_explains():
    arguments = [sys.executable, "-m", "kvpool", "sim", "--workload", "poisson", "--requests", "50", "--json"]
    run = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=100)
    json.loads(run.stdout)
    shown = subprocess.run([*arguments[:4], "--help"], capture_output=True, text=True, check=True, timeout=100).stdout
    shown = "".join(shown.split())  # lines are broken at hyphens too
    for text in ("--find-gpus", "--sweep", "queue-plus-exec", "examples:", "Mooncake"):
        assert text in shown


def test_plots_show_the_promise_leave_out_empty_panels_and_tell_curves_apart(capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    found = asked(capsys, "--sweep", "dram=0,0,0", "--slo-ttft", "0.5")
    figure = sim_show._figure(found)
    assert len(figure.axes) == 3
    curves = figure.axes[0].lines[:3]
    assert [list(one.get_ydata()) for one in curves] == [list(curves[0].get_ydata())] * 3  # they coincide
    assert len({one.get_linewidth() for one in curves}) == 3
    assert len({str(one._dash_pattern) for one in curves}) == 3
    assert 0.5 in {line.get_xdata()[0] for line in figure.axes[0].lines}
    assert 0.5 in {line.get_ydata()[0] for line in figure.axes[2].lines}
    assert [text.get_text() for text in figure.axes[1].get_legend().get_texts()] == ["HBM"]  # one curve, no DRAM
    without = asked(capsys, "--workload", "poisson", "--sweep", "rate=1,2")
    assert all(run["hit_ratio"] == 0 for run in without["runs"])
    figure = sim_show._figure(without)
    assert [panel.get_ylabel() for panel in figure.axes] == ["share of requests", "seconds"]
    assert not [line for line in figure.axes[0].lines if line.get_linestyle() == ":"]
