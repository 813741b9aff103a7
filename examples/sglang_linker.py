"""SGLang keeps computed prompts in DRAM, and finds them again when its own cache has forgotten them.

    python examples/sglang_linker.py MODEL

Needs SGLang; see docs/how-to/sglang.md. `--cpu` runs it without a GPU, where SGLang can.
"""

from __future__ import annotations

import sys
import time
from typing import Any


def main(model: str, on_cpu: bool) -> int:
    try:
        from sglang import Engine
    except ModuleNotFoundError as error:
        print(f"this example needs SGLang ({error}): pip install sglang")
        return 1

    cpu: dict[str, Any] = {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}
    engine = Engine(
        model_path=model,
        skip_tokenizer_init=True,  # prompts and answers are token ids here, so that any model will do
        page_size=32,
        max_total_tokens=4096,  # so little that other prompts drive this one out of SGLang's own cache
        log_level="error",
        enable_cache_report=True,
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config={
            "linker": "KvpoolLinker",
            "linker_module_path": "kvpool.engines.sglang.linker",
            "linker_extra_config": {"dram_gib": 1},
        },
        **(cpu if on_cpu else {}),
    )

    def ask(what: str, first: int = 3) -> list[int]:
        prompt = [first + at * at % 97 for at in range(1500)]
        began = time.perf_counter()
        answer: Any = engine.generate(
            input_ids=[prompt], sampling_params={"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        )
        took = time.perf_counter() - began
        cached = answer[0]["meta_info"]["cached_tokens"]
        print(f"{what:<42}{took * 1e3:8.1f} ms, {cached} tokens from a cache", flush=True)
        return list(answer[0]["output_ids"])

    ask("another prompt, to warm up:", first=4)
    answers = [ask("nothing cached:"), ask("in SGLang's own cache:")]
    for other in range(5, 9):
        ask("another prompt:", first=other)
    answers.append(ask("SGLang has forgotten it, kvpool has not:"))
    engine.shutdown()
    same = answers.count(answers[0]) == len(answers)
    print("the same answer each time" if same else "THE ANSWERS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    arguments = [each for each in sys.argv[1:] if each != "--cpu"]
    if len(arguments) != 1:
        sys.exit(__doc__)
    sys.exit(main(arguments[0], on_cpu="--cpu" in sys.argv))
