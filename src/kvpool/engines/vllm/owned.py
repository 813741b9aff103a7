"""vLLM's blocks in memory that kvpool allocates: what vLLM calls ``get_mem_pool_context``.

vLLM asks its connector for a context in which it allocates its blocks: all of them by one call of ``torch.zeros``.
Within this one that call gets host memory of kvpool: committed when it is made, after a check of the machine's and the
cgroup's limits, with huge pages and on a NUMA node as the settings of a pool say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.dlpack import from_dlpack

from kvpool.pool import Pool
from kvpool.types import HBM, RawLayout

__all__ = ["OwnedBlocks"]

_UNIT_BYTES: Final = 1 << 21  # in which memory is allocated


class OwnedBlocks(TorchFunctionMode):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """The context. Everything else that torch is asked for within it is torch's own.

    Attributes:
        bytes: That kvpool has allocated.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.bytes = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As torch calls it.

        Raises:
            OutOfMemory: The machine does not have the memory.
        """
        options = dict(kwargs or {})
        if func is torch.zeros and _is_of_blocks(args, options):
            return self._allocate(int(args[0]))
        return func(*args, **options)

    def _allocate(self, size: int) -> torch.Tensor:
        units = -(-size // _UNIT_BYTES)
        with Pool(RawLayout(_UNIT_BYTES), hbm_blocks=units) as pool:
            memory = from_dlpack(pool.tensor(HBM))  # keeps it when the pool is closed
        self.bytes += size
        return memory.view(-1)[:size].view(torch.int8)


def _is_of_blocks(args: Any, options: Mapping[str, Any]) -> bool:
    """A number of bytes in host memory."""
    device = torch.device(options.get("device") or "cpu")
    return len(args) == 1 and isinstance(args[0], int) and options.get("dtype") == torch.int8 and device.type == "cpu"
