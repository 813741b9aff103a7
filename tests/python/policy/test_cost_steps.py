"""A cost model from the times of an engine's steps."""

from __future__ import annotations

import numpy as np
import pytest
from policy.kit import SHAPE

from kvpool import ArgumentError
from kvpool.policy import cost

TIMES = {"pair": 2e-9, "new_2": 1e-9, "token": 3e-8, "request": 2e-5, "new": 4e-6, "tile": 3e-4, "step": 2e-3}


def step_s(parts, tile=32):
    new = sum(part[0] for part in parts)
    each = sum(
        TIMES["pair"] * n * c + TIMES["new_2"] * n * n + TIMES["token"] * (n + c) + TIMES["request"] for n, c in parts
    )
    return each + TIMES["new"] * new + TIMES["tile"] * -(-new // tile) + TIMES["step"]


def some_parts(dice):
    decoding = [(1, int(dice.integers(1, 2000))) for _ in range(dice.integers(0, 9))]
    prompts = [(int(dice.integers(2, 300)), int(dice.integers(0, 1000))) for _ in range(dice.integers(0, 3))]
    return (*decoding, *prompts) or ((1, 7),)


def predicted_s(model, parts):
    return model.batch_s([(new + before, before) for new, before in parts])


def test_the_steps_of_an_engine_are_predicted_from_others():
    dice = np.random.default_rng(5)
    steps = [cost.Step(step_s(parts), parts) for parts in (some_parts(dice) for _ in range(200))]
    model = cost.fit_steps(SHAPE, steps, block_tokens=32)
    assert model.block_tokens == 32
    for parts in (some_parts(dice) for _ in range(100)):
        assert predicted_s(model, parts) == pytest.approx(step_s(parts), rel=1e-6)
    assert model.exec_s(500, 100) == pytest.approx(step_s([(400, 100)]), rel=1e-6)


def test_noise_changes_no_sum():
    """Relative errors alone would make long steps count less, and predict too short ones."""
    dice = np.random.default_rng(6)
    all_parts = [some_parts(dice) for _ in range(300)]
    steps = [cost.Step(step_s(parts) * float(dice.lognormal(0.0, 0.5)), parts) for parts in all_parts]
    model = cost.fit_steps(SHAPE, steps)
    total = sum(predicted_s(model, parts) for parts in all_parts)
    assert total == pytest.approx(sum(step.seconds for step in steps), rel=1e-9)


@pytest.mark.parametrize(("seconds", "parts"), [
    (0.0, ((1, 1),)), (float("nan"), ((1, 1),)), (float("inf"), ((1, 1),)), (1.0, ()), (1.0, ((0, 3),)),
    (1.0, ((1, -1),)),
])  # fmt: skip
def test_what_is_no_step_is_refused(seconds, parts):
    with pytest.raises(ArgumentError):
        cost.Step(seconds, parts)


def test_too_few_steps_are_refused():
    steps = [cost.Step(1.0, ((1, at),)) for at in range(6)]
    with pytest.raises(ArgumentError, match="6 steps"):
        cost.fit_steps(SHAPE, steps)
