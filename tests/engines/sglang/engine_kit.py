"""A real engine of SGLang on this CPU, in a process that is not the tests'."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def _other_models() -> str:
    """The modules of models that no test needs: importing them takes most of an engine's start."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations
    models = Path(package.submodule_search_locations[0]) / "srt" / "models"
    return ",".join(sorted(path.stem for path in models.glob("*.py") if path.stem != "llama"))


ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(map(str, (HERE / "cpu", HERE, ROOT / "src", ROOT))),
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than all that is computed here
    "HF_HUB_OFFLINE": "1",
    "SGLANG_DISABLED_MODEL_ARCHS": _other_models(),
}
CALL_SECONDS = 200.0


class Answer(NamedTuple):
    """Tokens, their log-probabilities, and how many tokens of the prompt were cached."""

    tokens: list[int]
    logprobs: list[float]
    cached: int


class Engine:
    """An engine with a linker.

    Args:
        folder: For the model and the engine's log.
        linker: Its class and module; None: SGLang's own cache alone.
        tp: How many ranks.
        **extra: ``linker_extra_config``.
    """

    def __init__(self, folder: Path, linker: tuple[str, str] | None, tp: int = 1, **extra: Any) -> None:
        self._log = folder / "engine.log"
        answers, theirs = os.pipe()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "sglang_driver.py"), str(theirs)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, pass_fds=[theirs], start_new_session=True,
                cwd=folder, env=os.environ | ENVIRONMENT | (_cores(tp) if tp > 1 else {}),
            )  # fmt: skip
        os.close(theirs)
        self._answers = os.fdopen(answers)
        try:
            self._call("start", model=str(folder / "model"), linker=linker, tp=tp, extra=extra)
        except BaseException:
            self._kill()
            raise

    def answer(self, prompt: list[int], tokens: int = 6) -> Answer:
        """Decodes greedily."""
        return Answer(**self._call("answer", prompt=prompt, tokens=tokens))

    def flush(self) -> None:
        """Empties SGLang's own cache."""
        self._call("flush")

    def close(self) -> None:
        """Ends all of its processes."""
        if self._process.poll() is not None:
            return
        try:
            self._call("close")
        finally:
            self._kill()

    def _call(self, what: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        late = threading.Timer(CALL_SECONDS, self._kill)
        late.start()
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._answers.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late.cancel()
        said: dict[str, Any] = json.loads(line) if line else {"error": "the engine's process has ended"}
        if "error" in said:
            raise RuntimeError(f"{said['error']}; its log ends with\n{self._log.read_text()[-4000:]}")
        return said

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


def _cores(ranks: int) -> dict[str, str]:
    """One for each rank, as SGLang wants them."""
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, sorted(os.sched_getaffinity(0))[:ranks]))}


def prompt(name: int, tokens: int) -> list[int]:
    """Tokens that differ from those of other prompts from the first one on."""
    return [(name * 37 + at * at * 7 + at * 13 + 3) % 500 + 3 for at in range(tokens)]
