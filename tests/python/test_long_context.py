"""The example of a context in several pools: what it computes, that it computes it again to the bit, that it runs."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from attention_kit import attention
from hypothesis import given
from hypothesis import strategies as st

import kvpool

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from long_context import __main__ as program  # noqa: E402
from long_context.context import BLOCK, LEAF, LEAF_BLOCKS, Context, Creditor  # noqa: E402
from long_context.engine import Engine, steps  # noqa: E402
from long_context.member import Answer, Progress, kv_layout  # noqa: E402
from long_context.model import Model, ModelConfig  # noqa: E402
from long_context.report import summary  # noqa: E402
from long_context.story import Result, Size  # noqa: E402

CONFIG = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, tokens_max=4096)
ANSWER = 6
SECRET = "what the tests know"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(CONFIG, seed=3)


@pytest.fixture
def make_pool() -> Iterator:
    """Makes pools that peers can meet. At the end those that are still open have no block in use."""
    pools = []

    def make(blocks: int, name: str = "a") -> kvpool.Pool:
        pools.append(kvpool.Pool(kv_layout(CONFIG), blocks, name=name, attend_threads=1, secret=SECRET))
        return pools[-1]

    yield make
    for pool in pools:
        if not pool.closed:
            assert pool.audit().hbm.free == pool.stats().hbm.capacity
            pool.close()


def prompt_of(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocabulary, tokens, np.int32)


def finish(engine: Engine, answer_tokens: int = ANSWER) -> tuple[list[int], bytes]:
    """The tokens and the bits of the logits, when there are so many."""
    while len(engine.logits) < answer_tokens:
        engine.decode()
    return engine.tokens, np.array(engine.logits).tobytes()


def meet(pool: kvpool.Pool, peer: kvpool.Pool) -> None:
    pool.peers.connect(peer.peers.listen(f"unix:@kvpool-test-long-{os.getpid()}-{next(_numbers)}"))


def answer_alone(model: Model, prompt: np.ndarray, make_pool) -> tuple[list[int], bytes]:
    context = Context(make_pool(-(-(len(prompt) + ANSWER) // BLOCK)))
    engine = Engine(model, context, prompt)
    engine.prefill(len(prompt))
    answer = finish(engine)
    context.close()
    return answer


# ---- what is computed


def test_equal_seeds_give_the_same_model_and_others_do_not(model):
    prompt = prompt_of(5)
    x = model.embed(prompt)
    for seed, same in ((3, True), (4, False)):
        other = Model(CONFIG, seed)
        assert (other.embed(prompt).tobytes() == x.tobytes()) == same
        for mine, theirs in zip(model.project(1, x, 7), other.project(1, x, 7), strict=True):
            assert (mine.tobytes() == theirs.tobytes()) == same
        assert (other.logits(x).tobytes() == model.logits(x).tobytes()) == same


def test_only_the_distance_of_a_query_and_a_key_counts(model):
    x = model.embed(prompt_of(2))
    scores = []
    for first in (0, 1000):
        q, k, _ = model.project(0, x, first)
        scores.append(np.einsum("hd,hd->h", q[1], np.repeat(k[0], 2, axis=0)))
    np.testing.assert_allclose(*scores, rtol=1e-3, atol=1e-4)
    q, k, _ = model.project(0, x[1:], 1001)
    far = np.einsum("hd,hd->h", q[0], np.repeat(model.project(0, x[:1], 900)[1][0], 2, axis=0))
    assert not np.allclose(far, scores[0], rtol=1e-2)


def test_the_answer_is_that_of_attention_over_all_tokens_at_once(model, make_pool):
    prompt = prompt_of(2 * BLOCK + 5)
    tokens, _ = answer_alone(model, prompt, make_pool)
    context = Context(make_pool(8))
    engine = Engine(model, context, prompt)
    engine.prefill(BLOCK)
    engine.prefill(1 << 30)
    finish(engine)
    assert engine.tokens == tokens
    x = model.embed(np.array(tokens[:-1], np.int32))
    for layer in range(CONFIG.layers):
        x = model.finish_layer(layer, x, attention(*model.project(layer, x, 0)).astype(np.float32))
    for number, logits in enumerate(engine.logits):
        last = len(prompt) + number
        np.testing.assert_allclose(model.logits(x[:last]), logits, rtol=1e-3, atol=1e-3)
    context.close()


@given(st.integers(1, 6 * LEAF), st.integers(0, 40), st.data())
def test_a_token_is_in_the_same_step_wherever_one_begins(prompt_tokens, answer_tokens, data):
    total = prompt_tokens + answer_tokens
    all_steps = list(steps(0, total, prompt_tokens))
    assert [begin for begin, _ in all_steps] == [0, *(end for _, end in all_steps[:-1])]
    assert all_steps[-1][1] == total
    leaf = data.draw(st.integers(0, total // LEAF)) * LEAF
    end = min(leaf + LEAF, total)
    assert list(steps(leaf, end, prompt_tokens)) == [step for step in all_steps if leaf <= step[0] < end]


# ---- what is computed again


@pytest.mark.parametrize("prompt_tokens", [2 * LEAF + 100, LEAF + 30])
def test_a_leaf_that_is_computed_again_has_the_same_bits(model, make_pool, prompt_tokens):
    """Also a leaf with tokens of the answer, which were computed one by one."""
    total = 2 * LEAF + 101
    pool = make_pool(5 * LEAF_BLOCKS)
    context = Context(pool)
    engine = Engine(model, context, prompt_of(prompt_tokens))
    engine.prefill(prompt_tokens)
    finish(engine, total - prompt_tokens)
    kv = pool.tensor(kvpool.HBM).numpy()
    for leaf in ((0, LEAF), (LEAF, 2 * LEAF)):
        before = kv[kvpool.block_ids(context.addrs[leaf[0] // BLOCK : leaf[1] // BLOCK])].copy()
        with context.rebuilding(leaf) as part:
            for begin, end in steps(*leaf, prompt_tokens):
                engine.step(part, begin, end)
        after = kv[kvpool.block_ids(context.addrs[leaf[0] // BLOCK : leaf[1] // BLOCK])]
        assert after.tobytes() == before.tobytes()
    context.close()


def test_a_creditor_that_dies_costs_its_own_tokens_and_changes_no_bit(model, make_pool):
    """It dies twice: while the prompt is computed, and in the answer."""
    prompt = prompt_of(4 * LEAF - 40)
    expected = answer_alone(model, prompt, make_pool)
    pool, b, c = (make_pool(2 * LEAF_BLOCKS, name) for name in "abc")
    meet(pool, b)
    meet(pool, c)
    context = Context(pool, [Creditor("b", 2 * LEAF_BLOCKS), Creditor("c", LEAF_BLOCKS)])
    engine = Engine(model, context, prompt)
    engine.prefill(2 * LEAF + BLOCK)
    assert (context.blocks_lent_by("b"), context.blocks_lent_by("c")) == (2 * LEAF_BLOCKS, 0)

    b.close()
    with pytest.raises(kvpool.PeerLost):
        engine.prefill(len(prompt))
    assert context.tokens == 2 * LEAF + BLOCK
    assert context.lost == [(0, 2 * LEAF)]
    assert (context.first_lost_leaf(), context.blocks_lent_by("b")) == ((0, LEAF), 0)
    b = make_pool(2 * LEAF_BLOCKS, "b")
    meet(pool, b)
    assert engine.recompute() == 2 * LEAF
    assert (context.lost, context.first_lost_leaf()) == ([], None)
    engine.prefill(len(prompt))
    finish(engine, 2)

    assert (context.blocks_lent_by("b"), context.blocks_lent_by("c")) == (2 * LEAF_BLOCKS, LEAF_BLOCKS)
    c.close()
    with pytest.raises(kvpool.PeerLost):
        engine.decode()
    assert context.lost == [(2 * LEAF, 3 * LEAF)]
    c = make_pool(LEAF_BLOCKS, "c")
    meet(pool, c)
    assert engine.recompute() == LEAF
    assert finish(engine) == expected
    context.close()


def test_a_request_for_which_nobody_has_room_is_refused(model, make_pool):
    pool, b = make_pool(2 * LEAF_BLOCKS, "a"), make_pool(2 * LEAF_BLOCKS, "b")
    meet(pool, b)
    context = Context(pool, [Creditor("b", LEAF_BLOCKS)])
    engine = Engine(model, context, prompt_of(4 * LEAF))
    with pytest.raises(kvpool.OutOfBlocks):
        engine.prefill(4 * LEAF)
    assert context.tokens == 3 * LEAF
    context.close()


def test_the_answer_depends_on_the_tokens_that_a_creditor_would_hold(model, make_pool):
    """Else a run would not show that these tokens were computed again rightly."""
    prompt = prompt_of(LEAF + 40)
    other = prompt.copy()
    other[100] ^= 1
    assert answer_alone(model, prompt, make_pool)[1] != answer_alone(model, other, make_pool)[1]


# ---- the program


def test_the_program_serves_more_than_a_pool_holds_and_survives_a_creditor():
    command = [sys.executable, "-m", "examples.long_context", "--small"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True, timeout=280)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "a is told that tokens 2,048 to 4,096 are lost." in done.stdout
    assert "served          7,168 tokens, 3.50 times the 2,048 that a pool holds" in done.stdout
    assert "computed again  2,048 of " in done.stdout
    assert "bit-identical   yes: 48 of 48 tokens, and the logits of 48 of them" in done.stdout
    assert "All as promised." in done.stdout


def made_up(**changes) -> Result:
    """A run in which all went well, but for these fields."""
    size = Size(pool_leaves=2, answer_tokens=3)
    blocks = {"a": 64, "b": 128, "c": 128, "d": 128}
    answer = Answer([1, 2, 3], np.arange(6, dtype=np.float32).reshape(3, 2))
    result = Result(
        size,
        together=answer,
        alone=answer,
        before=Progress(size.prompt_tokens, 1, blocks, []),
        at_death=Progress(size.prompt_tokens, 1, blocks | {"c": 0}, [(2 * LEAF, 4 * LEAF)]),
        at_end=Progress(size.kv_tokens, 3, blocks, []),
        recomputed=2 * LEAF,
        recompute_s=1.0,
        in_use=blocks,
        left_over=dict.fromkeys(blocks, 0),
    )
    return dataclasses.replace(result, **changes)


ANOTHER = Answer([1, 2, 3], np.arange(6, dtype=np.float32).reshape(3, 2) + np.float32(1e-6))


@pytest.mark.parametrize(
    ("promise", "changes"),
    [
        ("the request is", {"at_end": Progress(7167, 3, {"a": 128, "b": 128, "c": 128, "d": 128}, [])}),
        ("the request is", {"at_end": Progress(7168, 3, {"a": 192, "b": 128, "c": 64, "d": 64}, [])}),
        ("the request is", {"in_use": {"a": 64, "b": 128, "c": 128, "d": 127}}),
        ("a creditor died", {"at_death": Progress(7168, 3, {"c": 0}, [(2 * LEAF, 4 * LEAF)])}),
        (
            "the tokens that it had",
            {"at_death": Progress(7168, 1, {"c": 0}, [(2 * LEAF, 3 * LEAF)]), "recomputed": LEAF},
        ),
        ("these were computed", {"recomputed": 2 * LEAF + BLOCK}),
        ("the answer has the tokens", {"together": Answer([1, 2, 4], made_up().alone.logits)}),
        ("and its logits", {"together": ANOTHER}),
        ("no process has lost", {"left_over": {"a": 0, "b": 1, "c": 0, "d": 0}}),
    ],
)
def test_a_run_that_is_not_as_promised_fails_and_says_why(promise, changes, monkeypatch, capsys):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # as the program would do, for longer
    for result, broken in ((made_up(), []), (made_up(**changes), [promise])):
        monkeypatch.setattr("long_context.story.tell", lambda *_, result=result: result)
        assert program.main([]) == (1 if broken else 0)
        said = capsys.readouterr().out
        assert ("NOT AS PROMISED" in said) == bool(broken)
        assert said.startswith(summary(result))
        failed = [text for text, kept in result.promises.items() if not kept]
        assert [text.startswith(start) for text, start in zip(failed, broken, strict=True)] == [True] * len(broken)


def test_a_wrong_argument_is_reported(capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(["--large"])
    assert ended.value.code == 2
    assert "--large" in capsys.readouterr().err
