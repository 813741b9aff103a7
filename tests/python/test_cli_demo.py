"""`kvpool demo` and `kvpool bench`, which need nothing but the package; and Ctrl-C in commands."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kit import ctrl_c_works

from kvpool import cli
from kvpool.cli import info
from kvpool.cli.demo import answering, blas_threads, story


@pytest.fixture(autouse=True)
def _clean(clean_environment):
    pass


@pytest.fixture
def _path_of_children(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


@pytest.fixture
def _cold(monkeypatch):
    """Times are not looked at: most of the demo's computing is there to make them steady."""
    monkeypatch.setattr(answering.Engine, "warm", lambda engine: None)


@pytest.fixture(scope="module")
def printed():
    """What a demo and a bench print in an environment whose settings would spoil both, if they minded them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        for name, value in (("NAME", "x"), ("LEND_MAX", "0"), ("ROUTES", "loopback")):
            patch.setenv(f"KVPOOL_{name}", value)
        texts = {}
        for command in (["demo", "--prompts", "3"], ["bench", "--quick", "--json"]):
            with contextlib.redirect_stdout(io.StringIO()) as output:
                assert cli.main(command) == 0
            texts[command[0]] = output.getvalue()
    return texts


def test_the_demo_shows_what_the_cache_saves_in_two_processes(printed):
    rows = re.findall(r"^ +(\d+) +\d+ ms +(\d+) of 808 tokens +\d+ ms$", printed["demo"], re.MULTILINE)
    assert rows == [("1", "0"), ("2", "768"), ("3", "768")]
    assert "768 tokens were cached there, and the answers are the same" in printed["demo"]


def test_settings_of_the_environment_change_neither_demo_nor_bench(printed):
    assert "sent 3.0 MiB by the route shm" in printed["demo"]
    assert "to another process, shm" in printed["bench"]


def test_an_interpreter_in_a_folder_of_that_name_is_no_library(monkeypatch, tmp_path):
    """The interpreter's own file is mapped, too, and may not be loaded; a library may be gone that is still mapped."""
    files = [Path("/opt/openblas/bin/python3"), tmp_path / "libopenblas.so (deleted)"]
    maps = "".join(f"7f00-7f01 r-xp 00000000 00:00 1 {file}\n" for file in files)
    opened = []

    def no_library(file):
        opened.append(file)
        raise OSError("cannot dynamically load")

    monkeypatch.setattr(Path, "read_text", lambda self: maps)
    monkeypatch.setattr(blas_threads.ctypes, "CDLL", no_library)
    assert blas_threads._controls() == []
    assert opened == [str(files[1])]


@pytest.mark.usefixtures("_cold")
def test_the_demo_computes_with_one_thread_and_changes_nothing_for_others():
    controls = blas_threads._controls()
    if not controls:
        pytest.skip("NumPy has another BLAS")
    before = [control.read() for control in controls]
    during = []

    def stop_at_the_first_row(line):
        if line.split()[:1] == ["1"]:
            during.extend(control.read() for control in controls)
            raise InterruptedError

    try:
        for control in controls:
            control.set(2)
        with pytest.raises(InterruptedError):
            story.run(stop_at_the_first_row, 2)
        assert during == [1] * len(controls)
        assert [control.read() for control in controls] == [2] * len(controls)
    finally:
        for control, threads in zip(controls, before, strict=True):
            control.set(threads)


@pytest.mark.usefixtures("_cold")
def test_the_demo_refuses_an_answer_that_the_cache_has_changed(monkeypatch):
    insert = answering.Pool.insert

    def corrupted(pool, tokens, addrs, *more, **options):
        pool.tensor().numpy()[answering.block_ids(addrs)] = np.float32(1)
        return insert(pool, tokens, addrs, *more, **options)

    monkeypatch.setattr(answering.Pool, "insert", corrupted)
    with pytest.raises(story.StateError, match="prompt 2"):
        story.run(lambda line: None, 2)


@pytest.mark.usefixtures("_cold", "_path_of_children")
def test_the_demo_says_why_the_second_process_failed(monkeypatch):
    monkeypatch.setattr(story, "_module", "kvpool.cli.demo.nowhere")
    with pytest.raises(story.StateError, match=r"kvpool\.cli\.demo\.nowhere"):
        story.run(lambda line: None, 1)


