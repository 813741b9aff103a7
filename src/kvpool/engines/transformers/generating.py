"""generate() with a store: what of a batch is loaded, and what of it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.generation import GenerationMode

from kvpool.engines.transformers.prompts import Prompts
from kvpool.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from kvpool.engines.transformers.cache import KvpoolCache
    from kvpool.engines.transformers.store import PromptStore

__all__ = ["generate"]

# In these, transformers computes only what a cache lacks. Assistants compute the whole prompt on top of what is loaded.
_LOADING = {
    GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE,
}  # fmt: skip
_SAVING = _LOADING | {GenerationMode.ASSISTED_GENERATION}


def generate(
    store: PromptStore, model: Any, input_ids: torch.Tensor, namespace: str, options: Mapping[str, Any]
) -> Any:
    """See `PromptStore.generate`."""
    if getattr(input_ids, "ndim", 0) != 2 or input_ids.is_floating_point():
        raise ArgumentTypeError("input_ids must be a tensor of integers, [row, token]")
    settings = _settings(model, options)
    mode = settings.get_generation_mode(options.get("assistant_model"))
    _check_content(model, namespace, options, settings, mode)
    mask = _mask_of(settings, input_ids, options)
    prompts = Prompts.of(_on_cpu(input_ids), mask.to(torch.bool).cpu().numpy())
    beams = settings.num_beams or 1
    repeat = max(beams, settings.num_return_sequences or 1)
    if mode in _LOADING and not settings.prefill_chunk_size:  # chunks of what is loaded would be computed, too
        cache = store.load_rows(prompts, namespace, repeat=repeat)
    else:
        cache = _empty(store, namespace)
    out = model.generate(input_ids, **{**options, "attention_mask": mask, "past_key_values": cache})
    sequences = _on_cpu(out if isinstance(out, torch.Tensor) else out.sequences)
    if beams > 1:  # the cache's rows are in another order than the sequences, but for the prompts
        sequences = np.repeat(_on_cpu(input_ids), repeat, axis=0)
    for row in range(0, len(sequences), repeat if beams > 1 else 1):
        padding = prompts.padding[row // repeat]
        store.save_if_possible(sequences[row, padding:], cache, namespace=namespace, row=row, padding=padding)
    return out


def _settings(model: Any, options: Mapping[str, Any]) -> Any:
    """The GenerationConfig that generate() will use: options, then the given one, then the model's."""
    rest = {name: value for name, value in options.items() if name != "generation_config"}
    settings, _ = model._prepare_generation_config(options.get("generation_config"), **rest)
    return settings


def _check_content(model: Any, namespace: str, options: Mapping[str, Any], settings: Any, mode: GenerationMode) -> None:
    """Raises if keys and values depend on more than the tokens and the namespace, or are not in the cache later."""
    if options.get("past_key_values") is not None:
        raise ArgumentError("past_key_values is the store's: leave it out, or call model.generate")
    for name in ("cache_implementation", "token_healing"):
        if getattr(settings, name, None):
            raise ArgumentError(f"{name}: the store's cache does not go with it; call model.generate")
    if settings.use_cache is False:
        raise ArgumentError("use_cache=False: there would be nothing to save or load")
    if mode not in _SAVING or options.get("custom_generate") is not None:
        what = "custom_generate" if options.get("custom_generate") is not None else str(mode.value)
        raise ArgumentError(f"{what}: the store does not know what it does with a cache; call model.generate")
    for name, value in options.items():
        if isinstance(value, torch.Tensor) and name != "attention_mask":
            raise ArgumentError(f"{name}: the content would depend on more than tokens; call model.generate")
    if (getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "peft_config", None)) and not namespace:
        raise ArgumentError("the model has adapters: give those that are active a namespace")


def _mask_of(settings: Any, input_ids: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """The attention mask as given, or as transformers takes it: without one, padding tokens are padding."""
    given = options.get("attention_mask")
    if given is not None:
        if not isinstance(given, torch.Tensor) or given.shape != input_ids.shape:
            raise ArgumentError(f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}")
        return given
    pad, eos = settings.pad_token_id, settings.eos_token_id
    ends = eos if isinstance(eos, list | tuple) else [eos]
    if pad is None or pad in ends or not (input_ids == pad).any():
        return torch.ones_like(input_ids)
    mask: torch.Tensor = (input_ids != pad).to(input_ids.dtype)
    return mask


def _empty(store: PromptStore, namespace: str) -> KvpoolCache:
    return store.load(np.zeros(0, np.int32), namespace)


def _on_cpu(ids: torch.Tensor) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(ids.cpu().numpy(), np.int32)
