"""The settings as keyword arguments, for type checkers: `Pool(polcy="lru")` is an error before it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

from kvpool.types.parameters import Policy, Route

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of mypy's: Python 3.10 has none
elif sys.version_info >= (3, 11):
    from typing import Unpack
else:

    class Unpack:
        """Lets typing.get_type_hints read the annotation where typing has no Unpack."""

        def __class_getitem__(cls, item: object) -> object:
            return item


__all__ = ["SettingArguments", "Unpack"]


class SettingArguments(TypedDict, total=False):
    """The fields of kvpool.Settings, which describes them. None counts as not given."""

    policy: Policy | None
    copy_threads: int | None
    attend_threads: int | None
    huge_pages: Literal["auto", "never", "require"] | None
    numa_node: int | None
    check_memory: bool | None
    pin_dram: Literal["auto", "never", "always"] | None
    device_memory: Literal["auto", "virtual", "plain"] | None
    audit: bool | None
    zero_on_alloc: bool | None
    name: str | None
    secret: str | None
    model: str | None
    routes: Sequence[Route] | None
    timeout_s: float | None
    lease_s: float | None
    reserve_max_s: float | None
    transfer_threads: int | None
    trusted_network: bool | None
    prefer_unix_socket: bool | None
    measure_routes: bool | None
    ucx: str | None
    nccl: str | None
    nccl_pass_bytes: int | None
    nccl_init_s: float | None
    nccl_thread_blocks: int | None
    transfers_max: int | None
    reserved_max: int | None
    lend_max: int | None
    viewed_max: int | None
    received_max: int | None
    disk_admission: Literal["second-use", "always"] | None
    disk_bytes_s: int | None
    disk_bytes_day: int | None
    disk_hang_s: float | None
    attend_lent_max: int | None
