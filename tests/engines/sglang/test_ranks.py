"""A real engine of SGLang with two ranks, each of which keeps its part of each page in its own store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_kit import Engine, prompt
from sglang_driver import PAGE

LONG = 200
WHOLE = LONG // PAGE * PAGE

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="SGLang wants a core for each rank")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    orders = str(folder / "do")
    linker = ("ReachableLinker", "reachable_linker")
    engine = Engine(folder, linker, tp=2, dram_pages=64, keep_on_flush=True, orders=orders)
    yield engine
    engine.close()


def test_tokens_from_the_stores_of_both_ranks_are_those_from_sglangs_own_cache(engine: Engine) -> None:
    engine.answer(prompt(1, LONG))
    own = engine.answer(prompt(1, LONG))
    engine.flush()
    loaded = engine.answer(prompt(1, LONG))
    assert loaded.cached == WHOLE
    assert loaded == own


def test_content_that_one_rank_changed_changes_the_tokens(engine: Engine, folder: Path) -> None:
    right = engine.answer(prompt(2, LONG))
    engine.flush()
    (folder / "do").write_text("poison")
    assert engine.answer(prompt(2, LONG)).logprobs != right.logprobs


def test_pages_that_one_rank_has_lost_end_one_request_at_both(engine: Engine, folder: Path) -> None:
    right = engine.answer(prompt(3, LONG))
    engine.flush()
    (folder / "do").write_text("before a load: evict")
    with pytest.raises(RuntimeError, match="External KV cache load failed"):
        engine.answer(prompt(3, LONG))
    again = engine.answer(prompt(3, LONG))
    assert (again.tokens, again.cached) == (right.tokens, 0)  # it is not found any more
    assert engine.answer(prompt(4, LONG)).cached == 0
