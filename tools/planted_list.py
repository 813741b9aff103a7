"""The bugs that `make planted` puts into a copy of the tree, and the tests of `make test` that must fail with each.

At least one for every floor of docs/architecture.md. `failure` says what a user would meet; a number in it is that of
the list of failures which users of other systems met (vLLM, SGLang, Mooncake, LMCache), in docs/how-to/faults.md.

If you change the code that a bug stands in, change the bug as well: tests/python/test_planted_bugs.py checks that each
still fits.
"""

from __future__ import annotations

from typing import Final

from tools.planted_attention import ATTENTION_BUGS
from tools.planted_cache import CACHE_BUGS
from tools.planted_commands import COMMAND_BUGS
from tools.planted_disk import DISK_BUGS
from tools.planted_disk_tier import DISK_TIER_BUGS
from tools.planted_engines import ENGINES_BUGS
from tools.planted_keys import KEY_BUGS
from tools.planted_kit import Bug, in_cpp, in_python
from tools.planted_lending import LENDING_BUGS
from tools.planted_matches import MATCH_BUGS
from tools.planted_migration import MIGRATION_BUGS
from tools.planted_multiplexing import MULTIPLEXING_BUGS
from tools.planted_peers import PEER_BUGS
from tools.planted_rebalancing import REBALANCING_BUGS
from tools.planted_routing import ROUTING_BUGS
from tools.planted_space import SPACE_BUGS
from tools.planted_storage import STORAGE_BUGS

__all__ = ["BUGS"]

