"""Bugs of quotas, schedulers and placement of many models, for `make planted`."""

from __future__ import annotations

from typing import Final

from tools.planted_kit import Bug, in_python

__all__ = ["MULTIPLEXING_BUGS"]

_QUOTAS: Final = ("python/policy/test_multiplexing_quotas.py", "python/policy/test_multiplexing_room.py")
_SCHEDULERS: Final = ("python/policy/test_multiplexing_schedulers.py", "python/policy/test_multiplexing_runs.py")
_PLACEMENT: Final = ("python/policy/test_multiplexing_placement.py",)
_TIMES: Final = ("python/sim/test_multiplexing_times.py", "python/sim/test_multiplexing_mesh.py")
_MESH: Final = ("python/sim/test_multiplexing_mesh.py",)

MULTIPLEXING_BUGS: Final = (
    Bug(
        "prefill-without-memory-holds-decode",
        "policy",
        "a prefill that waits for memory holds back decode, which alone frees memory: everything stands still",
        in_python(
            "policy/multiplexing/adbs.py",
            """            if verdict == "compute":
                return "compute"
            if verdict == "started":
                break
""",
            """            if verdict in ("compute", "memory", "quota"):
                return "compute"
            if verdict == "started":
                break
""",
        ),
        _SCHEDULERS,
        build="python",
    ),
    Bug(
        "empty-prefill-queue-holds-decode",
        "policy",
        "a model without prompts is waited for, as the paper prints it, and decode stops",
        in_python(
            "policy/multiplexing/adbs.py",
            """            if verdict == "compute":
                return "compute"
            if verdict == "started":
                break
""",
            """            if verdict in ("compute", "empty"):
                return "compute"
            if verdict == "started":
                break
""",
        ),
        _SCHEDULERS,
        build="python",
    ),
    Bug(
        "first-misfit-ends-decode",
        "policy",
        "a decode job that does not fit keeps the models behind it from decoding, as the paper prints it",
        in_python(
            "policy/multiplexing/adbs.py",
            """                left_out |= resources.start(model, "decode") == "compute"
""",
            """                if resources.start(model, "decode") == "compute":
                    return True
""",
        ),
        _SCHEDULERS,
        build="python",
    ),
    Bug(
        "memory-is-not-kept-for-a-prefill",
        "policy",
        "a large prompt waits for ever, because small prompts of other models take the memory that becomes free",
        in_python(
            "policy/multiplexing/adbs.py",
            'if phase == "decode" or state.running or resources.can_decode():',
            'if phase == "decode":',
        ),
        _SCHEDULERS,
        build="python",
    ),
    Bug(
        "memory-is-not-kept-for-a-decode",
        "policy",
        "a decode with large blocks waits for ever, because prompts of other models take the memory that becomes free",
        in_python(
            "policy/multiplexing/adbs.py",
            'if phase == "decode" or state.running or resources.can_decode():',
            'if phase == "prefill" and (state.running or resources.can_decode()):',
        ),
        _SCHEDULERS,
        build="python",
    ),
    Bug(
        "scheduler-without-limits",
        "policy",
        "a scheduler starts what admission refuses, at each step anew",
        in_python(
            "policy/multiplexing/resources.py",
            "return int(max(0, min(room, limit)))",
            "return int(max(0, room))",
        ),
        _SCHEDULERS,
        build="python",
    ),
    Bug(
        "queues-that-waited-are-not-due",
        "policy",
        "a decode job with a large share waits for ever while small ones come and go",
        in_python(
            "policy/multiplexing/adbs.py",
            "        for model, phase in sorted(due, key=lambda each: -passed[each[0].name, each[1]]):\n",
            '        for model, phase in [each for each in due if each[1] == "prefill"]:\n',
        ),
        _SCHEDULERS,
        build="python",
    ),
    Bug(
        "model-stands-still-at-its-quota",
        "policy",
        "a model whose requests all need a unit more than its quota never ends one",
        in_python(
            "policy/multiplexing/resources.py",
            'left = self.room(model, "decode")',
            'left = min(self.room(model, "decode"), self._quota_left(model))',
        ),
        _SCHEDULERS,
        build="python",
    ),
    Bug(
        "fairness-over-idle-models",
        "policy",
        "an idle model, which uses nothing, makes every sharing look unfair",
        in_python("policy/quotas/adapting.py", "for model in sorted(backlogged):", "for model in sorted(uses):"),
        _QUOTAS,
        build="python",
    ),
    Bug(
        "quota-sum-drifts",
        "policy",
        "each quota keeps still for itself, so that their sum moves away from the capacity",
        in_python(
            "policy/quotas/adapting.py",
            "    return Quotas(fresh, capacity, rules, trends)\n",
            """    if same:
        fresh = {
            model: units if abs(units - last.units[model]) > settings.band * units else last.units[model]
            for model, units in fresh.items()
        }
    return Quotas(fresh, capacity, rules, trends)
""",
        ),
        _QUOTAS,
        build="python",
    ),
    Bug(
        "band-of-the-capacity",
        "policy",
        "quotas keep still for a part of the capacity, so that small models among many stay at 0 for ever",
        in_python(
            "policy/quotas/adapting.py",
            "<= band * max(units, last[model])",
            "<= band * sum(last.values())",
        ),
        _QUOTAS,
        build="python",
    ),
    Bug(
        "reserve-evicted-by-a-neighbour",
        "policy",
        "a neighbour's growth evicts what a model has cached within its reserve",
        in_python(
            "policy/quotas/admission.py",
            "floor = rule.reserve if within else max(rule.reserve, tier.quota(name))",
            "floor = 0 if within else max(rule.reserve, tier.quota(name))",
        ),
        _QUOTAS,
        build="python",
    ),
    Bug(
        "reserve-taken-by-admission",
        "policy",
        "active units of a neighbour take what is reserved: no eviction brings the reserve back",
        in_python(
            "policy/quotas/tier.py",
            "return sum(max(uses[model].active, rule.reserve) for model, rule in self.rules.items())",
            "return sum(uses[model].active for model, rule in self.rules.items())",
        ),
        _QUOTAS,
        build="python",
    ),
    Bug(
        "raised-limit-without-growth",
        "policy",
        "a limit that is raised again changes nothing, because the demand has not changed",
        in_python(
            "policy/quotas/adapting.py",
            "    same = capacity == last.capacity and rules == last.rules\n",
            "    same = capacity == last.capacity and rules.keys() == last.rules.keys()\n",
        ),
        _QUOTAS,
        build="python",
    ),
    Bug(
        "swapped-beyond-the-quota-in-dram",
        "policy",
        "evicted units go to DRAM as long as it has room, whatever their owner's quota there",
        in_python(
            "policy/quotas/admission.py",
            "swapped = max(0, min(units, allowed, free))",
            "swapped = min(units, free)",
        ),
        _QUOTAS,
        build="python",
    ),
    Bug(
        "last-mesh-in-place-of-the-best",
        "policy",
        "a model goes to the mesh that was looked at last, as the paper prints it",
        in_python(
            "policy/multiplexing/search.py", "                if value > best_value:\n", "                if True:\n"
        ),
        _PLACEMENT,
        build="python",
    ),
    Bug(
        "no-packing-by-memory",
        "policy",
        "models that fit only if memory is packed tightly are refused, because each goes where it serves most",
        in_python("policy/multiplexing/placement.py", ", search.packed(group)]", "]"),
        _PLACEMENT,
        build="python",
    ),
    Bug(
        "batches-beyond-memory",
        "policy",
        "the batches of a unit need more memory than its GPUs have",
        in_python("policy/multiplexing/estimate.py", "        if needed > left:\n", "        if False:\n"),
        _PLACEMENT,
        build="python",
    ),
    Bug(
        "prompts-leave-no-room-for-growth",
        "policy",
        "prompts fill the memory, and a hundred requests go on three at a time, those that need no block just then",
        in_python("policy/multiplexing/resources.py", "model.block * requests[model.name]", "0 * requests[model.name]"),
        _SCHEDULERS,
        build="python",
    ),
    Bug(
        "growth-of-neighbours-taken-off-a-reserve",
        "policy",
        "a model with an untouched reserve cannot start a prompt, because its neighbours' requests will want blocks",
        in_python(
            "policy/multiplexing/resources.py",
            "            room += max(0, self._available - others)\n",
            "            room += self._available - others\n",
        ),
        _SCHEDULERS,
        build="python",
    ),
    Bug(
        "memory-kept-for-what-a-limit-forbids",
        "policy",
        "a prompt that waits only for room below its own limit keeps memory from the prompts of all neighbours",
        in_python(
            "policy/multiplexing/resources.py",
            "            units += self._growth[model.name]  # as `room` asks for it\n",
            "            pass\n",
        ),
        _SCHEDULERS,
        build="python",
    ),
    Bug(
        "growth-beyond-the-limit",
        "policy",
        "room is left for blocks that a limit forbids, and prompts of neighbours wait beside free memory",
        in_python(
            "policy/multiplexing/resources.py",
            "min(blocks[model.name], max(0, model.limit - model.used))",
            "blocks[model.name]",
        ),
        _SCHEDULERS,
        build="python",
    ),
    Bug(
        "decode-waits-for-all-of-its-share",
        "policy",
        "a third of the compute is idle beside each prefill, because decode wants a little more than that",
        in_python("policy/multiplexing/resources.py", '_DECODE_LEAST if phase == "decode" else 1.0', "1.0"),
        _SCHEDULERS,
        build="python",
    ),
    Bug(
        "unmet-rate-takes-all-compute",
        "policy",
        "a model that no GPUs serve in full runs with all of the compute, for hardly more, and blocks its neighbours",
        in_python("policy/multiplexing/estimate.py", "(_NEARLY_MOST if tried[-1].unmet else _MET)", "_MET"),
        _PLACEMENT,
        build="python",
    ),
    Bug(
        "shares-beyond-the-mesh",
        "policy",
        "decode jobs whose shares exceed the mesh take turns, where they could run beside each other",
        in_python("policy/multiplexing/search.py", "bound = min if sum(shares) > 1 else max", "bound = max"),
        _PLACEMENT,
        build="python",
    ),
    Bug(
        "estimate-with-a-bandwidth-for-each",
        "policy",
        "busy models are placed together as if each had the memory's bandwidth for itself",
        in_python(
            "policy/multiplexing/estimate.py", "max(1.0, sum(shares), reads)", "max(1.0, sum(shares), 0 * reads)"
        ),
        _PLACEMENT,
        build="python",
    ),
    Bug(
        "simulated-bandwidth-for-each-job",
        "sim",
        "a simulation lets jobs read more than the memory gives: colocation looks better than it is",
        in_python(
            "sim/multiplexing_times.py", "    if len(jobs) < 2 or used(1.0) <= 1:\n", "    if used(1.0) <= len(jobs):\n"
        ),
        _TIMES,
        build="python",
    ),
    Bug(
        "full-partition-waits-for-its-neighbours",
        "policy",
        "a model that has all that its limit allows stands still as long as its neighbours have work",
        in_python(
            "policy/multiplexing/adbs.py",
            "    model = _stands_at_limit(state)\n    if model is None:\n",
            "    model = None if state.running else _stands_at_limit(state)\n    if model is None:\n",
        ),
        (*_SCHEDULERS, *_MESH),
        build="python",
    ),
    Bug(
        "simulated-request-keeps-its-blocks",
        "sim",
        "a stopped request keeps its memory, so that stopping it helps nobody",
        in_python(
            "sim/multiplexing_mesh.py",
            "            self.memory.give_back(advice.model, request)\n            request.stopped += 1\n",
            "            request.stopped += 1\n",
        ),
        _MESH,
        build="python",
    ),
    Bug(
        "simulated-request-forgets-its-answer",
        "sim",
        "a stopped request is computed again without what it had made, and goes on without that memory",
        in_python(
            "sim/multiplexing_requests.py", "        return self.prompt + self.made\n", "        return self.prompt\n"
        ),
        _MESH,
        build="python",
    ),
    Bug(
        "simulated-engine-without-a-largest-batch",
        "sim",
        "prompts hold up decode until the memory is full, so that the baselines look worse than they are",
        in_python(
            "sim/multiplexing_mesh.py", ", len(model.prompts), mux.BATCH_MAX - model.active)", ", len(model.prompts))"
        ),
        _MESH,
        build="python",
    ),
)
