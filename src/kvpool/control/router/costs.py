"""The cost model with which the router predicts prefills.

From a profile, if given. Otherwise by arithmetic: an 8-billion-parameter model of 32 layers (with grouped heads, as
Llama 3) on one GPU with 200 TFLOP/s and 1.5 TB/s. Its seconds are wrong for any other machine. But policies compare
instances
with each other, and for that the shape of the curve matters: what a cached token saves, and how the cost of a long
prompt compares with that of short ones.
"""

from __future__ import annotations

from pathlib import Path

from kvpool.control.profiling import load_profile
from kvpool.errors import ArgumentError
from kvpool.policy import cost

__all__ = ["cost_model"]


def cost_model(profile: Path | None, block_tokens: int | None = None) -> cost.CostModel:
    """From a profile's file, or the default.

    Args:
        profile: The file; None for the default.
        block_tokens: Tokens of a block of the instances; None: those of the profile, or 16.

    Raises:
        ArgumentError: The file cannot be read, or is no profile, or has too few measurements.
    """
    if profile is None:
        return _default(block_tokens or 16)
    try:
        model = cost.CostModel.fit(load_profile(profile))
        if block_tokens is None:
            return model
        return cost.CostModel(model.model, model.fits, model.parallel, block_tokens)
    except OSError as error:
        raise ArgumentError(f"profile {profile}: {error.strerror}") from error


def _default(block_tokens: int) -> cost.CostModel:
    shape = cost.ModelShape(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, head_dim=128, dtype="bfloat16"
    )
    flops_per_s, bytes_per_s, call_s = 200e12, 1.5e12, 5e-6
    waves = cost.WaveModel(108, 128, 128, flops_per_s, bytes_per_s, call_s)
    # Each new token attends to each cached one, and half of the new ones: 4 FLOPs for each number of the hidden state.
    pair_s = 4 * shape.hidden / flops_per_s
    logits_s = shape.hidden * shape.vocab * shape.itemsize / bytes_per_s
    linear = {"attention": (pair_s, pair_s / 2, 0.0, 0.0, call_s), "lm_head": (0.0, logits_s)}
    return cost.CostModel(shape, cost.Fits(waves, linear), block_tokens=block_tokens)
