"""Bugs of keys over peers, for `make planted`."""

from __future__ import annotations

from typing import Final

from tools.planted_kit import Bug, in_cpp, in_python

__all__ = ["KEY_BUGS"]

KEY_BUGS: Final = (
    Bug(
        "keys-are-not-held",
        "transfer",
        "a peer is told of blocks that nothing pins: they are evicted before it fetches them",
        in_cpp("peers/peer_blocks.cpp", "  if (hit.found > 0) result.hold = hold;\n", ""),
        ("key_match_test.cpp",),
    ),
    Bug(
        "fill-keeps-its-blocks",
        "pool",
        "blocks of a fetch that failed are never given back: each lost peer takes room from the cache for good",
        in_cpp("pool/keyed_fill.cpp", "  cache->give_up(fresh_);\n", ""),
        ("key_match_test.cpp",),
    ),
    Bug(
        "stores-what-did-not-come",
        "transfer",
        "blocks are stored under their keys though the peer died before it had written them",
        in_python(
            "transfer/key_fetch.py",
            "if failure is None:\n                    share.fill.commit()",
            "if True:\n                    share.fill.commit()",
        ),
        ("python/transfer/test_fetch_keys.py",),
        build="python",
    ),
    Bug(
        "each-part-has-the-whole-timeout",
        "transfer",
        "a fetch of many keys takes its timeout once for each 8,192 of them",
        in_python("transfer/key_fetch.py", "left = until - time.monotonic() if first else timeout", "left = timeout"),
        ("python/transfer/test_fetch_keys.py",),
        build="python",
    ),
    Bug(
        "blamed-for-the-end-of-a-fetch",
        "transfer",
        "a peer that was asked a millisecond before the end of a fetch is not asked for seconds",
        in_python("transfer/key_fetch.py", "(hurried and isinstance(error, DeadlineExceeded))", "False"),
        ("python/transfer/test_fetch_keys.py",),
        build="python",
    ),
    Bug(
        "drain-waits-for-fetches",
        "engines",
        "an engine that drains its jobs waits until members have sent what it no longer needs",
        in_python("engines/keyed_members.py", "            fetch.cancel()\n", "            pass\n"),
        ("python/engines/test_keyed_members.py",),
        build="python",
    ),
)
