"""What of vLLM's configurations the connector refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpool.engines.vllm.layouts import Pages, adoptable
from kvpool.engines.vllm.options import Options
from kvpool.errors import Unsupported

__all__ = ["check_alone", "check_by_layer", "check_shared", "check_stages", "check_supported"]


def check_supported(vllm_config: Any, options: Options) -> None:
    """Raises Unsupported for what vLLM is told to do, whatever the model is."""
    parallel = vllm_config.parallel_config
    if parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        raise Unsupported("KvpoolConnector does not support context parallelism: workers would hold parts of tokens")
    if options.own_blocks and vllm_config.device_config.device_type != "cpu":
        raise Unsupported(
            "KvpoolConnector supports the option own_blocks only where vLLM runs on a CPU, and this is "
            f"{vllm_config.device_config.device_type}: leave it out, and kvpool adopts the blocks that vLLM allocates"
        )
    if options.cluster and parallel.nnodes_within_dp > 1:
        raise Unsupported(
            "KvpoolConnector supports the option cluster only where all workers of an engine are on one machine, and "
            f"these are on {parallel.nnodes_within_dp}. Leave it out"
        )


def check_by_layer(options: Options, one_process: bool, parallel: Any) -> None:
    """Raises Unsupported where layers cannot be sent one by one, and the options ask for it.

    Args:
        options: The user's.
        one_process: The one worker is in the scheduler's process.
        parallel: vLLM's.
    """
    if not options.by_layer:
        return
    if not one_process:
        raise Unsupported(
            "KvpoolConnector supports the option by_layer only with one worker in the scheduler's process: workers in "
            "other processes send a prompt when all of them have saved it. Leave it out, or use the executor uni"
        )
    if getattr(parallel, "use_ubatching", False):
        raise Unsupported("by_layer does not work with micro-batches (--enable-dbo), which write a layer in two pieces")


def check_stages(pages: Pages, options: Options, stages: int) -> None:
    """Raises Unsupported where stages could differ in what a block is, or engines of a cluster in where layers are.

    A place in the blocks of a group is that of the group's next layer in each stage. So it depends on how the layers
    are divided into stages, which peers do not compare. Of a hybrid model a stage may have no layer with states, or
    none that attends: what it would take for its pages is not what the others do.

    Args:
        pages: Of the model.
        options: The user's.
        stages: Of the pipeline.
    """
    if stages > 1 and (pages.page_bytes or any(pages.states)):
        raise Unsupported(
            "KvpoolConnector supports models whose groups of KV layers have unequal pages, such as those with Mamba or "
            f"linear-attention layers, only without pipeline parallelism, and there are {stages} stages"
        )
    if options.cluster and stages > 1 and len(pages.windows) > 1:
        raise Unsupported(
            f"KvpoolConnector supports the option cluster for models with {len(pages.windows)} groups of KV layers "
            f"only without pipeline parallelism, and there are {stages} stages. Leave one of them out",
            groups=len(pages.windows),
        )


def check_alone(pages: Pages, options: Options) -> None:
    """Raises Unsupported where engines of a cluster would have to exchange pages of which they know only the bytes."""
    if options.cluster and pages.page_bytes:
        raise Unsupported(
            "KvpoolConnector supports the option cluster only for models whose groups of KV layers have equal pages, "
            "not with Mamba or linear-attention layers. Leave it out"
        )


def check_shared(pages: Pages, kv_caches: Mapping[str, Any]) -> None:
    """Raises Unsupported unless the groups share memory: a place in a block is the same one for the layers of each."""
    for group in pages.groups:
        for name, first in zip(group, pages.layers, strict=False):
            one, other = adoptable(pages, kv_caches[name]), adoptable(pages, kv_caches[first])
            if (one.data_ptr(), one.shape, one.stride()) != (other.data_ptr(), other.shape, other.stride()):
                raise Unsupported(
                    "KvpoolConnector supports groups of KV layers whose pages are the same memory, and the tensors of "
                    f"{name} and {first} differ: shapes {tuple(one.shape)} and {tuple(other.shape)}, strides "
                    f"{tuple(one.stride())} and {tuple(other.stride())}, {abs(one.data_ptr() - other.data_ptr())} "
                    "bytes apart"
                )
