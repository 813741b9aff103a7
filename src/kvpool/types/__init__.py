"""Media, layouts, addresses, and the types of arguments and of transfers: the basic types of kvpool."""

from __future__ import annotations

from kvpool.types.addresses import Address, AddressLike, checked_block_ids, decode_address, media
from kvpool.types.attention import AttendPlan, SequencePlan
from kvpool.types.layouts import DTYPES, KVLayout, Layout, RawLayout
from kvpool.types.medium import DISK, DRAM, HBM, MIXED, Medium
from kvpool.types.parameters import (
    AddressVector,
    Bytes,
    CudaStream,
    Keys,
    MediumChoice,
    OneMedium,
    Policy,
    Priority,
    Route,
    Strategy,
    TokenVector,
)
from kvpool.types.setting_arguments import SettingArguments
from kvpool.types.transfers import TransferSpec, TransferStats, TransferTotals

__all__ = [
    "DISK",
    "DRAM",
    "DTYPES",
    "HBM",
    "MIXED",
    "Address",
    "AddressLike",
    "AddressVector",
    "AttendPlan",
    "Bytes",
    "CudaStream",
    "KVLayout",
    "Keys",
    "Layout",
    "Medium",
    "MediumChoice",
    "OneMedium",
    "Policy",
    "Priority",
    "RawLayout",
    "Route",
    "SequencePlan",
    "SettingArguments",
    "Strategy",
    "TokenVector",
    "TransferSpec",
    "TransferStats",
    "TransferTotals",
    "checked_block_ids",
    "decode_address",
    "media",
]
