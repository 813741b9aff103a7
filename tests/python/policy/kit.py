"""Shared by the tests of the policies: a cost model by hand, and profiles made from it."""

from __future__ import annotations

from kvpool.policy import cost

SHAPE = cost.ModelShape(layers=4, hidden=512, heads=8, kv_heads=4, ffn=1408, vocab=8192, dtype="bfloat16")
WAVES = cost.WaveModel(units=8, tile_rows=64, tile_columns=32, flops_per_s=1e12, weight_bytes_per_s=1e11, call_s=2e-6)
LINEAR = {
    "attention": (3e-10, 2e-10, 4e-9, 5e-8, 6e-6),
    "gather": (2e-9, 3e-8, 1e-6),
    "lm_head": (2e-6, 8e-5),
    "swap_in": (5e-8, 1e-7, 4e-6),
    "embedding": (1e-9, 1e-6),
    "norm": (2e-9, 2e-6),
    "residual": (1e-9, 1e-6),
    "rope": (3e-9, 2e-6),
    "activation": (4e-9, 1e-6),
    "kv_store": (1e-9, 1e-6),
}


def made_model(parallel: cost.Parallel | None = None) -> cost.CostModel:
    return cost.CostModel(SHAPE, cost.Fits(WAVES, LINEAR), parallel)


def made_profile(model: cost.CostModel) -> cost.Profile:
    """The measurements of a machine on which the model is exactly right."""
    single = cost.CostModel(model.model, model.fits)
    works = [
        cost.Work(x - cached, cached, -(-x // 16)) for x in (16, 48, 128, 500, 1024) for cached in (0, x // 3, x // 2)
    ]
    works += [cost.Work(n, 0, -(-n // 64)) for n in (64, 512)]  # blocks of another size
    operators = {}
    for name, operator in cost.OPERATORS.items():
        given = works
        if name == "lm_head":
            given = [cost.Work(n, 0, 0, n) for n in (1, 2, 4)]
        if name == "swap_in":
            given = [cost.Work(0, work.new + work.cached, work.blocks) for work in works]
        operators[name] = [cost.Sample(work, single._costs[name].time_s(work)) for work in given]
        assert operator.name == name
    prefills = [
        cost.Sample(work, single.exec_s(work.new + work.cached, work.cached))
        for work in works
        if work.blocks == -(-(work.new + work.cached) // 16)
    ]
    machine = cost.Machine("made", "by hand", WAVES.units)
    return cost.Profile(model.model, machine, 16, operators, prefills)
