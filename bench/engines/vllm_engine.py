"""A process with one engine of vLLM, which runs in vLLM's environment and answers a JSON object for each line."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, BLOCK = 8, 8, 4, 64, 512, 32
BLOCKS = 400  # three prompts: after the first ones vLLM uses blocks again, and no page of memory is new


class Engine:
    """Commands are methods; what they return is the answer."""

    left_ms = 0.0

    def start(
        self,
        model: str,
        connector: bool,
        max_len: int,
        role: str = "kv_both",
        options: dict[str, Any] | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """An engine, with kvpool's connector or without; `arguments` are vLLM's, in place of those here."""
        from bench.engines import tiny_llama

        shape: dict[str, Any] = {
            "hidden": HIDDEN,
            "layers": LAYERS,
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
        }
        tiny_llama.write(Path(model), **shape)
        import torch
        import vllm
        from vllm.config import KVTransferConfig
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        more: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_num_seqs": 8, **(arguments or {})}
        extra = {"dram_gib": 1, **(options or {})}
        if connector:
            from kvpool.engines.vllm import register

            register()
            more["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KvpoolConnector", kv_role=role, kv_connector_extra_config=extra
            )
        self.llm = vllm.LLM(
            model=model, skip_tokenizer_init=True, enforce_eager=True, block_size=BLOCK, seed=0, dtype="bfloat16",
            max_model_len=max_len, disable_log_stats=True,
            distributed_executor_backend=UniProcExecutor, num_gpu_blocks_override=BLOCKS, **more,
        )  # fmt: skip
        return {"vllm": vllm.__version__, "torch": torch.__version__}

    def ask(self, prompts: list[list[int]], out: int, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Milliseconds of a call, the tokens, how many were cached, and what the answer tells another engine."""
        from vllm import SamplingParams

        more: dict[str, Any] = {"extra_args": {"kv_transfer_params": params}} if params else {}
        sampling = SamplingParams(temperature=0, max_tokens=out, detokenize=False, ignore_eos=True, **more)
        began = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        took = (time.perf_counter() - began) * 1e3
        return {
            "ms": took,
            "cached": [output.num_cached_tokens or 0 for output in outputs],
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "params": outputs[0].kv_transfer_params,
        }

    def send_by_layer(self, by_layer: bool) -> dict[str, Any]:
        """How prompts are sent from now on."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        connector._options = dataclasses.replace(connector._options, by_layer=by_layer)
        return {}

    def time_sends(self, while_saving: bool) -> dict[str, Any]:
        """From now on each step waits for what it sends, before it saves or beside that; `left` tells how long."""
        from kvpool.engines.vllm.connector import KvpoolConnector
        from kvpool.engines.vllm.member_pool import MemberPool

        self._untimed = untimed = getattr(self, "_untimed", (KvpoolConnector.wait_for_save, MemberPool.send))

        def wait_for_save(connector: Any) -> None:
            began = self._began = time.perf_counter()
            untimed[0](connector)
            if while_saving and connector._step().sends:
                await_sends(connector._engine)
                self.left_ms = (time.perf_counter() - began) * 1e3

        def send(engine: Any, plan: Any) -> None:
            untimed[1](engine, plan)
            if not while_saving:
                await_sends(engine)
                self.left_ms = (time.perf_counter() - self._began) * 1e3

        def await_sends(engine: Any) -> None:
            for each in list(engine._sends._sends):
                each.transfer.wait()

        setattr(KvpoolConnector, "wait_for_save", wait_for_save)  # noqa: B010  # typed otherwise
        setattr(MemberPool, "send", send)  # noqa: B010
        return {}

    def left(self) -> dict[str, Any]:
        """Milliseconds from the end of the last layer of the last prompt that was sent until the receiver had it."""
        return {"ms": self.left_ms}

    def forget_all(self) -> dict[str, Any]:
        """What is cached is dropped, here and in kvpool."""
        return {"ok": self.llm.reset_prefix_cache(reset_connector=True)}

    def await_saves(self) -> dict[str, Any]:
        """Kvpool has saved all."""
        from kvpool.engines.vllm import pools_here

        for engine in pools_here._pools.values():
            engine.await_saves_of(None)
        return {}

    def forget(self) -> dict[str, Any]:
        """VLLM's own cache is dropped."""
        return {"ok": self.llm.reset_prefix_cache()}

    def watched(self, prompts: list[list[int]], out: int) -> dict[str, Any]:
        """As ask, with the time that the connector's methods take, and how often a request was scheduled."""
        from kvpool.engines.vllm.connector import KvpoolConnector

        spent = {"seconds": 0.0, "scheduled": 0, "steps": 0}
        with contextlib.ExitStack() as stack:
            for name, method in list(vars(KvpoolConnector).items()):
                if callable(method) and not name.startswith("_"):
                    setattr(KvpoolConnector, name, _timed(name, method, spent))
                    stack.callback(setattr, KvpoolConnector, name, method)
            return {**self.ask(prompts, out), **spent}


def _timed(name: str, method: Callable[..., Any], spent: dict[str, float]) -> Callable[..., Any]:
    def timed(self: Any, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(self, *arguments, **named)
        finally:
            spent["seconds"] += time.perf_counter() - began
            if name == "build_connector_meta":
                spent["scheduled"] += len(arguments[0].num_scheduled_tokens)
                spent["steps"] += 1

    return timed


if __name__ == "__main__":
    from bench.engines.answering import answer_lines

    answer_lines(Engine())
