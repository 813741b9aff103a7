"""SGLang on kvpool: pages that SGLang has computed are kept in DRAM, under the hashes that SGLang gives them.

    linker    KvpoolLinker: between SGLang's device memory and kvpool, for `--enable-unified-cache-external-linker`
    hicache   KvpoolHiCache: below SGLang's own host memory, for `--hicache-storage-backend dynamic`
    storages  the stores of a HiCache: one for each of SGLang's host pools
    loads     what a linker has looked up and queued
    pages     where the pages of SGLang's tensors lie
    store     a pool and its keyed cache, for the pages of one kind
    options   what a user may set

Only `linker` and `hicache` import SGLang. How to use them: docs/how-to/sglang.md.
"""

from __future__ import annotations

__all__ = ["TESTED"]

TESTED = "0.5.23"
"""The release; the Makefile and docs/how-to/sglang.md name the same. SGLang's interfaces move in each."""
