"""Pools that cannot be made: of wrong arguments, or of more memory than there is."""

from __future__ import annotations

import pytest
from kit import run_script, small_layout

import kvpool


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"hbm_blocks": -1}, kvpool.ArgumentError, "hbm_blocks .* -1"),
        ({"dram_blocks": -5}, kvpool.ArgumentError, "dram_blocks .* -5"),
        ({"hbm_blocks": 2.5}, kvpool.ArgumentTypeError, "float"),
        ({"hbm_blocks": "8"}, kvpool.ArgumentTypeError, "str"),
        ({"hbm_blocks": 2**24 + 1}, kvpool.ArgumentError, "16777217.*16777216"),
        ({"dram_blocks": 10**30}, kvpool.ArgumentError, "16777216"),
        ({"hbm_blocks": 0, "dram_blocks": 0}, kvpool.ArgumentError, "both 0"),
        ({"device": "tpu"}, kvpool.ArgumentError, "tpu"),
        ({"device": 0}, kvpool.ArgumentTypeError, "int"),
        ({"policy": "mru"}, kvpool.ArgumentError, "mru"),
        ({"policy": 1}, kvpool.ArgumentTypeError, "int"),
        ({"copy_threads": 0}, kvpool.ArgumentError, "copy_threads is 0"),
        ({"copy_threads": 1000}, kvpool.ArgumentError, "1000"),
        ({"huge_pages": True}, kvpool.ArgumentTypeError, "bool"),
        ({"numa_node": -2}, kvpool.ArgumentError, "-2"),
        ({"audit": "yes"}, kvpool.ArgumentTypeError, "str"),
        ({"polic": "lru"}, kvpool.ArgumentError, "policy"),
        ({"layout": None}, kvpool.ArgumentTypeError, "NoneType"),
        ({"layout": (2, 2, 4)}, kvpool.ArgumentTypeError, "tuple"),
    ],
)
def test_a_pool_is_made_of_what_makes_sense(arguments, error, text):
    with pytest.raises(error, match=text):
        kvpool.Pool(**({"layout": small_layout(), "hbm_blocks": 4, "dram_blocks": 4} | arguments))


def test_an_arena_that_does_not_fit_in_memory_is_refused_and_leaves_nothing():
    run_script("""
import os
from pathlib import Path
def left():
    return Path("/proc/self/maps").read_text().count("memfd:kvpool"), len(os.listdir("/proc/self/fd"))
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
before = left()
layout = kvpool.RawLayout(block_bytes=1 << 24, block_tokens=16)
for check_memory in (True, False):
    for hbm, dram in ((1 << 24, 0), (0, 1 << 24), (2, 1 << 24)):  # 256 TiB; the last: the first arena fits
        base = resident()
        available, limit = kvpool._core.memory_headroom()
        try:
            kvpool.Pool(layout, hbm, dram, check_memory=check_memory)
        except kvpool.OutOfMemory as error:
            assert isinstance(error, MemoryError)
            assert error.needed_bytes == 1 << 48
            assert str(1 << 48) in str(error)
            if check_memory:
                assert error.available_bytes <= available + (1 << 30)
                assert str(error.available_bytes) in str(error)
        else:
            raise AssertionError("it fits")
        assert left() == before
        assert resident() < base + (16 << 20)
""")


def test_an_arena_beyond_the_limit_of_its_process_is_refused():
    run_script("""
import resource
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    kvpool.Pool(kvpool.RawLayout(1 << 20, 16), 2000, check_memory=False)
except kvpool.OutOfMemory as error:
    assert error.needed_bytes == 2000 << 20
else:
    raise AssertionError("it fits")
kvpool.Pool(kvpool.RawLayout(1 << 10, 16), 10).close()
""")
