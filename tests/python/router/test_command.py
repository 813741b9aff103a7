"""`kvpool router` as a process: its options, its logs, its end."""

from __future__ import annotations

import argparse
import json
import logging
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from router.router_kit import PATIENCE_S, events, eventually, fakes, httpx

from kvpool import cli
from kvpool.cli import router as router_command
from kvpool.cli.options_file import Options
from kvpool.errors import ArgumentError

pytestmark = pytest.mark.timeout(600)  # it starts processes and waits for them
HOW_TO = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "router.md"

OPERATED = ("--admin-port", "0", "--admin-key", "the-operators")
KEY = {"authorization": "Bearer the-operators"}


@pytest.fixture(autouse=True)
def _loggers_as_before():
    loggers = [logging.getLogger(name) for name in ("kvpool.router", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen, str, str | None]]:
    """The process, and the addresses of its listeners by its first line."""
    with listening(*arguments) as (process, first):
        yield process, f"http://{first['public']}", first["admin"] and f"http://{first['admin']}"


@contextmanager
def listening(*arguments: str) -> Iterator[tuple[subprocess.Popen, dict[str, Any]]]:
    """The process, and its first line."""
    line = [sys.executable, "-m", "kvpool", "router", "--port", "0", *arguments]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    try:
        first = json.loads(process.stderr.readline())
        assert first["event"] == "listening"
        yield process, first
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        process.stderr.close()


def test_the_command_routes_and_ends_after_its_last_request():
    with (
        fakes("a") as one,
        command("--instances", f"a={one[0].spec.url}", "--health-interval", "0.2", *OPERATED) as running,
        httpx.Client(timeout=PATIENCE_S, trust_env=False) as client,
    ):
        process, url, admin = running
        assert url.startswith("http://127.0.0.1:")  # loopback, unless asked
        eventually(lambda: client.get(f"{url}/health").status_code == 200)
        assert client.get(f"{admin}/instances", headers=KEY).json()["instances"][0]["state"] == "healthy"
        fields = {"prompt": "x", "stream": True, "pieces": 10, "every_s": 0.1}
        with client.stream("POST", f"{url}/v1/completions", json=fields) as response:
            pieces = response.iter_text()
            text = next(pieces)
            process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        assert events(text)[-1] == "[DONE]"  # the stream was not cut
        lines = [json.loads(line) for line in process.stderr.read().splitlines()]
        assert process.wait(PATIENCE_S) == 0
    names = [line["event"] for line in lines]
    assert names[-1] == "stopped"
    assert "stopping" in names
    assert next(line for line in lines if line["event"] == "request")["outcome"] == "done"


