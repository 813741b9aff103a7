"""A conversation with a transformers model, with and without kvpool: the same tokens, less to compute.

    python examples/transformers_cache.py [--model NAME] [--turns N] [--document N] [--dram-gib N]

Without --model: a small Llama with random weights, so that nothing is downloaded. Needs torch and transformers. Exits
with 1 when a token differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

_ANSWER = 16


def main() -> int:
    arguments = _arguments()
    try:
        import torch
        from transformers import AutoModelForCausalLM

        from kvpool.engines.transformers import PromptStore
    except ModuleNotFoundError as error:
        print(f"this example needs {error.name}: pip install torch transformers", file=sys.stderr)
        return 2
    if arguments.model is None:
        model = _small_model()
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto").eval()
    generator = torch.Generator().manual_seed(7)
    vocabulary = model.config.get_text_config().vocab_size

    def some(tokens: int) -> Any:
        return torch.randint(3, vocabulary, (1, tokens), generator=generator)

    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    print("turn   prompt   loaded   first token without     with kvpool   tokens")
    differs = False
    with PromptStore.of(model, dram_gib=arguments.dram_gib) as store:
        conversation = some(arguments.document)
        for turn in range(arguments.turns):
            conversation = torch.cat([conversation, some(24)], dim=1)
            without, _ = _timed(lambda c=conversation: model.generate(c, max_new_tokens=1, **options))
            before = store.counts().loaded_tokens
            first, _ = _timed(lambda c=conversation: store.generate(model, c, max_new_tokens=1, **options))
            loaded = store.counts().loaded_tokens - before
            answer = store.generate(model, conversation, max_new_tokens=_ANSWER, **options)
            same = bool((answer == model.generate(conversation, max_new_tokens=_ANSWER, **options)).all())
            differs |= not same
            print(
                f"{turn + 1:4}   {conversation.shape[1]:6}   {loaded:6}   {without * 1e3:16.1f} ms   "
                f"{first * 1e3:10.1f} ms   {'the same' if same else 'DIFFERENT'}"
            )
            conversation = answer
        print(f"\n{store.counts()}\n{store.pool}")
    return int(differs)


def _small_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=2048, max_position_embeddings=16384)
    return LlamaForCausalLM(config).eval()


def _timed(call: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a name or folder that transformers knows")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--document", type=int, default=1024, help="tokens that the conversation begins with")
    parser.add_argument("--dram-gib", type=float, default=1.0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
