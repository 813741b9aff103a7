"""`kvpool cluster` and `kvpool top`, with real members."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator

import pytest
from kit import ctrl_c_works, hang_ups_work, small_pool
from transfer.kit import eventually

import kvpool
from kvpool import cli
from kvpool.cli.rates import Rates

_numbers = itertools.count(1)


@pytest.fixture
def url() -> Iterator[str]:
    one = f"local://cli-{os.getpid()}-{next(_numbers)}"
    yield one
    kvpool.Cluster.forget(one)


@pytest.fixture
def members(url):
    with kvpool.Cluster.join(url) as one, kvpool.Cluster.join(url) as two, small_pool() as a, small_pool(16) as b:
        a.attach(one, name="first", role="prefill")
        b.attach(two, name="second", role="decode")
        b._attachment._registration.publish(state="draining")
        b.alloc(3)
        eventually(lambda: [(m.state, m.load.hbm_active) for m in one.members()] == [("up", 0), ("draining", 3)])
        yield


def test_cluster_lists_members_with_blocks_and_load(url, members, capsys):
    assert cli.main(["cluster", url]) == 0
    title, first, second = capsys.readouterr().out.splitlines()
    assert title.split()[:4] == ["member", "instance", "role", "state"]
    assert first.split()[0] == "first"
    assert first.split()[2:6] == ["prefill", "up", "8/0/0", "8"]
    assert second.split()[2:6] == ["decode", "draining", "13/3/0", "16"]


def test_cluster_prints_json(url, members, capsys):
    assert cli.main(["cluster", url, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["role"], one["hbm_blocks"], one["load"]["hbm_free"]) for one in facts] == [
        ("first", "prefill", 8, 8), ("second", "decode", 16, 13)
    ]  # fmt: skip
    assert all(one["layout"]["kv_heads"] == 2 and one["seen_for_s"] >= 0 for one in facts)


def test_an_empty_cluster_and_a_wrong_url_are_reported(url, capsys):
    assert cli.main(["cluster", url]) == 0
    assert "no members" in capsys.readouterr().out
    assert cli.main(["cluster", "ftp://x"]) == 2
    assert "ftp://x" in capsys.readouterr().err


@pytest.fixture(params=["nobody listens", "somebody listens and says nothing"])
def unreachable(request):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if request.param == "nobody listens":
            server.close()
        yield f"etcd://127.0.0.1:{port}/x"


@pytest.mark.parametrize("command", ["cluster", "top"])
def test_an_etcd_that_does_not_answer_is_reported_in_a_line(unreachable, command, capfd):
    if command == "top":
        pytest.importorskip("rich", reason="rich is not installed")
    assert cli.main([command, unreachable, "--timeout", "0.5"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("kvpool: cluster: etcd does not answer: 127.0.0.1:")
    assert all(thread.name != "kvpool-etcd" for thread in threading.enumerate())


def test_a_cluster_without_members_can_be_forgotten(url, capsys):
    name = url.removeprefix("local://")
    with kvpool.Cluster.join(url) as cluster:
        cluster.register(name="first", role="both", incarnation=1)
        assert cli.main(["cluster", "--forget", name]) == 2
        assert "live: first" in capsys.readouterr().err
    assert cli.main(["cluster", "--forget", name]) == 0
    assert capsys.readouterr().out == f"{name} is removed\n"
    assert cli.main(["cluster", "--forget", url]) == 0
    assert "no local cluster" in capsys.readouterr().out
    assert cli.main(["cluster", url, "--forget", name]) == 2
    assert cli.main(["cluster"]) == 2
    assert cli.main(["cluster", "--forget", "../x"]) == 2


def test_top_draws_once(url, members, capsys):
    pytest.importorskip("rich", reason="rich is not installed")
    assert cli.main(["top", url, "--once"]) == 0
    text = capsys.readouterr().out
    assert "2 members" in text
    assert "first" in text
    assert cli.main(["top", url, "--every", "0"]) == 2


@pytest.mark.parametrize(("width", "titles"), [(80, {"role", "state", "requests"}), (200, {"instance", "endpoints"})])
def test_top_shows_what_fits_the_terminal(url, members, capsys, monkeypatch, width, titles):
    pytest.importorskip("rich", reason="rich is not installed")
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(["top", url, "--once"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    assert titles <= set(text.split())
    assert {"first", "prefill", "8/0/0", "draining", "13/3/0"} <= set(text.split())
    assert "\u2026" not in text  # nothing is cut


@pytest.mark.parametrize("name", ["[/]", "[red]x[/red]", ":smile:", "na\u00efve \u65e5\u672c\u8a9e", "a/b/..", "%2e"])
def test_members_may_have_any_printable_name(url, capsys, name):
    pytest.importorskip("rich", reason="rich is not installed")
    with kvpool.Cluster.join(url) as cluster:
        cluster.register(name=name, role="both", incarnation=1)
        for command in (["cluster", url], ["top", url, "--once"]):
            assert cli.main(command) == 0
            assert name in capsys.readouterr().out
        assert cli.main(["cluster", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["name"] == name


def test_the_setting_secret_does_not_change_the_secret_of_a_local_cluster(url, capsys, monkeypatch):
    with kvpool.Cluster.join(url) as cluster:
        before = cluster.secret
    monkeypatch.setenv("KVPOOL_SECRET", "of something else")
    assert cli.main(["cluster", url]) == 0
    with kvpool.Cluster.join(url) as cluster:
        assert cluster.secret == before


@pytest.fixture
def drawing(url, members):
    """`kvpool top` in a terminal, when it has drawn three times; and our end of the terminal."""
    pytest.importorskip("rich", reason="rich is not installed")
    ours, theirs = pty.openpty()
    with ctrl_c_works(), hang_ups_work():
        run = subprocess.Popen(
            [sys.executable, "-m", "kvpool", "top", url, "--every", "0.05"],
            stdin=theirs, stdout=theirs, stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TERM": "xterm"},
        )  # fmt: skip
    os.close(theirs)
    try:
        drawn = b""
        while drawn.count(b"first") < 3:  # it draws again and again
            drawn += os.read(ours, 1 << 16)
        yield run, ours
    finally:
        run.kill()
        run.wait()
        run.stderr.close()
        os.close(ours)


def drained(terminal):
    with contextlib.suppress(OSError):  # the other end was closed
        while os.read(terminal, 1 << 16):
            pass


def test_top_goes_on_until_ctrl_c(drawing):
    run, terminal = drawing
    run.send_signal(signal.SIGINT)
    drained(terminal)
    assert run.wait(30) == 130
    assert run.stderr.read() == b"kvpool: interrupted\n"


def test_q_ends_top_and_the_terminal_is_as_before(drawing):
    run, terminal = drawing
    os.write(terminal, b"xq")
    drained(terminal)
    assert run.wait(30) == 0
    assert run.stderr.read() == b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_top_and_the_terminal_is_as_before(drawing, number):
    run, terminal = drawing
    assert not termios.tcgetattr(terminal)[3] & termios.ICANON  # top reads key by key
    run.send_signal(number)
    written = b""
    with contextlib.suppress(OSError):  # the other end was closed
        while more := os.read(terminal, 1 << 16):
            written += more
    assert run.wait(30) == 128 + number
    assert written.rfind(b"\x1b[?1049l") > written.rfind(b"\x1b[?1049h")  # left the alternate screen
    assert termios.tcgetattr(terminal)[3] & termios.ICANON
    assert run.stderr.read() == b""


@contextlib.contextmanager
def long_names(url):
    names = [f"vllm-decode-deployment-7d9f8b6c5d-with-more-of-it-{end}" for end in ("abcde", "fghij")]
    with contextlib.ExitStack() as stack:
        for number, name in enumerate(names, start=1):
            cluster = stack.enter_context(kvpool.Cluster.join(url))
            cluster.register(name=name, role="decode", incarnation=number, hbm_blocks=8)
        yield names


def test_long_names_cost_no_column_and_keep_their_ends(url, capsys, monkeypatch):
    pytest.importorskip("rich", reason="rich is not installed")
    monkeypatch.setenv("COLUMNS", "120")
    with long_names(url):
        assert cli.main(["top", url, "--once"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    assert {"DRAM", "of"} <= set(text.split())
    assert [line.split()[0][-6:] for line in text.splitlines() if "…" in line] == ["-abcde", "-fghij"]


def test_nothing_is_cut_in_a_pipe(url, capsys, monkeypatch):
    pytest.importorskip("rich", reason="rich is not installed")
    monkeypatch.delenv("COLUMNS", raising=False)
    with long_names(url) as names:
        assert cli.main(["top", url, "--once"]) == 0
    text = capsys.readouterr().out
    assert {*names, "instance", "endpoints"} <= set(text.split())


def test_top_shows_hit_ratio_and_rates(url, capsys, monkeypatch):
    pytest.importorskip("rich", reason="rich is not installed")
    monkeypatch.setenv("COLUMNS", "80")
    with kvpool.Cluster.join(url) as cluster:
        load = kvpool.Load(10**6, 10**5, 10**7, 10**6, 10**5, 10**7, 123456, requested_tokens=800, matched_tokens=200)
        long_name = "an-instance-with-a-name-that-is-far-longer-than-a-column"
        cluster.register(name=long_name, role="prefill", incarnation=1, hbm_blocks=1 << 24, load=load)
        assert cli.main(["top", url, "--once"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "25 %" in text
    assert {"hits", "tokens/s", "prefill", "up", "1000k/100k/10M", "123k"} <= set(text.split())
    assert "an-insta" in text


def test_rates_are_of_the_last_seconds():
    now = [100.0]
    rates = Rates(lambda: now[0])

    def member(tokens, name="a", incarnation=1):
        load = kvpool.Load(requested_tokens=tokens)
        return kvpool.Member(name=name, instance=1, incarnation=incarnation, role="both", load=load)

    rates.note([member(1000)])
    assert rates.of(member(1000)) is None
    for tokens in (1500, 2000, 2000, 2000, 2000, 2000, 2000, 2000):
        now[0] += 1
        rates.note([member(tokens)])
        if tokens == 1500:
            assert rates.of(member(tokens)) == 500
    assert rates.of(member(2000)) == 0  # nothing in five seconds
    rates.note([])
    assert rates.of(member(2000)) is None
    assert rates.of(member(0, incarnation=2)) is None


def test_top_without_rich_says_which_extra_to_install(url, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.live", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["top", url, "--once"]) == 2
    assert "kvpool[cli]" in capsys.readouterr().err
