"""The cost model that the router predicts prefills with.

From a profile where there is one. Otherwise by arithmetic: an 8-billion-parameter model of 32 layers (grouped heads, as
Llama 3 has) on one GPU that does 200 TFLOP/s of its products and reads 1.5 TB/s. Wrong in seconds for any other
machine; but policies compare instances with each other, and for that the shape of the curve counts: what a cached token
saves, how a long prompt weighs against short ones.
"""

from __future__ import annotations

from pathlib import Path

from kvpool.control.profiling import load_profile
from kvpool.errors import ArgumentError
from kvpool.policy import cost

__all__ = ["cost_model"]


def cost_model(profile: Path | None) -> cost.CostModel:
    """From a profile's file, or the default.

    Raises:
        ArgumentError: The file cannot be read, or is no profile, or has too few measurements.
    """
    if profile is None:
        return _default()
    try:
        return cost.CostModel.fit(load_profile(profile))
    except OSError as error:
        raise ArgumentError(f"profile {profile}: {error.strerror}") from error


def _default() -> cost.CostModel:
    shape = cost.ModelShape(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, head_dim=128, dtype="bfloat16"
    )
    flops_per_s, bytes_per_s, call_s = 200e12, 1.5e12, 5e-6
    waves = cost.WaveModel(108, 128, 128, flops_per_s, bytes_per_s, call_s)
    # Each new token meets each cached one, and half of the new ones: 4 FLOPs for each number of the hidden state.
    pair_s = 4 * shape.hidden / flops_per_s
    logits_s = shape.hidden * shape.vocab * shape.itemsize / bytes_per_s
    linear = {"attention": (pair_s, pair_s / 2, 0.0, 0.0, call_s), "lm_head": (0.0, logits_s)}
    return cost.CostModel(shape, cost.Fits(waves, linear), block_tokens=16)
