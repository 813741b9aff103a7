"""Small instances, requests with long-tailed lengths, and four schedulers on the same arrivals.

    python -m examples.migration [--quick] [--policy mell|bf|wf|lb|all] [--kill]

Each instance is a process with a tiny transformer. Requests move between them while they decode, instances start and
end as the plans of epochs ask. Exits with 1 unless the tokens of every request are those that it gets alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvpool.policy.rebalancing import PolicyName

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where this package and llama.py are

if TYPE_CHECKING:
    from migration.dispatcher import Dispatcher, Fault

_FAULTS: Final[tuple[Fault, Fault]] = ("kill", "stop")
_POLICIES: Final[tuple[PolicyName, ...]] = ("bf", "wf", "lb", "mell")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share the processors
    from migration import report, study

    size = replace(study.QUICK if options.quick else study.USUAL, link_tokens=options.link_tokens)
    if options.requests is not None:
        over_s = size.load.over_s * options.requests / size.load.requests
        size = replace(size, load=replace(size.load, requests=options.requests, over_s=over_s))
    if options.blocks is not None:
        longest = min(size.load.longest, options.blocks * 12)  # three quarters of an instance
        size = replace(size, blocks=options.blocks, load=replace(size.load, longest=longest))
    policies = [each for each in _POLICIES if options.policy in (each, "all")]
    kill, stop = _FAULTS
    faults = [*[kill] * options.kill, *[stop] * options.stop]
    started = time.monotonic()
    print(
        f"{size.load.requests} requests, seed {options.seed}; {options.instances} instances of {size.blocks} blocks at "
        f"most. Instance-seconds are of paced instances: an iteration takes {1000 * size.step_s:.0f} ms."
    )
    runs = []
    try:
        for policy in policies:
            print(f"\n{policy}", flush=True)
            runs += study.compare(size, [policy], options.instances, options.seed, faults, _Picture().show)
    except (study.WrongTokens, TimeoutError) as error:
        print(f"NOT AS PROMISED: {error}")
        return 1
    print("\n" + report.table([one for one, _ in runs]))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        content = {"seed": options.seed, "quick": options.quick, "runs": [report.as_json(one) for one, _ in runs]}
        (options.out / "migration.json").write_text(json.dumps(content, indent=2) + "\n")
        names = ["migration.json", report.draw(runs, options.out)]
        print(f"written to {options.out}: {', '.join(filter(None, names))}")
    print(f"{time.monotonic() - started:.0f} s. The tokens of every request are those that it gets alone.")
    return 0


class _Picture:
    """A line each second: what the instances have, and how far the run is."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def show(self, run: Dispatcher) -> None:
        if run.now_s < self._next_s:
            return
        self._next_s = run.now_s + 1.0
        running = [each for each in run.answers.values() if each.owner and not each.done]
        done = sum(each.done for each in run.answers.values())
        bars = " ".join(f"{each.name}:{'#' * sum(one.owner == each.name for one in running)}" for each in run.live)
        print(f"{run.now_s:5.0f} s  {done:3}/{len(run.answers)} done  {run.stops:3} hand-overs  {bars}", flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.migration", description=__doc__.split("\n")[0])
    parser.add_argument("--policy", choices=[*_POLICIES, "all"], default="all")
    parser.add_argument("--instances", type=int, default=8, metavar="N", help="at most so many (8)")
    parser.add_argument("--requests", type=int, default=None, metavar="N", help="that arrive")
    parser.add_argument("--blocks", type=int, default=None, metavar="N", help="of 16 tokens, of one instance")
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals")
    parser.add_argument("--quick", action="store_true", help="fewer requests, smaller instances: about a minute")
    for fault, text in (("kill", "kill -9"), ("stop", "stop for longer than its lease")):
        parser.add_argument(
            f"--{fault}", type=int, nargs="?", const=1, default=0, metavar="N",
            help=f"{text} an end of a migration, N times (1)",
        )  # fmt: skip
    parser.add_argument(
        "--link-tokens", type=int, default=None, metavar="N",
        help="tokens of KV cache that an instance may send in an epoch; what is more goes by tokens",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=None, metavar="FOLDER", help="for figures and plots")
    options = parser.parse_args(arguments)
    if not 1 <= options.instances <= 8:
        parser.error(f"--instances {options.instances}: from 1 to 8")
    if options.requests is not None and options.requests < 1:
        parser.error(f"--requests {options.requests}: 1 or more")
    if options.blocks is not None and options.blocks < 4:
        parser.error(f"--blocks {options.blocks}: 4 or more")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
