"""Names of blocks: the same everywhere, and one for each prefix and namespace."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kit import prompt

from kvpool.observe.events.block_hash import BlockHasher, short

SCRIPT = """
import numpy as np
from kvpool.observe.events import BlockHasher
for namespace in ("", "tenant \\u00e4"):
    print(*[digest.hex() for digest in BlockHasher(4).chain(np.arange(-6, 12, dtype=np.int32), namespace)])
"""


def test_the_digest_is_the_documented_one():
    root = hashlib.sha256(b"kvpool block hash 1\0tenant").digest()
    first = hashlib.sha256(root + b"\1\0\0\0\xfe\xff\xff\xff").digest()
    second = hashlib.sha256(first + b"\3\0\0\0\4\0\0\0").digest()
    assert BlockHasher(2).chain(np.array([1, -2, 3, 4, 5], np.int32), "tenant") == [first, second]
    assert short(first) == int(first.hex()[:16], 16)


def test_processes_agree_bit_for_bit():
    """Whatever PYTHONHASHSEED is: prefix hashes that differ between processes are silently no hits."""
    told = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        ).stdout
        for seed in ("0", "1", "4242")
    ]  # fmt: skip
    assert told[0] == told[1] == told[2]
    tokens = np.arange(-6, 12, dtype=np.int32)
    here = [[digest.hex() for digest in BlockHasher(4).chain(tokens, name)] for name in ("", "tenant ä")]
    assert [line.split() for line in told[0].splitlines()] == here


def test_namespaces_share_no_name():
    names = [set(BlockHasher(4).chain(prompt(3), namespace)) for namespace in ("", "a", "b", "\0")]
    assert len(set.union(*names)) == 12


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=12), st.sampled_from(["", "a"])), max_size=8))
def test_earlier_hashes_change_nothing(prompts):
    hasher = BlockHasher(2)
    for tokens, namespace in prompts:
        array = np.array(tokens, np.int32)
        assert hasher.chain(array, namespace) == BlockHasher(2).chain(array, namespace)
