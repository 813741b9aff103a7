"""Bugs of routers: what they keep and forget of KV events, whose prompts they take for whose, where they send them."""

from __future__ import annotations

from typing import Final

from tools.planted_kit import Bug, in_cpp, in_python

__all__ = ["ROUTING_BUGS"]

ROUTING_BUGS: Final[tuple[Bug, ...]] = (
    Bug(
        "unbounded-picture",
        "observe",
        "a publisher makes the router keep more and more blocks, until it has no memory",
        in_python("observe/events/picture.py", "if len(self._blocks) > self._blocks_max:", "if self._blocks is None:"),
        ("python/observe/test_picture_bounds.py", "python/router/test_events_bounds.py"),
        build="python",
    ),
    Bug(
        "told-block-by-block",
        "observe",
        "a long prompt that is stored block by block costs the router the square of its blocks",
        in_python("observe/events/picture.py", "_STRIDE: Final = 32", "_STRIDE: Final = 1 << 40"),
        ("python/observe/test_picture_bounds.py",),
        build="python",
    ),
    Bug(
        "publisher-gone-unnoticed",
        "observe",
        "a publisher is gone, and prompts go to its instance for ever by what it had cached",
        in_python("observe/events/subscriber.py", "if self._connection.lost_s >= self._timeout:", "if False:"),
        ("python/observe/test_event_publisher_gone.py", "python/router/test_events_bounds.py"),
        build="python",
    ),
    Bug(
        "adapters-mixed",
        "control",
        "prompts of an adapter go where the model itself has them cached, and are computed anew there",
        in_python("control/router/adapter_names.py", "if model in self._names:", "if False:"),
        ("python/router/test_adapters.py",),
        build="python",
    ),
    Bug(
        "bare-name-of-sglang",
        "control",
        "a prompt that SGLang runs on the model itself is routed to where an adapter has it cached",
        in_python("control/router/adapter_names.py", "return None if only_behind else model", "return model"),
        ("python/router/test_adapters.py",),
        build="python",
    ),
    Bug(
        "field-of-sglang-for-vllm",
        "control",
        "a prompt that vLLM runs on the model itself is routed to where an adapter has it cached",
        in_python("control/router/adapter_names.py", "lora_path in self._behind and ", ""),
        ("python/router/test_adapters.py",),
        build="python",
    ),
    Bug(
        "raw-events-are-kept",
        "observe",
        "a batch of many small events keeps all raw lists, and garbage collections hold up the router",
        in_python(
            "observe/events/unpacking.py",
            "return _kept(read(self._event()) for _ in range(count))",
            "return _kept(map(read, [self._event() for _ in range(count)]))",
        ),
        ("python/observe/test_unpacking.py",),
        build="python",
    ),
    Bug(
        "late-answers-of-the-one-before",
        "policy",
        "an instance that came back empty counts as holding what the one before it was asked for",
        in_python(
            "policy/routing/scheduler.py",
            "return None if known is None or known.incarnation != incarnation else known",
            "return known",
        ),
        ("python/policy/test_routing_trees.py",),
        build="python",
    ),
    Bug(
        "rank-unnamed",
        "control",
        "a prompt is routed to the rank that has it cached, and the server gives it to another one",
        in_python("control/router/forwarding.py", "rank = seat.instance.spec.rank", "rank = None"),
        ("python/router/test_ranks.py",),
        build="python",
    ),
    Bug(
        "models-end-the-search",
        "policy",
        "where instances of several models decode, a prompt goes to one that holds nothing of it",
        in_python(
            "policy/routing/search.py",
            "found.add((at, self._model_of(slot)))\n                if",
            "found.add((at, table.model_of(slot)))\n                if",
        ),
        ("python/policy/test_routing_search.py",),
        build="python",
    ),
    Bug(
        "hot-node-never-swept",
        "index",
        "the router's memory grows for ever: what is used between two looks is never looked at",
        in_cpp(
            "index/instance_index.cpp",
            "const std::size_t used = std::min(used_since_, kUsedALook * nodes);",
            "const std::size_t used = 0;",
        ),
        ("instance_index_test.cpp",),
    ),
    Bug(
        "one-decision-sweeps-all",
        "index",
        "a decision of a router takes as long as a look at all its prompts, because many came before it",
        in_cpp(
            "index/instance_index.cpp",
            "const std::size_t used = std::min(used_since_, kUsedALook * nodes);",
            "const std::size_t used = used_since_;",
        ),
        ("instance_index_test.cpp",),
    ),
    Bug(
        "old-entries-are-answered",
        "policy",
        "a prompt goes to an instance that has evicted it long ago, since its time to live is over and nobody looked",
        in_python("policy/routing/tree.py", "namespace, since=self._since(self._now()))", "namespace)"),
        ("python/policy/test_routing_trees.py",),
        build="python",
    ),
    Bug(
        "second-try-counted",
        "policy",
        "an instance that refuses makes prefixes look popular, and they are copied for nothing",
        in_python("policy/routing/keeping.py", "if not asked.again:", "if True:"),
        ("python/policy/test_routing_uses.py", "python/router/test_parts.py"),
        build="python",
    ),
    Bug(
        "fetched-before-computed",
        "policy",
        "an instance waits for KV of another one that has not computed it, and has to compute it anew",
        in_python("policy/routing/claims.py", "held = begin\n", "pass\n"),
        ("python/policy/test_routing_claims.py",),
        build="python",
    ),
    Bug(
        "chunks-take-all",
        "sim",
        "steps with prompts in them have more tokens than the engine computes, so first tokens come too early",
        in_python(
            "sim/instance.py",
            "left = self._batching.batch_tokens - len(self._running)",
            "left = self._batching.batch_tokens",
        ),
        ("python/sim/test_cluster_chunks.py",),
        build="python",
    ),
)
