"""Engines of vLLM for tests: each is a process in vLLM's own environment, and serves as many checks as it can."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
PYTHON = Path(os.environ.get("KVPOOL_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
VLLM = forked.Parent(str(PYTHON), "preloaded", flags=("-X", "faulthandler"))
BEGIN = "import os; os.setsid(); os.chdir({folder!r}); import driver; driver.main()"
BLOCK = 32  # the smallest that vLLM has on a CPU


def needs_vllm() -> None:
    """Skips where vLLM is not installed; continuous integration counts that as a failure."""
    if not list(PYTHON.parents[1].glob("lib/python*/site-packages/vllm")):
        pytest.skip(f"vLLM is not installed in {PYTHON}: make test-engines installs it")


def declared_entry_point() -> tuple[str, str]:
    """A group of pyproject.toml, and the lines of it, as an installed package has them."""
    section = re.search(
        r'^\[project\.entry-points\."([^"]+)"\]\n((?:.+\n)+)', (ROOT / "pyproject.toml").read_text(), re.M
    )
    assert section
    return section[1], section[2].replace('"', "")


def installed(folder: Path) -> Path:
    """What an installation of kvpool tells vLLM, and a plugin of the tests: see yielding.py."""
    group, lines = declared_entry_point()
    info = folder / "kvpool-0.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpool\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}yielding = yielding:register\n")
    return folder


def environment_of(folder: Path, own_process: bool = False) -> dict[str, str]:
    """The environment of a process of vLLM."""
    paths = [str(ROOT / "src"), str(ROOT), str(HERE), str(installed(folder / "site"))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "KVPOOL_"))}
    return environment | {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if own_process else "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the tests send functions to the engine's process
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",  # threads that spin take the processors of the other workers
        "TORCHDYNAMO_DISABLE": "1",  # a compiler that runs for seconds, for two functions of vLLM's sampler
        "XDG_CONFIG_HOME": str(folder / "no-config"),
    }


class Engine:
    """A process with an engine, or with none before `start`."""

    workers = 1

    def __init__(self, folder: Path, own_process: bool = False):
        self.model = str(folder / "model")
        self.errors = folder / f"stderr-{os.getpid()}-{id(self):x}.txt"
        environment = environment_of(folder, own_process)
        self.environment = environment
        orders, stdin = os.pipe()
        stdout, answers = os.pipe()
        with self.errors.open("w") as errors:
            self.process = forked.start(
                BEGIN.format(folder=str(folder)), environment=environment, parent=VLLM,
                files=[orders, answers, errors.fileno()],
            )  # fmt: skip
        os.close(orders)
        os.close(answers)
        self._stdin = os.fdopen(stdin, "w")
        self._stdout = os.fdopen(stdout)

    def __call__(self, do: str, *arguments: Any, **named: Any) -> dict:
        """Raises AssertionError with the end of the process's log if it could not be done."""
        told = self.attempt(do, *arguments, **named)
        assert "error" not in told, f"{told['error']}: {told['text']}\n{self.log()}"
        return told

    def attempt(self, do: str, *arguments: Any, **named: Any) -> dict:
        self._stdin.write(json.dumps({"do": do, "with": arguments, **named}) + "\n")
        self._stdin.flush()
        line = self._stdout.readline()
        assert line, f"the process of the engine has ended\n{self.log()}"
        return json.loads(line)

    def inside(self, what: str, *arguments: Any) -> Any:
        return self("inside", what, *arguments)["told"]

    def in_workers(self, what: str, *arguments: Any) -> list:
        """What each worker answers."""
        told = self.inside(what, *arguments)
        return told if self.workers > 1 else [told]

    def ask(self, tokens: list[int], **how: Any) -> dict:
        return self("generate", [{"tokens": tokens, **how}])["outputs"][0]

    def forget(self) -> None:
        """vLLM forgets what it has cached; kvpool keeps what it has saved."""
        self.inside("await_saves")
        assert self("reset")["ok"]

    def log(self) -> str:
        return self.errors.read_text(errors="replace")[-6000:]

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed, and a request of it was not written
            self._stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(ProcessLookupError):  # vLLM's own processes outlive the one that started them
            os.killpg(self.process.pid, signal.SIGKILL)
        self._stdout.close()


@contextlib.contextmanager
def serving(folder: Path, *, own_process: bool = False, **start: Any) -> Iterator[Engine]:
    """An engine that has started; `start` is for vLLM, but for `extra`, which is for the connector."""
    needs_vllm()
    engine = Engine(folder, own_process)
    try:
        engine("start", model=engine.model, **start)
        engine.workers = start.get("tensor_parallel_size", 1)
        yield engine
    finally:
        engine.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(at * at * 7 + at * 13 + 3 + seed * 31) % 500 + 3 for at in range(length)]


def same(one: dict, other: dict) -> bool:
    """Tokens and log-probabilities, to the last bit."""
    return one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"]
