"""Attention of decoding steps over scattered blocks of 16 tokens, against the read bandwidth measured beside.

A row is the rate at which a call reads K and V that are in no cache: each call takes another layer and other blocks, of
memory much larger than the caches. Torch's scaled_dot_product_attention computes the same over K and V that lie in one
piece, which no block table gives it. Everything takes turns in one process, with as many threads each.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.context import Context
from bench.result import Report, Row, Skipped
from bench.transfer.build import build

TITLE = "Attention of decoding steps over scattered blocks, against read bandwidth and torch's SDPA"
PEERS: tuple[str, ...] = ()
_ROOT = Path(__file__).resolve().parents[2]
_CORE = _ROOT / os.environ.get("KVPOOL_BUILD_DIR", "build/release") / "libkvpool_core.a"
_NUMBER = ctypes.c_uint64
_KERNELS = ("portable", "avx2", "avx512", "avx512bf16")
_QUERY_HEADS, _HEAD_DIM, _LAYERS, _BLOCK_TOKENS = 32, 128, 4, 16
_TYPES = {"float32": (1, 4), "float16": (2, 2), "bfloat16": (3, 2)}  # kvpool's number, bytes
_CASES = (("bfloat16", 32), ("bfloat16", 8), ("float16", 32), ("float16", 8), ("float32", 32), ("float32", 8))
# Share of the read bandwidth: with a KV head for each query head, and with one for four.
_SHARE, _SHARE_FLOAT32_GROUPS, _SHARE_HALF_GROUPS = 0.9, 0.8, 0.68


class _Blocks:
    """The memory of all blocks, and what is called in it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.library = build(
            Path(__file__).with_name("attend_calls.cpp"),
            f"-I{_ROOT / 'cpp'}",
            str(_CORE),
            "-O3",
            "-pthread",
            "-ldl",
        )
        self.library.attend_memory.restype = ctypes.c_void_p
        for timed in (self.library.read_seconds, self.library.attend_seconds):
            timed.restype = ctypes.c_double
        self.address = self.library.attend_memory(_NUMBER(size))
        if self.address is None:
            raise Skipped(f"no memory of {size >> 20} MiB")
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))

    def fill(self, elements: npt.NDArray[Any]) -> None:
        """With these again and again."""
        pattern = elements.view(np.uint8)
        for start in range(0, self.size, pattern.size):
            part = self.bytes[start : start + pattern.size]
            part[:] = pattern[: part.size]

    def read(self, threads: int) -> float:
        """Bytes a second."""
        took = float(self.library.read_seconds(ctypes.c_void_p(self.address), _NUMBER(self.size), _NUMBER(threads)))
        return self.size / took


def run(context: Context) -> Report:
    """See the module's text."""
    if not _CORE.is_file():
        raise Skipped(f"{_CORE.name} is not built (make build)")
    torch = _torch()
    threads = min(len(os.sched_getaffinity(0)), 8)
    report = Report()
    blocks = _Blocks(context.pick(512 << 20, 2048 << 20))
    kernel = _KERNELS[int(blocks.library.attend_kernel())]
    report.notes.append(f"Kernel {kernel}, {threads} threads, {_QUERY_HEADS} query heads x {_HEAD_DIM}, float32 sums.")
    if torch is None:
        report.notes.append("SDPA: left out, torch is not installed.")
    rng = np.random.default_rng(1)
    for dtype, kv_heads in _CASES:
        elements = _elements(dtype, 1 << 20, rng)
        blocks.fill(elements)
        for batch, tokens in ((1, 1024), (1, 8192), (1, 32768), (8, 1024), (8, 8192)):
            kv_bytes = batch * tokens * 2 * kv_heads * _HEAD_DIM * _TYPES[dtype][1]
            if kv_bytes * 2 > blocks.size // _LAYERS:
                continue
            what = f"{dtype}, {kv_heads} KV heads, {batch} x {tokens:,} tokens"
            with report.guarded(what):
                report.rows.append(
                    _row(what, blocks, dtype, kv_heads, batch, tokens, threads, kernel, torch, context.pick(5, 15), rng)
                )
    return report


