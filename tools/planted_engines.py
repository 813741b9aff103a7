"""Bugs of the connector for vLLM, for `make planted`."""

from __future__ import annotations

from typing import Final

from tools.planted_kit import Bug, in_python

__all__ = ["ENGINES_BUGS"]

_APART: Final = ("python/engines/test_vllm_apart.py", "python/engines/test_vllm_planner.py")
_RANKS: Final = ("python/engines/test_vllm_ranks.py",)
_PLANNER: Final = ("python/engines/test_vllm_planner.py",)
_MEMBERS: Final = ("python/engines/test_vllm_members.py", "python/engines/test_vllm_expected.py")
_STATES: Final = ("python/engines/test_vllm_states.py",)
_GROUPS: Final = ("python/engines/test_vllm_groups.py",)
_GROUP_MEMBERS: Final = (
    "python/engines/test_vllm_groups.py",
    "python/engines/test_vllm_group_members.py",
    "python/engines/test_vllm_group_fetches.py",
)

ENGINES_BUGS: Final = (
    Bug(
        "unmapped-before-it-sleeps",
        "engines",
        "copies still read and write vLLM's blocks while it unmaps them: the process dies",
        in_python(
            "engines/vllm/sleeping.py",
            "        with _sleepers.asleep():\n            super().suspend(level)\n",
            "        super().suspend(level)\n        with _sleepers.asleep():\n            pass\n",
        ),
        ("python/engines/test_vllm_sleeping.py",),
        build="python",
    ),
    Bug(
        "asleep-over-mapped-memory",
        "engines",
        "the pools that were suspended for a sleep that failed cache nothing from then on",
        in_python(
            "engines/sleep.py",
            "            for sleeper in suspended:\n                sleeper.resume()\n            raise\n",
            "            raise\n",
        ),
        ("python/engines/test_sleepers.py",),
        build="python",
    ),
    Bug(
        "load-before-its-save",
        "engines",
        "a worker loads blocks that it is still saving",
        in_python("engines/vllm/worker_pool.py", "        self._await_dram(plan.source)\n", ""),
        _APART,
        build="python",
    ),
    Bug(
        "load-what-was-not-saved",
        "engines",
        "a worker loads what it could not save",
        in_python("engines/vllm/worker_pool.py", "if not self.damaged.isdisjoint(plan.source.tolist()):", "if False:"),
        _APART,
        build="python",
    ),
    Bug(
        "unpinned-by-the-first-worker",
        "engines",
        "blocks are given out again while a slower worker still loads them",
        in_python("engines/vllm/scheduler_index.py", "load.workers -= workers", "load.workers = 0"),
        _APART,
        build="python",
    ),
    Bug(
        "sent-before-it-is-saved",
        "engines",
        "a peer fetches blocks that a worker has not saved yet",
        in_python("engines/vllm/scheduler_index.py", "namespace, filled=False)", "namespace)"),
        _RANKS,
        build="python",
    ),
    Bug(
        "refused-for-ever",
        "engines",
        "a worker never loads blocks that a peer has filled after a save into them had failed",
        in_python("engines/vllm/worker_pool.py", "        self.damaged -= plan.emptied\n", ""),
        _RANKS,
        build="python",
    ),
    Bug(
        "save-what-a-failed-load-left",
        "engines",
        "what was computed from a failed load is cached for others",
        in_python("engines/vllm/engine_pool.py", "if not self.suspects.isdisjoint(blocks):", "if False:"),
        _PLANNER,
        build="python",
    ),
    Bug(
        "written-while-saved",
        "engines",
        "a block that vLLM uses again is written while a save reads it",
        in_python("engines/vllm/planner.py", "            step.written.update(of_group[first:])\n", ""),
        _PLANNER,
        build="python",
    ),
    Bug(
        "dropped-block-saved",
        "engines",
        "what stands in the place of a block that vLLM has dropped is cached as that block",
        in_python("engines/vllm/planner.py", "needed_from(of_group[:full])", "0"),
        _GROUPS,
        build="python",
    ),
    Bug(
        "first-group-alone",
        "engines",
        "a prefix is a hit where the first group of layers has it",
        in_python(
            "engines/vllm/hits.py",
            "                    self.found = self._look(group, self.found)\n",
            "                    found = self._look(group, self.found)\n"
            "                    self.found = self.found if group else found\n",
        ),
        _GROUPS,
        build="python",
    ),
    Bug(
        "groups-not-told",
        "engines",
        "an engine connects to one whose groups of layers are others",
        in_python("engines/packing.py", "pool.settings.model + groups", "pool.settings.model"),
        _GROUP_MEMBERS,
        build="python",
    ),
    Bug(
        "layers-not-compared",
        "engines",
        "an engine connects to one whose layers are at other places in the same groups",
        in_python("engines/vllm/groups.py", "list(names) for names in groups", "len(names) for names in groups"),
        _GROUP_MEMBERS,
        build="python",
    ),
    Bug(
        "tail-of-another-beginning",
        "engines",
        "the last blocks of a window are those of any prompt that has the same last tokens",
        in_python("engines/vllm/groups.py", "{name}@{first}:{digest}", "{name}@{first}:"),
        _GROUP_MEMBERS,
        build="python",
    ),
    Bug(
        "tail-of-a-shorter-prefix",
        "engines",
        "a tail counts for a prefix that needs blocks before it",
        in_python(
            "engines/vllm/hits.py",
            "return first <= self._groups.first_needed(group, end // self._groups.block_tokens)",
            "return True",
        ),
        _GROUP_MEMBERS,
        build="python",
    ),
    Bug(
        "tail-behind-vllms-own-hit",
        "engines",
        "nothing more of a conversation is cached after a turn that vLLM's own cache answers",
        in_python(
            "engines/vllm/planner.py",
            "tracked.tails = self._engine.tails(request.request_id)",
            "tracked.tails = self._engine.tails(request.request_id) if found > computed else {}",
        ),
        _GROUP_MEMBERS,
        build="python",
    ),
    Bug(
        "pinned-for-nobody",
        "engines",
        "a part of a prompt stays pinned that comes when its request has gone",
        in_python(
            "engines/vllm/arrivals.py",
            "self._arrivals[part] = _Arrival(None, 0, self._clock() + self._keep_s, None)",
            "pass",
        ),
        _GROUP_MEMBERS,
        build="python",
    ),
    Bug(
        "one-part-is-the-prompt",
        "engines",
        "a prompt counts as arrived when the blocks of one of its groups of layers have come",
        in_python(
            "engines/vllm/arrivals.py", "return all(arrival is not None and", "return any(arrival is not None and"
        ),
        _GROUP_MEMBERS,
        build="python",
    ),
    Bug(
        "written-while-sent",
        "engines",
        "a block that vLLM uses again is written while it is sent to another engine",
        in_python("engines/vllm/member_pool.py", "        self._sends.await_writes(written)\n", ""),
        _MEMBERS,
        build="python",
    ),
    Bug(
        "sent-after-it-was-given-up",
        "engines",
        "blocks are sent when the other engine answers at last, and hold another prompt by then",
        in_python(
            "engines/vllm/sends.py",
            "self.dropped = self.transfer is None and self.error is None",
            "self.dropped = False",
        ),
        _MEMBERS,
        build="python",
    ),
    Bug(
        "wait-for-ever",
        "engines",
        "a request waits for a prompt that never comes",
        in_python("engines/vllm/expected.py", ">= self._timeout_s:", ">= 1e9:"),
        _MEMBERS,
        build="python",
    ),
    Bug(
        "layer-sent-before-it-is-computed",
        "engines",
        "all layers are sent when the first one is computed",
        in_python(
            "engines/vllm/sends.py",
            "            layers.computed.append(layer)\n",
            "            layers.computed += range(self._layers)\n",
        ),
        _MEMBERS,
        build="python",
    ),
    Bug(
        "look-up-before-the-arrival",
        "engines",
        "a prompt that arrives during the look-up is computed although it is there",
        in_python(
            "engines/vllm/planner.py",
            "        if self._expected is not None and not arrived:\n",
            "        if self._expected is not None and not self._expected.has_arrived(request.request_id):\n",
        ),
        _MEMBERS,
        build="python",
    ),
    Bug(
        "state-of-another-boundary",
        "engines",
        "a state is saved as that of a boundary which the step went beyond: answers go on from other tokens",
        in_python("engines/vllm/planner.py", "if tracked.boundary != len(tokens) or", "if"),
        _STATES,
        build="python",
    ),
    Bug(
        "state-by-its-own-tokens",
        "engines",
        "a state is named by the tokens of its block alone: prompts that differ before share it",
        in_python(
            "engines/vllm/groups.py",
            "digest = (digests or Digests()).of(tokens, begin)",
            "digest = (digests or Digests()).of(tokens, 0)",
        ),
        _STATES,
        build="python",
    ),
)