def test_a_key_for_the_operator_is_made_in_a_file_that_is_removed_with_the_router(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KVPOOL_ROUTER_ADMIN_KEY", raising=False)
    with (
        fakes("a") as one,
        listening("--instances", f"a={one[0].spec.url}", "--admin-port", "0") as (process, first),
        httpx.Client(base_url=f"http://{first['admin']}", timeout=PATIENCE_S, trust_env=False) as client,
    ):
        file = Path(first["admin_key_file"])
        assert file.parent == tmp_path
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        key = file.read_text().strip()
        assert len(key) >= 32
        assert client.get("/instances").status_code == 401
        assert client.get("/instances", headers={"authorization": f"Bearer {key}"}).status_code == 200
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(PATIENCE_S) == 0
    assert key not in rest
    assert not list(tmp_path.iterdir())


def test_a_second_signal_ends_unfinished_requests():
    with (
        fakes("a") as one,
        command("--instances", f"a={one[0].spec.url}", "--health-interval", "0.2") as (process, url, _),
        httpx.Client(timeout=PATIENCE_S, trust_env=False) as client,
    ):
        eventually(lambda: client.get(f"{url}/health").status_code == 200)
        fields = {"prompt": "x", "stream": True, "pieces": 100_000, "every_s": 0.1}
        with client.stream("POST", f"{url}/v1/completions", json=fields) as response:
            next(response.iter_text())
            process.send_signal(signal.SIGTERM)
            assert json.loads(next(line for line in process.stderr if "stopping" in line))["signal"] == "SIGTERM"
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)
        eventually(lambda: one[0].abandoned == 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--instances", "x"], "must look like http://127.0.0.1:8001"),
        (["--instances", "http://127.0.0.1:1", "--policy", "best"], "there are keep-hits"),
        (["--instances", "http://127.0.0.1:1", "--profile", "/nowhere"], "No such file"),
        (["--instances", "http://127.0.0.1:1", "--tokenizer", "/nowhere"], "No such file"),
        (["--instances", "http://127.0.0.1:1", "--host", "203.0.113.1"], "cannot listen on 203.0.113.1"),
        (["--instances", ""], "no instance"),
    ],
)
def test_a_wrong_option_is_one_line_and_status_2(arguments, message, capsys):
    assert cli.main(["router", "--port", "0", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_port_in_use_is_reported(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["router", "--instances", "http://127.0.0.1:1", "--port", port]) == 2
    assert f"127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_without_its_packages_the_command_says_what_to_install(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("kvpool.control.router")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    assert cli.main(["router", "--instances", "http://127.0.0.1:1"]) == 2
    assert "pip install 'kvpool[router]'" in capsys.readouterr().err


def test_importing_the_command_imports_no_package_of_the_extra():
    code = "import sys, kvpool, kvpool.cli; print({'starlette', 'httpx', 'uvicorn', 'anyio'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def test_every_option_is_described():
    with pytest.raises(SystemExit):
        cli.main(["router", "--help"])
    described = set(re.findall(r"`(--[a-z-]+)", HOW_TO.read_text()))
    parser_options = set(re.findall(r"add\(\s*\"(--[a-z-]+)\"", Path(router_command.__file__).read_text())) | {
        "--config"
    }
    assert described >= parser_options
    assert described <= parser_options


# ---- the file of options


def parsed(tmp_path: Path, content: str, *arguments: str) -> argparse.Namespace:
    file = tmp_path / "router.toml"
    file.write_text(content)
    parser = argparse.ArgumentParser()
    options = Options(parser)
    add = options.add_to(parser)
    add("--port", type=int, default=8000)
    add("--cap", type=float, default=2.0)
    add("--tls-key", type=Path)
    add("--instances", default="")
    add("--log-level", default="info", choices=["info", "debug"])
    namespace = parser.parse_args(["--config", str(file), *arguments])
    options.read_file(namespace)
    return namespace


def test_flags_count_before_the_file_wherever_they_stand(tmp_path):
    said = (
        'port = 9000\ncap = 3\ntls-key = "/k"\nlog-level = "debug"\n[instances]\na = "http://h:1"\nb = "http://h:2"\n'
    )
    got = parsed(tmp_path, said, "--port", "8000")  # the default, and said
    assert (got.port, got.cap, got.tls_key, got.log_level) == (8000, 3.0, Path("/k"), "debug")
    assert got.instances == "a=http://h:1,b=http://h:2"
    assert parsed(tmp_path, 'instances = ["http://h:1", "http://h:2"]').instances == "http://h:1,http://h:2"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot = 1", "prot is no option"),
        ("config = 'x'", "config is no option"),
        ("port = 1.5", "without a fraction"),
        ("port = true", "must be a number"),
        ('cap = "2"', "must be a number"),
        ("tls-key = 7", "must be a text"),
        ('log-level = "loud"', "there are info, debug"),
        ("port = ", "router.toml"),
    ],
)
def test_a_wrong_file_says_where(tmp_path, content, message):
    with pytest.raises(ArgumentError, match=message) as error:
        parsed(tmp_path, content)
    assert "router.toml" in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    parser = argparse.ArgumentParser()
    options = Options(parser)
    with pytest.raises(ArgumentError, match="No such file"):
        options.read_file(parser.parse_args(["--config", str(tmp_path / "none.toml")]))


def test_the_command_reads_a_file_with_both_halves(tmp_path):
    with fakes("p1", "d1") as (prefill, decode):
        file = tmp_path / "router.toml"
        file.write_text(
            f'health-interval = 0.2\n[prefill]\np1 = "{prefill.spec.url}"\n[decode]\nd1 = "{decode.spec.url}"\n'
        )
        with command("--config", str(file)) as (_, url, _), httpx.Client(timeout=PATIENCE_S, trust_env=False) as client:
            eventually(lambda: client.get(f"{url}/health").json()["available"] == 2)
            answer = client.post(f"{url}/v1/completions", json={"prompt": "x"})
            assert answer.headers["x-kvpool-prefill"] == "p1"
            assert answer.json()["instance"] == "d1"
