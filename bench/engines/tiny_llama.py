"""A llama with random weights, always the same, in a folder that engines can load. Runs where torch is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 512


def write(
    folder: Path,
    *,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    window: int = 0,
    windowed: Sequence[int] = (),
) -> None:
    """Writes config.json and model.safetensors, unless they are there.

    Args:
        folder: It is made.
        hidden: Elements of a token between layers.
        layers: As many.
        heads: Of queries.
        kv_heads: Of keys and values.
        head_dim: Elements of a head.
        window: Tokens that the layers `windowed` attend to; the others attend to all.
        windowed: Their numbers.
    """
    import torch
    from safetensors.torch import save_file

    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    chance = torch.Generator().manual_seed(11)

    def weight(*shape: int, scale: float = 1.0) -> Any:
        return torch.randn(*shape, generator=chance) * scale / shape[-1] ** 0.5

    weights = {
        "model.embed_tokens.weight": weight(VOCABULARY, hidden, scale=hidden**0.5),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": weight(VOCABULARY, hidden, scale=2.0),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}self_attn.q_proj.weight": weight(heads * head_dim, hidden, scale=2.0),
            f"{at}self_attn.k_proj.weight": weight(kv_heads * head_dim, hidden, scale=2.0),
            f"{at}self_attn.v_proj.weight": weight(kv_heads * head_dim, hidden, scale=3.0),
            f"{at}self_attn.o_proj.weight": weight(hidden, heads * head_dim, scale=3.0),
            f"{at}mlp.gate_proj.weight": weight(2 * hidden, hidden),
            f"{at}mlp.up_proj.weight": weight(2 * hidden, hidden),
            f"{at}mlp.down_proj.weight": weight(hidden, 2 * hidden),
            f"{at}input_layernorm.weight": torch.ones(hidden),
            f"{at}post_attention_layernorm.weight": torch.ones(hidden),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = _config(hidden, layers, heads, kv_heads, head_dim)
    if windowed:
        kinds = ["sliding_attention" if layer in windowed else "full_attention" for layer in range(layers)]
        config |= {"sliding_window": window, "layer_types": kinds}
    (folder / "config.json").write_text(json.dumps(config))


def _config(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "torch_dtype": "float32",
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
