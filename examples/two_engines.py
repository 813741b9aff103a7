"""vLLM and transformers with the same weights continue each other's prompts: each is a member of a cluster.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python examples/two_engines.py MODEL

Both run in this process here; they may be in several. Needs vLLM and transformers; see docs/how-to/transformers.md.
"""

from __future__ import annotations

import os
import sys
import time

import kvpool


def main(model_name: str) -> int:
    try:
        import torch
        from transformers import AutoModelForCausalLM
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        from kvpool.engines.transformers import PromptStore
    except ModuleNotFoundError as error:
        print(f"this example needs vLLM and transformers ({error})")
        return 1

    url = f"local://two-engines-{os.getpid()}"
    llm = LLM(
        model=model_name,
        dtype="float32",
        skip_tokenizer_init=True,  # prompts and answers are token ids here, so that any model will do
        max_model_len=2048,
        enforce_eager=True,  # starts sooner
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvpoolConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"dram_gib": 1, "cluster": url, "name": "vllm-0"},
        ),
    )
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32).eval()
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)

    def asked(prompt: list[int]) -> tuple[list[int], int]:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids), output.num_cached_tokens or 0

    with (
        kvpool.Cluster.join(url) as cluster,
        PromptStore.beside(model, cluster, "vllm-0", dram_gib=1) as store,
    ):

        def generated(prompt: list[int]) -> list[int]:
            out = store.generate(
                model, torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            return [int(token) for token in out[0, len(prompt) :]]

        first, second = ([begin + at * at % 97 for at in range(1000)] for begin in (3, 4))
        answer, _ = asked(first)
        time.sleep(0.5)  # vLLM's prompts are cached in the background
        same = generated(first) == answer
        print(f"vLLM has computed a prompt: transformers has fetched {store.counts().fetched_tokens} of 1000 tokens")
        answer = generated(second)
        sent = store.send(second, "vllm-0")
        again, cached = asked(second)
        same = same and again == answer and cached > 0
        print(f"transformers has computed and sent {sent} tokens: vLLM has found {cached} of 1000")
    print("the same answers in both" if same else "THE ANSWERS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