BUGS: Final[tuple[Bug, ...]] = (
    *ATTENTION_BUGS,
    *CACHE_BUGS,
    *COMMAND_BUGS,
    *DISK_BUGS,
    *DISK_TIER_BUGS,
    *ENGINES_BUGS,
    *LENDING_BUGS,
    *KEY_BUGS,
    *MATCH_BUGS,
    *MIGRATION_BUGS,
    *MULTIPLEXING_BUGS,
    *PEER_BUGS,
    *SPACE_BUGS,
    *STORAGE_BUGS,
    *REBALANCING_BUGS,
    *ROUTING_BUGS,
    Bug(
        "run-of-sources",
        "base",
        "neighbours are copied as one piece though their destinations are apart: wrong bytes, reported as success",
        in_cpp("base/strips.cpp", " && place_of(to[run]) == target + run) ++run;", ") ++run;"),
        ("strips_test.cpp", "block_copy_test.cpp"),
    ),
    Bug(
        "apart-and-yet-in-one-frame",
        "routes",
        "by_layer and by_request gather over sockets: a comparison of strategies compares one with itself",
        in_cpp(
            "routes/sock/sock_route.cpp",
            "frame_limits(request, frame_bytes_max())",
            "frame_limits({}, frame_bytes_max())",
        ),
        ("sock_route_test.cpp",),
    ),
    Bug(
        "calls-priced-as-pieces-of-a-frame",
        "routes",
        "many short pieces, each to be a call, go by sockets where cma takes half the time",
        in_cpp(
            "routes/route_cost.h",
            "return !size.gather && us_per_call_ > 0;",
            "return !size.gather && us_per_call_ < 0;",
        ),
        ("route_cost_test.cpp", "sock_route_test.cpp"),
    ),
    Bug(
        "pinned-key-in-the-order",
        "index",
        "a block that two matches hold is evicted when the first is closed: the second reads another prompt's",
        in_cpp(
            "index/keyed_index.cpp", "if (--pins[i]->pins == 0) enter(pins[i]);", "--pins[i]->pins, enter(pins[i]);"
        ),
        ("keyed_index_test.cpp", "keyed_index_fuzz_test.cpp"),
    ),
    Bug(
        "chains-from-their-beginning",
        "index",
        "the beginning of a chain is evicted first: what is left of it is never found",
        in_cpp(
            "index/keyed_index.cpp",
            "for (std::size_t i = n; i-- > 0;) {  // J6",
            "for (std::size_t i = 0; i < n; ++i) {  // J6",
        ),
        ("keyed_index_test.cpp", "keyed_index_fuzz_test.cpp"),
    ),
    Bug(
        "room-at-its-own-cost",
        "pool",
        "a save evicts blocks that it names itself to make room for the others",
        in_cpp(
            "pool/keyed_fill.cpp",
            "held_ = KeyPins(cache, std::move(pinned));",
            "KeyPins(cache, std::move(pinned)).release();",
        ),
        ("keyed_cache_test.cpp",),
    ),
    Bug(
        "overlap-of-one-byte",
        "arena",
        "an engine's memory whose pieces share a byte is adopted: two blocks write to it",
        in_cpp(
            "arena/adopted.cpp",
            "const Wide high = distance + Wide{b.bytes} - 1;",
            "const Wide high = distance + Wide{b.bytes} - 2;",
        ),
        ("adopted_test.cpp",),
    ),
    Bug(
        "stale-address",
        "blocks",
        "an address that outlived its block is taken for the block's new owner's (1)",
        in_cpp(
            "blocks/block_store.cpp",
            "return is_current(block, generation_of(address)) ? AddressFault::kNone : AddressFault::kStale;",
            "return AddressFault::kNone;",
        ),
        ("block_store_test.cpp", "block_store_fuzz_test.cpp", "cache_blocks_test.cpp"),
    ),
    Bug(
        "lone-block-lost",
        "blocks",
        "what is left of a run is forgotten when it is one block: the pool shrinks",
        in_cpp(
            "blocks/free_set.cpp",
            "if (n < length) link(head + n, length - n);",
            "if (n + 1 < length) link(head + n, length - n);",
        ),
        ("free_set_test.cpp",),
    ),
    Bug(
        "reused-before-read",
        "blocks",
        "the first of two transfers that ends frees a block which the other still reads (1)",
        in_cpp(
            "blocks/cache_blocks_read.cpp",
            "if (--readers_of(addresses[i]) > 0 || !is_unread(addresses[i])) continue;",
            "--readers_of(addresses[i]);\n    if (!is_unread(addresses[i])) continue;",
        ),
        ("cache_blocks_test.cpp", "free_lent_test.cpp", "pool_test.cpp", "sim_test.cpp"),
    ),
    Bug(
        "half-free-block",
        "blocks",
        "the last unit of a block is still free for other caches of the space (Z1)",
        in_cpp(
            "blocks/unit_set.cpp",
            "free_.remove_front(first, size * n);",
            "free_.remove_front(first, size * n - 1);",
        ),
        ("unit_set_test.cpp", "shared_space_test.cpp"),
    ),
    Bug(
        "one-address-two-caches",
        "blocks",
        "two caches of a space give out the same address",
        in_cpp(
            "blocks/block_space.cpp",
            "range.first = number * width + 1 +",
            "range.first = 1 +",
        ),
        ("shared_space_test.cpp", "shared_pools_fuzz_test.cpp"),
    ),
    Bug(
        "salt-dropped",
        "index",
        "tenants share a cache, because the namespace is dropped on the way in and out (9)",
        (
            (
                "cpp/kvpool/index/prompt_index.cpp",
                "Address* out) {\n  Tree::Root* root = tree_.find_root(name_space);",
                "Address* out) {\n  Tree::Root* root = tree_.find_root(name_space.substr(0, 0));",
            ),
            (
                "cpp/kvpool/index/prompt_index.cpp",
                "tree_.ensure_root(name_space)",
                "tree_.ensure_root(name_space.substr(0, 0))",
            ),
        ),
        ("prompt_index_test.cpp", "prompt_index_fuzz_test.cpp"),
    ),
    Bug(
        "pinned-erased",
        "index",
        "a prompt that one request still uses is deleted under it",
        in_cpp("index/prompt_index.cpp", "if (top->payload.pins > 0) {  // P1", "if (top->payload.pins > 1) {  // P1"),
        ("prompt_index_test.cpp", "prompt_index_fuzz_test.cpp"),
    ),
    Bug(
        "copy-before-caller",
        "cuda",
        "a copy does not wait for the kernels that write its source",
        in_cpp(
            "cuda/order.cpp", "if (result == kCudaNotReady) return false;", "if (result == kCudaNotReady) return true;"
        ),
        ("device_order_test.cpp", "device_mover_test.cpp"),
    ),
    Bug(
        "unfair-queue",
        "exec",
        "one peer with much to do keeps all others waiting (12)",
        in_cpp("exec/fair_queue.cpp", "turns.order.splice(turns.order.end(), turns.order, turns.order.begin());", ";"),
        ("fair_queue_test.cpp",),
    ),
    Bug(
        "pins-of-failed-swap",
        "pool",
        "a swap in that fails keeps its prompts pinned for ever",
        in_cpp(
            "pool/cache_moves.cpp",
            "for (const IndexPin& pin : *pins) index_.unpin(pin);\n    pins->clear();",
            "pins->clear();",
        ),
        ("swap_begin_test.cpp", "swap_both_ways_test.cpp", "pool_swap_test.cpp"),
    ),
    Bug(
        "cap-for-nothing",
        "exec",
        "tasks beyond what their class has reserved are not counted: a burst of large writes takes every thread (12)",
        in_cpp("exec/executor.cpp", "(of.running < of.limits.reserved || shared < options.shared)", "true"),
        ("executor_test.cpp", "pool_executor_test.cpp"),
    ),
    Bug(
        "urgent-work-waits",
        "exec",
        "a key that waits with background work is not moved up when a peer waits for what it has got since (12)",
        in_cpp(
            "exec/serial_executor.cpp",
            "one.awaits_any(priority)) return",
            "one.awaits_any(Priority::kBackground)) return",
        ),
        ("serial_executor_test.cpp",),
    ),
    Bug(
        "never-forgiven",
        "control",
        "an instance that failed once gets no request any more (4)",
        in_python(
            "control/router/health.py",
            "if self.state is State.TRIAL:\n            self._recover()",
            "if self.state is State.OUT:\n            self._recover()",
        ),
        ("python/router/test_parts.py", "python/router/test_health.py"),
        build="python",
    ),
    Bug(
        "salt-ignored",
        "control",
        "requests of different salts are sent to one cache (9)",
        in_python("control/reading/prompts.py", "*([] if salt is None else [salt])", ""),
        ("python/router/test_prompts.py",),
        build="python",
    ),
    Bug(
        "names-without-namespace",
        "observe",
        "blocks of different tenants have one name in the events for routers (9)",
        in_python("observe/events/block_hash.py", '_VERSION + namespace.encode("utf-8")', "_VERSION"),
        ("python/observe/test_block_hash.py",),
        build="python",
    ),
    Bug(
        "impatient-router",
        "policy",
        "a request waits for the holder of its prefix longer than computing it again would take (12)",
        in_python(
            "policy/routing/waiting.py",
            "return backlog <= 0.0 or backlog + self.patience * execution <= self._most",
            "return backlog <= 0.0 or self.patience * execution <= self._most",
        ),
        ("python/policy/test_routing_waiting.py",),
        build="python",
    ),
    Bug(
        "two-of-one-id",
        "cluster",
        "two members of a cluster have one id: each is given the other's blocks (6)",
        in_python(
            "cluster/local/ids.py",
            "if any(number == instance and name != self._name",
            "if any(number != instance and name == self._name",
        ),
        ("python/cluster/test_local.py", "python/cluster/test_local_strangers.py"),
        build="python",
    ),
    Bug(
        "load-not-reserved",
        "pool",
        "an engine may free blocks that a load still fills: the next request's tokens are overwritten",
        in_cpp(
            "pool/cache_copies.cpp", "    copies.claims_.reserve_active(into_.data(), into_.size(), kNoPeer, 0);\n", ""
        ),
        ("swap_begin_test.cpp",),
    ),
    Bug(
        "simulated-compute-unbounded",
        "sim",
        "a simulated creditor computes for others as long as they ask, whatever it has to do itself",
        in_python("sim/lending_engine.py", "floor_s = max(floor_s, layers * service_s / share)", "floor_s = 0.0"),
        ("python/sim/test_lending_fleet.py",),
        build="python",
    ),
    Bug(
        "ctrl-c-lost-in-the-collector",
        "waiting",
        "Ctrl-C that comes before a collection is printed as unraisable, and the command goes on",
        in_python(
            "waiting/threads.py",
            "gc.callbacks.append(_core._note_collection)",
            "gc.callbacks.append(lambda phase, info: _core._note_collection(phase, info))",
        ),
        ("python/test_attach_waiting.py",),
        build="python",
    ),
)