def _row(
    what: str,
    blocks: _Blocks,
    dtype: str,
    kv_heads: int,
    batch: int,
    tokens: int,
    threads: int,
    kernel: str,
    torch: Any,
    rounds: int,
    rng: np.random.Generator,
) -> Row:
    number, size = _TYPES[dtype]
    kv_bytes = batch * tokens * 2 * kv_heads * _HEAD_DIM * size
    count = blocks.size // (2 * kv_heads * _HEAD_DIM * size * _BLOCK_TOKENS * _LAYERS)
    q = _elements(dtype, batch * _QUERY_HEADS * _HEAD_DIM, rng)
    out = np.empty_like(q)
    sdpa = _sdpa(torch, dtype, kv_heads, batch, tokens, threads, q) if torch is not None else None
    rates: dict[str, list[float]] = {"kvpool": [], "read": [], "SDPA, contiguous": []}
    for turn in range(rounds):
        table = rng.permutation(count)[: batch * tokens // _BLOCK_TOKENS].astype(np.uint64)
        numbers = (number, _QUERY_HEADS, kv_heads, _HEAD_DIM, _LAYERS, turn % _LAYERS)
        took = blocks.library.attend_seconds(
            *map(_NUMBER, numbers),
            ctypes.c_void_p(blocks.address),
            ctypes.c_void_p(table.ctypes.data),
            _NUMBER(batch),
            _NUMBER(tokens),
            ctypes.c_void_p(q.ctypes.data),
            ctypes.c_void_p(out.ctypes.data),
            _NUMBER(threads),
        )
        if took < 0:
            raise RuntimeError("attend() refused the call")
        rates["kvpool"].append(kv_bytes / took)
        rates["read"].append(blocks.read(threads))
        if sdpa is not None:
            rates["SDPA, contiguous"].append(kv_bytes / sdpa(turn))
    gigabytes = {name: median(found) / 1e9 for name, found in rates.items() if found}
    own = gigabytes.pop("kvpool")
    return Row(
        what,
        own,
        "GB/s",
        _target(dtype, kv_heads, kernel, gigabytes["read"]),
        better="higher",
        peers=gigabytes,
        details={
            "kernel": kernel,
            "threads": threads,
            "kv_bytes": kv_bytes,
            "share_of_read": own / gigabytes["read"],
            "times_sdpa": own / gigabytes["SDPA, contiguous"] if sdpa is not None else None,
        },
    )


def _target(dtype: str, kv_heads: int, kernel: str, read: float) -> float | None:
    if kv_heads == _QUERY_HEADS:
        return _SHARE * read
    if dtype == "float32":
        return _SHARE_FLOAT32_GROUPS * read
    return _SHARE_HALF_GROUPS * read if kernel.startswith("avx512") else None


def _elements(dtype: str, count: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Numbers from [-1, 1); bfloat16 as uint16."""
    values = rng.uniform(-1.0, 1.0, count).astype(np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


def _sdpa(
    torch: Any, dtype: str, kv_heads: int, batch: int, tokens: int, threads: int, q: npt.NDArray[Any]
) -> Callable[[int], float]:
    """Seconds of one call over K and V that lie in one piece; several copies take turns, so that they are cold."""
    torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    shape = (batch, kv_heads, tokens, _HEAD_DIM)
    pair_bytes = 2 * batch * kv_heads * tokens * _HEAD_DIM * _TYPES[dtype][1]
    copies = [
        (torch.rand(shape).to(kind), torch.rand(shape).to(kind))
        for _ in range(max(2, min(8, (256 << 20) // pair_bytes)))
    ]
    rows = torch.frombuffer(bytearray(q.tobytes()), dtype=kind).view(batch, _QUERY_HEADS, 1, _HEAD_DIM)

    def call(turn: int) -> float:
        k, v = copies[turn % len(copies)]
        start = perf_counter()
        torch.nn.functional.scaled_dot_product_attention(rows, k, v, enable_gqa=kv_heads != _QUERY_HEADS)
        return perf_counter() - start

    call(0)
    return call
