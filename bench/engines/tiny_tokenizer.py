"""A tokenizer with a chat template for the model of `tiny_llama`: each letter of ASCII is a token, others are dropped.

So any tokens are a text with these tokens, which load generators want. Runs where `tokenizers` is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

_SPECIAL: Final = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")  # the model's ids
_TEMPLATE: Final = (
    "<s>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json beside the model."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = [*map(chr, range(ord("!"), 127)), "\u0120", "\u010a"]  # a space and a new line, as ByteLevel writes them
    numbers = {token: number for number, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(numbers, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
        "chat_template": _TEMPLATE, "model_max_length": 8192,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
