import importlib.util
import json
import subprocess
import sys

import pytest

import kvpool
from kvpool import cli


@pytest.fixture(autouse=True)
def _clean(clean_environment):
    pass


def test_info_shows_the_version_the_build_and_the_settings(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert kvpool.__version__ in text
    assert "copy_threads" in text
    assert "default" in text


def test_info_says_where_a_setting_came_from(capsys, monkeypatch):
    monkeypatch.setenv("KVPOOL_POLICY", "lfu")
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["version"] == kvpool.__version__
    assert facts["build"]["compiler"]
    assert facts["machine"]["memory_available_bytes"] > 0
    assert {"name": "policy", "value": "lfu", "source": "environment KVPOOL_POLICY"} in facts["settings"]


def test_info_says_how_a_disk_would_be_read_and_written(capsys):
    assert cli.main(["info", "--json"]) == 0
    disk = json.loads(capsys.readouterr().out)["disk"]
    assert disk["engine"] in ("io_uring", "threads")
    assert disk["error"] is None
    assert cli.main(["info"]) == 0
    assert f"{disk['engine']}, " in capsys.readouterr().out


def test_info_names_the_ucx_found_or_why_there_is_not_one(capsys, monkeypatch):
    monkeypatch.setenv("KVPOOL_UCX", "/nowhere")
    run = subprocess.run([sys.executable, "-m", "kvpool", "info"], capture_output=True, text=True, check=True)
    assert "/nowhere" in run.stdout
    assert "kvpool[ucx]" in run.stdout
    monkeypatch.delenv("KVPOOL_UCX")
    run = subprocess.run([sys.executable, "-m", "kvpool", "info", "--json"], capture_output=True, text=True, check=True)
    ucx = json.loads(run.stdout)["ucx"]
    assert ucx["setting"] == "wheel"
    if importlib.util.find_spec("libucx") is None:
        assert ucx["library"] is None
        assert ucx["error"]
    else:
        assert "libucp.so" in ucx["library"]
        assert ucx["error"] is None
        assert all("/" in lane for lane in ucx["lanes"])
        assert ucx["lanes"]
    assert cli.main(["info"]) == 0
    assert (ucx["library"] or ucx["error"]).removeprefix("UCX ") in capsys.readouterr().out


def test_a_bad_setting_is_one_line_and_status_2(capsys, monkeypatch):
    monkeypatch.setenv("KVPOOL_POLICY", "mru")
    assert cli.main(["info"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvpool: settings: environment KVPOOL_POLICY")
    assert captured.err.count("\n") == 1


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"kvpool {kvpool.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["info", "--nonsense"]])
def test_a_wrong_command_line_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    assert "usage: kvpool" in capsys.readouterr().err


def test_python_m_kvpool_is_the_same_command():
    run = subprocess.run([sys.executable, "-m", "kvpool", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout == f"kvpool {kvpool.__version__}\n"
