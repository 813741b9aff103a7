"""A process with one engine of vLLM, which does what its standard input says: a JSON object a line, and one back.

It runs in the environment of vLLM; the tests run in their own.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class Driver:
    def __init__(self) -> None:
        self.llm: Any = None

    def write_model(self, model: str, **shape: Any) -> dict:
        from bench.engines import tiny_llama

        tiny_llama.write(Path(model), **shape)
        return {}

    def write_random(self, model: Path, config: dict) -> None:
        """A model of transformers' with random weights, so large that what it has read before changes its answers."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        kind = {name: value for name, value in config.items() if name not in ("architectures", "torch_dtype")}
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**kind))
        for name, weight in made.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(weight, std=0.3)
        made.save_pretrained(model)
        (model / "config.json").write_text(json.dumps(config))

    def start(
        self, model: str, extra: dict | None, executor: str = "", role: str = "kv_both", shape: dict | None = None,
        connector: str = "KvpoolConnector", config: dict | None = None, **more: Any,
    ) -> dict:  # fmt: skip
        if config is None:
            self.write_model(model, **shape or {})
        else:
            self.write_random(Path(model), config)
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        if more.get("enable_sleep_mode"):  # which vLLM has not on a CPU: see inside_sleep.py
            from vllm.platforms import current_platform

            type(current_platform).is_sleep_mode_available = lambda self: True
        if extra is not None:
            more["kv_transfer_config"] = KVTransferConfig(
                kv_connector=connector,
                kv_role=role,
                kv_connector_extra_config=extra,
            )
        # By the class: by the name "uni" vLLM takes another executor on a CPU when its core has another process.
        more["distributed_executor_backend"] = executor or UniProcExecutor
        self.llm = LLM(
            model=model, skip_tokenizer_init=True, enforce_eager=True, block_size=32, seed=0, disable_log_stats=False,
            **more,
        )  # fmt: skip
        return {}

    def generate(self, prompts: list[dict]) -> dict:
        from vllm import SamplingParams

        inputs, samplings = [], []
        for prompt in prompts:
            item = {"prompt_token_ids": prompt["tokens"]}
            if prompt.get("salt"):
                item["cache_salt"] = prompt["salt"]
            inputs.append(item)
            samplings.append(
                SamplingParams(
                    temperature=prompt.get("temperature", 0), seed=7, max_tokens=prompt.get("out", 8), ignore_eos=True,
                    detokenize=False, logprobs=1,
                    n=prompt.get("n", 1), prompt_logprobs=prompt.get("prompt_logprobs"),
                    extra_args={"kv_transfer_params": prompt["params"]} if "params" in prompt else None,
                )
            )  # fmt: skip
        outputs = self.llm.generate(inputs, samplings, use_tqdm=False)
        return {"outputs": [self._told(output) for output in outputs]}

    def _told(self, output: Any) -> dict:
        samples = [
            {
                "tokens": list(sample.token_ids),
                "logprobs": [next(iter(step.values())).logprob for step in sample.logprobs],
                "reason": sample.finish_reason,
            }
            for sample in output.outputs
        ]
        told = {"cached": output.num_cached_tokens, "params": output.kv_transfer_params}
        return {**told, **samples[0], "samples": [sample["tokens"] for sample in samples]}

    def abort_while_loading(self, tokens: list[int]) -> dict:
        """Adds a request, lets its load begin, aborts it, and steps until vLLM has nothing to do."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        engine.add_request("gone", {"prompt_token_ids": tokens}, SamplingParams(max_tokens=4, detokenize=False))
        engine.step()
        engine.abort_request(["gone"])
        core = engine.engine_core.engine_core
        steps = 0
        while core.scheduler.has_requests():
            core.step_fn()
            steps += 1
        return {"steps": steps}

    def sleep(self, level: int = 1, mode: str = "abort") -> dict:
        self.llm.sleep(level, mode)
        return {}

    def wake_up(self, tags: list[str] | None = None) -> dict:
        return {"awake": self.llm.wake_up(tags)}

    def release_kv_cache(self) -> dict:
        """After a pause, in which vLLM hears that its requests have ended."""
        core = self.llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests():
            core.step_fn()
        self.llm.sleep(0)
        self.llm.release_kv_cache_memory()
        return {}

    def reset(self, connector: bool = False) -> dict:
        return {"ok": self.llm.reset_prefix_cache(reset_connector=connector)}

    def inside(self, what: str, *arguments: Any, module: str = "inside") -> dict:
        told = self.llm.collective_rpc(getattr(importlib.import_module(module), what), args=tuple(arguments))
        return {"told": told if len(told) > 1 else told[0]}  # of each worker

    def wait_at_most(self, seconds: float) -> dict:
        """For a prompt that another engine has announced."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        expected = scheduler.connector._planner._expected
        before, expected._timeout_s = expected._timeout_s, seconds
        return {"before": before}

    def fingerprint(self) -> dict:
        """By which the scheduler's pool is compared with its peers'."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        return {"told": scheduler.connector._planner._engine.pool.settings.model}

    def tier(self, what: str) -> dict:
        """Does something with kvpool's tier below vLLM's own offloading; see inside_tier.py."""
        import inside_tier

        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        return {"told": getattr(inside_tier, what)(scheduler.connector.connector_scheduler.manager)}

    def stop_tier(self) -> dict:
        core = self.llm.llm_engine.engine_core
        (tier,) = core.engine_core.scheduler.connector.connector_scheduler.manager.secondary_tiers
        core.shutdown()
        return {"closed": tier._store.pool.closed, "jobs": sum(not job.done() for job in tier._jobs)}

    def metrics(self) -> dict:
        return {metric.name: metric.value for metric in self.llm.get_metrics() if hasattr(metric, "value")}

    def preemptions(self) -> dict:
        return {"count": self.metrics().get("vllm:num_preemptions", 0)}

    def refused(self, cases: list[dict]) -> dict:
        """Makes the scheduler's connector for configurations that it cannot serve; no engine is needed."""
        from types import SimpleNamespace

        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        told = []
        for case in cases:
            parallel = SimpleNamespace(
                world_size=1, rank=0, distributed_executor_backend="uni", prefill_context_parallel_size=1,
                decode_context_parallel_size=1, tensor_parallel_size=1, nnodes_within_dp=1,
                pipeline_parallel_size=1,
            )  # fmt: skip
            parallel.__dict__.update(case.get("parallel", {}))
            config = SimpleNamespace(
                kv_transfer_config=KVTransferConfig(
                    kv_connector="KvpoolConnector", kv_role="kv_both", kv_connector_extra_config=case.get("extra", {})
                ),
                parallel_config=parallel,
                model_config=SimpleNamespace(enable_sleep_mode=case.get("sleep", False)),
                scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
                max_concurrent_batches=1,
            )
            try:
                KVConnectorFactory.create_connector(config, KVConnectorRole[case.get("role", "SCHEDULER")], _pages())
            except Exception as error:
                told.append([type(error).__name__, str(error)])
            else:
                told.append(["", ""])
        return {"told": told}

    def interface(self) -> dict:
        """The methods that the connector has beyond the base's, and those abstract ones that it lacks."""
        from vllm.distributed.kv_transfer.kv_connector.v1 import base

        from kvpool.engines.vllm.connector import KvpoolConnector

        return {
            "abstract": sorted(KvpoolConnector.__abstractmethods__),
            "unknown": sorted(
                name
                for name, value in vars(KvpoolConnector).items()
                if callable(value) and not name.startswith("_")
                and not hasattr(base.KVConnectorBase_V1, name) and not hasattr(base.SupportsHMA, name)
            ),
            "hma": base.supports_hma(KvpoolConnector),
        }  # fmt: skip

    def stop(self) -> dict:
        core = self.llm.llm_engine.engine_core
        core.shutdown()
        from kvpool.engines.vllm import pools_here

        return {"pools": len(pools_here._pools)}


def _pages() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["one"], spec)])


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints what it likes
    sys.path.insert(0, str(HERE))
    driver = Driver()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            told = getattr(driver, command.pop("do"))(*command.pop("with", []), **command)
        except BaseException as error:
            traceback.print_exc()
            told = {"error": type(error).__name__, "text": str(error)}
        out.write(json.dumps(told) + "\n")
        out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
