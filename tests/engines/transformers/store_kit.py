"""Small models with random weights, a PromptStore of one, and prompts for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transformers

from kvpool.engines.transformers import PromptStore

SIZE = 8  # tokens in a block
SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def made(name: str, dtype: Any = torch.float32, **fields: Any) -> Any:
    """A small model with random weights."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**SMALL | fields)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    model.generation_config.update(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model


def made_llama() -> Any:
    return made("Llama", num_key_value_heads=2)


@contextmanager
def store_of(model: Any) -> Iterator[PromptStore]:
    """With much room; at its end nothing may be left in use."""
    with PromptStore.of(model, dram_blocks=64, block_tokens=SIZE, audit=True) as made_store:
        yield made_store
        made_store.pool.audit()
        assert made_store.pool.stats().dram.active == 0


def ids(*rows: Any) -> Any:
    return torch.tensor([list(row) for row in rows])


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 97, length).tolist()


def scored(output: Any) -> tuple[list[list[int]], Any]:
    return output.sequences.tolist(), torch.stack(output.scores)


def alone(model: Any, tokens: list[int], prefix: int, **options: Any) -> Any:
    """transformers by itself, from a cache that holds the first `prefix` tokens."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        if prefix:
            model(ids(tokens[:prefix]), past_key_values=cache)
    return model.generate(ids(tokens), past_key_values=cache, attention_mask=torch.ones(1, len(tokens)), **options)


SCORES = {"return_dict_in_generate": True, "output_scores": True}
