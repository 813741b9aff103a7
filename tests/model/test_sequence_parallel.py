"""Prompts that several processes compute in turn: the same tokens as from one process, each computed once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("rich")

import sequence_parallel  # noqa: E402
from sequence_parallel import compute  # noqa: E402

EXAMPLES = Path(sequence_parallel.__file__).parent


@pytest.mark.parametrize("parts", [2, 3])
def test_several_processes_generate_the_same_as_one(parts: int) -> None:
    lengths = (5 * 16, 7 * 16 + 1, 6 * 16 + 15)
    prompts = [np.arange(length, dtype=np.int32) % 200 + number for number, length in enumerate(lengths)]
    result = compute(parts, prompts, {"secret": "what the test knows"})
    assert result.same_tokens
    assert [reply.prompt_tokens for reply in result.alone] == list(lengths)
    assert all(reply.cached_tokens == 0 for reply in result.alone)

    # Each part is computed in one place.
    blocks = [-(-length // 16) for length in lengths]
    ends = [[count * (part + 1) // parts for count in blocks] for part in range(parts)]
    computed = [work.computed_tokens for work in result.works]
    assert computed[0] == 16 * sum(ends[0])
    for part in range(1, parts - 1):
        assert computed[part] == 16 * (sum(ends[part]) - sum(ends[part - 1]))
    assert sum(computed) == sum(lengths)

    # Everything computed so far is sent on.
    block_bytes = 2 * 4 * 2 * 32 * 4 * 16
    assert [work.sent_bytes for work in result.works] == [*(block_bytes * sum(end) for end in ends[:-1]), 0]


def test_the_script_runs(tmp_path: Path) -> None:
    environment = {**os.environ, "KVPOOL_TRACES": str(tmp_path), "COLUMNS": "100"}
    command = [sys.executable, str(EXAMPLES / "sequence_parallel.py"), "--prompts", "1"]
    for arguments in ([], ["--json"]):
        done = subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, check=False, text=True, timeout=110
        )
        assert (done.returncode, done.stderr) == (0, "")
        if arguments:
            assert json.loads(done.stdout)["same_tokens"] is True
        else:
            assert "the same tokens" in done.stdout


@pytest.mark.parametrize("arguments", [("--parts", "1"), ("--prompts", "9")])
def test_a_wrong_argument_is_reported(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, str(EXAMPLES / "sequence_parallel.py"), *arguments]
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert arguments[0] in done.stderr
