"""generate() with a store: what of a batch is loaded, and what of it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kvpool.engines.transformers.prompts import Prompts
from kvpool.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from kvpool.engines.transformers.cache import KvpoolCache
    from kvpool.engines.transformers.store import PromptStore

__all__ = ["generate"]

_CACHES = ("past_key_values", "cache_implementation", "cache_config")


def generate(
    store: PromptStore, model: Any, input_ids: torch.Tensor, namespace: str, options: Mapping[str, Any]
) -> Any:
    """See `PromptStore.generate`."""
    if getattr(input_ids, "ndim", 0) != 2 or input_ids.is_floating_point():
        raise ArgumentTypeError("input_ids must be a tensor of integers, [row, token]")
    _check_content(model, namespace, options)
    mask = _mask_of(model, input_ids, options)
    prompts = Prompts.of(_on_cpu(input_ids), mask.cpu().numpy().astype(bool))
    beams, returned = _setting(model, options, "num_beams"), _setting(model, options, "num_return_sequences")
    repeat = max(beams, returned)
    if _setting(model, options, "prefill_chunk_size", 0):
        cache = _empty(store, namespace)  # transformers would compute the chunks of what is loaded, too
    else:
        cache = store.load_rows(prompts, namespace, repeat=repeat)
    out = model.generate(input_ids, **{**options, "attention_mask": mask, "past_key_values": cache})
    sequences = _on_cpu(out if isinstance(out, torch.Tensor) else out.sequences)
    if beams > 1:  # the cache's rows are in another order than the sequences, but for the prompts
        sequences = np.repeat(_on_cpu(input_ids), repeat, axis=0)
    for row in range(0, len(sequences), repeat if beams > 1 else 1):
        padding = prompts.padding[row // repeat]
        store.save_if_room(sequences[row, padding:], cache, namespace=namespace, row=row, padding=padding)
    return out


def _check_content(model: Any, namespace: str, options: Mapping[str, Any]) -> None:
    """Raises if keys and values depend on more than the tokens and the namespace."""
    for name in _CACHES:
        if options.get(name) is not None:
            raise ArgumentError(f"{name} is the store's: leave it out, or call model.generate")
    if options.get("use_cache") is False:
        raise ArgumentError("use_cache=False: there would be nothing to save or load")
    for name, value in options.items():
        if isinstance(value, torch.Tensor) and name != "attention_mask":
            raise ArgumentError(f"{name}: the content would depend on more than tokens; call model.generate")
    if getattr(model, "_hf_peft_config_loaded", False) and not namespace:
        raise ArgumentError("the model has adapters: give those that are active a namespace")


def _mask_of(model: Any, input_ids: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """The attention mask as given, or as transformers takes it: without one, padding tokens are padding."""
    given = options.get("attention_mask")
    if given is not None:
        if not isinstance(given, torch.Tensor) or given.shape != input_ids.shape:
            raise ArgumentError(f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}")
        return given
    pad, eos = _setting(model, options, "pad_token_id", -1), _setting(model, options, "eos_token_id", -1)
    ends = eos if isinstance(eos, list | tuple) else [eos]
    if pad == -1 or pad in ends or not (input_ids == pad).any():
        return torch.ones_like(input_ids)
    mask: torch.Tensor = (input_ids != pad).to(input_ids.dtype)
    return mask


def _setting(model: Any, options: Mapping[str, Any], name: str, otherwise: Any = 1) -> Any:
    """A setting of the generation, where generate() looks for it."""
    if options.get(name) is not None:
        return options[name]
    config = options.get("generation_config") or model.generation_config
    value = getattr(config, name, None)
    return otherwise if value is None else value


def _empty(store: PromptStore, namespace: str) -> KvpoolCache:
    return store.load(np.zeros(0, np.int32), namespace)


def _on_cpu(ids: torch.Tensor) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(ids.cpu().numpy(), np.int32)
