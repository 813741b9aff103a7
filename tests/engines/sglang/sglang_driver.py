"""A process with one engine of SGLang, which does what its standard input says: a JSON object a line, and one back.

SGLang kills the process whose engine fails, so another one runs the tests. Answers go to the descriptor that is named
in the arguments, since SGLang writes to the standard output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

PAGE = 16
MAX_TOKENS = 2048  # of SGLang's own cache


class Driver:
    def __init__(self) -> None:
        self.engine: Any = None

    def start(self, model: str, linker: list[str] | None, tp: int, extra: dict[str, Any]) -> dict[str, Any]:
        from sglang import Engine

        from bench.engines import tiny_llama

        tiny_llama.write(Path(model))
        more: dict[str, Any] = {}
        if linker is not None:
            more = {
                "enable_unified_cache_external_linker": True,
                "unified_cache_external_linker_backend": "dynamic",
                "unified_cache_external_linker_config": {
                    "linker": linker[0], "linker_module_path": linker[1], "linker_extra_config": extra,
                },
            }  # fmt: skip
        self.engine = Engine(
            model_path=model, device="cpu", skip_tokenizer_init=True, attention_backend="torch_native",
            max_total_tokens=MAX_TOKENS, disable_cuda_graph=True, mem_fraction_static=0.3, log_level="warning",
            page_size=PAGE, enable_cache_report=True, chunked_prefill_size=4096, tp_size=tp, **more,
        )  # fmt: skip
        return {}

    def answer(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        out = self.engine.generate(
            input_ids=[prompt],
            sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=-1,
        )[0]
        meta = out["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            raise RuntimeError(meta["finish_reason"]["message"])
        logprobs = [each[0] for each in meta["output_token_logprobs"]]
        return {"tokens": out["output_ids"], "logprobs": logprobs, "cached": meta["cached_tokens"]}

    def flush(self) -> dict[str, Any]:
        for _ in range(200):
            if self.engine.flush_cache().success:
                return {}
            time.sleep(0.05)  # the request before has not ended for the scheduler
        raise RuntimeError("SGLang's cache could not be flushed")

    def close(self) -> dict[str, Any]:
        self.engine.shutdown()
        return {}


def main() -> None:
    driver = Driver()
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as answers:
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                said = getattr(driver, asked.pop("do"))(**asked)
            except Exception as error:
                said = {"error": repr(error)}
            answers.write(json.dumps(said) + "\n")


if __name__ == "__main__":  # SGLang's processes import this file
    main()
