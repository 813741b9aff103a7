"""Llama-2-13B on a device that is assumed, not measured: 132 units, 400 TFLOP/s, 2 TB/s, some microseconds a kernel."""

from __future__ import annotations

from kvpool.policy import cost

SHAPE = cost.ModelShape(layers=40, hidden=5120, heads=40, kv_heads=40, ffn=13824, vocab=32000, dtype="bfloat16")
MODEL = cost.CostModel(
    SHAPE,
    cost.Fits(
        cost.WaveModel(
            units=132, tile_rows=128, tile_columns=128, flops_per_s=4e14, weight_bytes_per_s=2e12, call_s=5e-6
        ),
        {
            "attention": (1.2e-11, 6e-12, 1e-10, 1e-9, 1e-5),
            "lm_head": (1e-6, 1.6e-4),
            "norm": (3e-9, 3e-6),
            "residual": (3e-9, 3e-6),
            "rope": (5e-9, 3e-6),
            "activation": (8e-9, 3e-6),
            "kv_store": (3e-9, 3e-6),
            "embedding": (3e-9, 3e-6),
        },
    ),
)
TRANSFER = cost.KVTransfer(cost.Link(50e9, call_s=3e-6), SHAPE.kv_bytes_per_token)
