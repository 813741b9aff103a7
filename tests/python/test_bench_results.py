"""What is committed beside the figures of the benches, and how pictures are drawn."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from bench import plots

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


def test_every_picture_belongs_to_a_result():
    drawn = {name for path in RESULTS.glob("*.json") for name in json.loads(path.read_text()).get("plots") or ()}
    assert drawn
    assert {path.name for path in RESULTS.glob("*.png")} == drawn


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_panels_is_drawn(tmp_path, count):
    painted = []
    names = plots.draw(tmp_path / "a.png", "title", *[painted.append] * count)
    assert names == ["a.png"]
    assert (tmp_path / "a.png").stat().st_size > 0
    assert len(painted) == count
