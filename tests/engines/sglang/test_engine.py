"""A real engine of SGLang with kvpool's linker: tokens as from its own cache, and right ones after failures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_kit import ENVIRONMENT, ROOT, Engine, prompt
from sglang_driver import PAGE

LONG = 400
WHOLE = LONG // PAGE * PAGE - (PAGE if LONG % PAGE == 0 else 0)  # the last token is always computed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine(
        folder, ("ReachableLinker", "reachable_linker"), dram_pages=256, keep_on_flush=True, orders=str(folder / "do")
    )
    yield engine
    engine.close()


def order(folder: Path, what: str) -> None:
    (folder / "do").write_text(what)


def obeyed(folder: Path) -> bool:
    return not (folder / "do").exists()


def test_tokens_from_kvpool_are_those_from_sglangs_own_cache(engine: Engine) -> None:
    cold = engine.answer(prompt(1, LONG))
    own = engine.answer(prompt(1, LONG))
    assert (cold.cached, own.cached) == (0, WHOLE)
    engine.flush()
    loaded = engine.answer(prompt(1, LONG))
    assert loaded == own
    assert loaded.tokens == cold.tokens
    engine.flush()
    assert engine.answer(prompt(2, LONG)).cached == 0


def test_a_prompt_that_goes_on_loads_its_beginning(engine: Engine) -> None:
    first = engine.answer(prompt(3, 200))
    own = engine.answer([*prompt(3, 200), *first.tokens, 9, 8, 7])
    engine.flush()
    loaded = engine.answer([*prompt(3, 200), *first.tokens, 9, 8, 7])
    assert loaded.cached >= 192
    assert loaded.tokens == own.tokens


def test_pages_that_sglang_has_evicted_come_back(engine: Engine) -> None:
    asked = [engine.answer(prompt(name, LONG)) for name in range(10, 18)]  # twice as many tokens as SGLang keeps
    again = [engine.answer(prompt(name, LONG)) for name in range(10, 18)]
    assert [each.tokens for each in again] == [each.tokens for each in asked]
    assert all(each.cached == WHOLE for each in again)


def test_content_that_was_changed_in_the_store_changes_the_tokens(engine: Engine, folder: Path) -> None:
    right = engine.answer(prompt(4, LONG))
    engine.flush()
    order(folder, "poison")
    wrong = engine.answer(prompt(4, LONG))
    assert obeyed(folder)
    assert wrong.cached == WHOLE
    assert wrong.logprobs != right.logprobs
    engine.flush()
    order(folder, "poison")  # the second time it is right again
    assert engine.answer(prompt(4, LONG)).tokens == right.tokens


def test_pages_that_are_gone_at_the_load_are_computed(engine: Engine, folder: Path) -> None:
    right = engine.answer(prompt(5, LONG))
    engine.flush()
    order(folder, "before a load: evict")
    again = engine.answer(prompt(5, LONG))
    assert obeyed(folder)
    assert (again.tokens, again.cached) == (right.tokens, 0)


def test_a_store_that_is_lost_leaves_sglang_as_it_is_without(engine: Engine, folder: Path) -> None:
    right = engine.answer(prompt(6, LONG))
    engine.flush()
    order(folder, "lose")
    again = engine.answer(prompt(6, LONG))
    assert obeyed(folder)
    assert (again.tokens, again.cached) == (right.tokens, 0)
    assert engine.answer(prompt(6, LONG)).cached == WHOLE  # its own cache
    assert engine.answer(prompt(7, LONG)).cached == 0


def test_the_example_finds_its_prompt_again(engine: Engine, folder: Path) -> None:
    engine.close()  # the machine is small
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "sglang_linker.py"), str(folder / "model"), "--cpu"],
        cwd=folder, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    lines = done.stdout.splitlines()
    found = next(line for line in lines if line.startswith("SGLang has forgotten"))
    assert found.endswith(" 1472 tokens from a cache")
    assert lines[-1] == "the same answer each time"
