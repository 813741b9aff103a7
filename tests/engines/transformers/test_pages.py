"""The how-to's code and the example run."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_how_to_prints_what_it_shows() -> None:
    page = (ROOT / "docs/how-to/transformers.md").read_text()
    fences = re.findall(r"^```(python transformers|text output)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [info for info, _ in fences] == ["python transformers", "text output"] * 2
    namespace: dict[str, object] = {}
    for (_, code), (_, wanted) in zip(fences[::2], fences[1::2], strict=True):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, namespace)
        assert out.getvalue() == wanted


def test_the_example_finds_the_same_tokens() -> None:
    done = subprocess.run(
        [sys.executable, "examples/transformers_cache.py", "--turns", "3", "--document", "200", "--dram-gib", "0.1"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": "src"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = [int(line.split()[2]) for line in done.stdout.splitlines()[1:4]]
    assert loaded[0] == 0
    assert loaded[1] >= 224
    assert loaded[2] > loaded[1]