def test_the_demo_says_sooner_only_when_it_is():
    assert answering.times_sooner(4.0) == "4.0 times sooner"
    assert answering.times_sooner(0.5).startswith("2.0 times later")


def test_the_demo_imports_no_torch():
    code = "import sys, kvpool.cli.demo, kvpool.cli.quick_bench; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


@pytest.mark.parametrize("count", ["0", "1", "-1", "x", "1001"])
def test_the_demo_wants_a_number_of_prompts(count, capsys):
    with pytest.raises(SystemExit):
        cli.main(["demo", "--prompts", count])
    assert "a number from 2 to 1000" in capsys.readouterr().err


def test_bench_measures_blocks_prompts_copies_and_transfer(printed):
    rows = json.loads(printed["bench"])
    assert [row["what"].split(" ")[0] for row in rows] == [
        "alloc", "free", "match", "insert", "swap_out", "transfer", "transfer"
    ]  # fmt: skip
    assert all(row["median_us"] > 0 for row in rows)
    assert [row["of_memcpy"] is not None for row in rows] == [False] * 4 + [True] * 3
    assert rows[-1]["what"].endswith("shm")


@pytest.mark.usefixtures("_path_of_children")
@pytest.mark.parametrize(
    "command", [["demo", "--prompts", "1000"], ["sim", "--requests", "2000000"]], ids=["demo", "sim"]
)
def test_ctrl_c_ends_a_command_in_one_line(command):
    with ctrl_c_works():
        run = subprocess.Popen(
            [sys.executable, "-c", f"from kvpool import cli; print('x', flush=True); exit(cli.main({command}))"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    try:
        assert run.stdout.readline() == "x\n"
        if command[0] == "demo":
            run.stdout.readline()
        else:
            with pytest.raises(subprocess.TimeoutExpired):  # it is at work
                run.wait(0.5)
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=60)
        assert run.returncode == 130
        assert errors.splitlines()[-1] == "kvpool: interrupted"
        assert "Traceback" not in errors
    finally:
        run.kill()
        run.communicate()


def test_a_closed_pipe_is_no_error():
    run = subprocess.run(
        f"{sys.executable} -m kvpool info | head -n 1 >/dev/null; echo ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert run.stdout == "0\n"
    assert run.stderr == ""


def kvpool_in_bash(line):
    """Runs a line of bash in which $KVPOOL is the command."""
    return subprocess.run(
        line.replace("$KVPOOL", f"{sys.executable} -m kvpool"), shell=True, executable="/bin/bash",
        capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip


@pytest.mark.parametrize("arguments", ["info", "info --json"])
@pytest.mark.parametrize(("output", "why"), [(">&-", "it is closed"), (">/dev/full", "No space left on device")])
def test_output_that_cannot_be_written_is_reported_in_one_line(arguments, output, why):
    run = kvpool_in_bash(f"$KVPOOL {arguments} {output}")
    assert run.returncode == 2
    assert run.stderr.startswith("kvpool: standard output cannot be written: ")
    assert run.stderr.endswith(f"{why}\n")
    assert run.stderr.count("\n") == 1


def test_a_broken_pipe_that_is_not_the_output_s_is_an_error(monkeypatch, capsys):
    def broken(arguments):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(info, "_run", broken)
    assert cli.main(["info"]) == 2
    assert capsys.readouterr().err == "kvpool: Broken pipe\n"


def test_ctrl_c_while_a_command_is_imported_ends_it_in_one_line():
    code = """if True:
    import os, signal, sys
    from kvpool import cli

    class Finder:  # the first import of the simulator is when Ctrl-C is pressed
        def find_spec(self, name, *_):
            if name == "kvpool.cli.sim":
                os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert "kvpool.cli.sim" not in sys.modules
    sys.meta_path.insert(0, Finder())
    sys.exit(cli.main(["sim"]))
    """
    path = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert (run.returncode, run.stderr) == (130, "kvpool: interrupted\n")
