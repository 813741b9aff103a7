"""vLLM's processes sleep for an instant where they would call sched_yield in a loop, as for Python 3.11.0 and before.

Two of them on two processors make hundreds of thousands of such calls in a second while they wait for each other. Linux
6.18 then runs nothing else for up to 17 s: a process that sleeps for 20 ms was seen to wake that late, and all leases
run out. A vLLM plugin, for each of its processes.
"""

from __future__ import annotations


def register() -> None:
    import vllm.distributed.utils

    vllm.distributed.utils.USE_SCHED_YIELD = False
