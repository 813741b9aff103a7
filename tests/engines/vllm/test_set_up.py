"""What a user's `pip install` and one line of configuration rest on; needs no vLLM."""

from __future__ import annotations

import importlib

from vllm_process import declared_entry_point

from kvpool.engines.vllm import CONNECTOR


def test_the_entry_point_leads_to_the_function_that_registers_the_connector():
    group, lines = declared_entry_point()
    assert group == "vllm.general_plugins"
    (line,) = lines.strip().splitlines()
    name, _, target = line.partition(" = ")
    module, _, function = target.partition(":")
    assert name == "kvpool"
    assert callable(getattr(importlib.import_module(module), function))
    assert CONNECTOR == "KvpoolConnector"
