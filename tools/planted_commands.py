"""Bugs of the commands and of what they show: figures that look right, and are of something else."""

from __future__ import annotations

from typing import Final

from tools.planted_kit import Bug, in_python

__all__ = ["COMMAND_BUGS"]

COMMAND_BUGS: Final[tuple[Bug, ...]] = (
    Bug(
        "float-ids-truncated",
        "sim",
        "hash ids 1.2 and 1.7 of a trace are one block: the simulator finds prompts cached that are not",
        in_python("sim/traces.py", "type(each) is not int or each < 0", "each < 0"),
        ("python/sim/test_sim_traces.py",),
        build="python",
    ),
    Bug(
        "any-block-size",
        "sim",
        "--block-tokens 16 on a trace with ids of 512 tokens: hits and memory are wrong by 32 times",
        in_python("sim/traces.py", "if block is not None and not row.prompt", "if block is None and not row.prompt"),
        ("python/sim/test_sim_traces.py", "python/sim/test_cli_sim.py"),
        build="python",
    ),
    Bug(
        "hopeless-in-a-crowd",
        "sim",
        "--find-gpus says that no number of GPUs will do, where a few more would",
        in_python("sim/sizing.py", "rate=_ALONE_RATE, rate_scale=1.0, hbm_gb=_AMPLE_GB, ttl_s=0.0", "ttl_s=0.0"),
        ("python/sim/test_setup_sizing.py",),
        build="python",
    ),
    Bug(
        "name-that-changes",
        "peers",
        "a pool's series end and others begin when it gets its first peer: rates have a hole, alerts fire",
        in_python("peers/service.py", "dataclasses.replace(self.settings, name=self._own_name)", "self.settings"),
        ("python/observe/test_metrics.py",),
        build="python",
    ),
    Bug(
        "overlapped-unseen",
        "observe",
        "the blocks of a pool in a space do not add up to its capacity: a part of the memory seems to have vanished",
        in_python("observe/metrics.py", '"retired", "overlapped", ', '"retired", '),
        ("python/observe/test_metrics.py",),
        build="python",
    ),
    Bug(
        "interrupted-as-success",
        "cli",
        "Ctrl-C in a script's kvpool sim counts as success, and the script goes on with half a result",
        in_python("cli/__init__.py", "return _INTERRUPTED", "return 0"),
        ("python/test_cli_demo.py",),
        build="python",
    ),
    Bug(
        "rate-since-the-start",
        "cli",
        "kvpool top shows tokens a second over hours: an instance that has stopped seems busy",
        in_python("cli/rates.py", "samples[1][0] <= now - _WINDOW_S", "samples[1][0] <= now - 1e9"),
        ("python/test_cli_cluster.py",),
        build="python",
    ),
)
