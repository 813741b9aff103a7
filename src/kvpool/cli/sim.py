"""`kvpool sim`: simulates a cluster under a workload, and finds how large it must be."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kvpool.cli import sim_show
from kvpool.control import load_profile
from kvpool.errors import ArgumentError
from kvpool.policy.cost import CostModel
from kvpool.sim.generators import PRESETS
from kvpool.sim.hardware import GPUS, MODELS
from kvpool.sim.measures import Measures
from kvpool.sim.packed import PACKERS, pack
from kvpool.sim.setup import POLICIES, Setup
from kvpool.sim.sizing import Slo, find_gpus

_TEXT: Final = """\
Simulates a cluster of inference engines on a virtual clock: the real routing policies, prompt trees and prefix indexes,
with times from a cost model. Says how much of the prompts is found cached (in HBM and in DRAM), and how long requests
wait (TTFT: to the first token, TPOT: between tokens, JCT: to the last one)."""

_EXAMPLES: Final = """\
examples:
  kvpool sim --workload chat --gpus 8 --rate 20
  kvpool sim --trace conversation_trace.jsonl --gpus 16 --hardware H100-80GB --dram-gb 64
  kvpool sim --workload agent --policy session-id --sweep dram=0,16,64 --out build/sim
  kvpool sim --workload poisson --rate 8 --prefill 3 --decode 1
  kvpool sim --trace azure.csv --slo-ttft 2 --find-gpus
  kvpool sim --trace azure.csv --policy mell --hbm-gb 12 --rate-scale 10

Traces are read as they are published: Mooncake (JSON lines), Azure and Vidur (CSV), plain or .xz, .gz, .bz2.
Without --profile times are those of a roofline from data sheets: good for comparing, rough for absolute figures."""

# What --sweep can change, and how its values are read.
_SWEPT: Final[dict[str, tuple[str, type]]] = {
    "dram": ("dram_gb", float),
    "hbm": ("hbm_gb", float),
    "gpus": ("gpus", int),
    "rate": ("rate", float),
    "rate-scale": ("rate_scale", float),
    "policy": ("policy", str),
    "seed": ("seed", int),
}
_SWEPT_MAX: Final = 100
_SHARE: Final = Slo(ttft_s=1.0).quantile
_GPUS_MAX: Final = 1024


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    parser = commands.add_parser(
        "sim",
        help="simulate a cluster: hit ratios, latencies, GPUs needed",
        description=_TEXT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_workload(parser.add_argument_group("workload"))
    _add_cluster(parser.add_argument_group("cluster"))
    _add_questions(parser.add_argument_group("what is asked"))
    parser.set_defaults(run=_run)


# What packing has no use for: it makes up the number of GPUs, and looks at what decodes alone.
_NOT_PACKED: Final = (
    *("sweep", "find_gpus", "gpus_max", "slo_ttft", "slo_tpot", "slo_share"),
    *("gpus", "prefill", "decode", "dram_gb", "link_gb_s", "fetch", "learn", "batch_tokens", "batch_requests"),
    *("whole_prompts", "ttl", "cap", "thrift"),
)


def _add_workload(group: Any) -> None:
    plain = Setup()
    what = "; ".join(f"{name}: {shape.what}" for name, shape in PRESETS.items())
    source = group.add_mutually_exclusive_group()
    source.add_argument("--trace", type=Path, metavar="FILE", help="a recorded workload")
    source.add_argument(
        "--workload", choices=PRESETS, default=None, metavar="NAME", help=f"a made-up one ({what}); default: chat"
    )
    group.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="requests a second on average, as a Poisson process; default: the trace's own times, or 4",
    )
    group.add_argument("--rate-scale", type=float, default=1.0, metavar="X", help="arrivals X times faster (default 1)")
    group.add_argument("--requests", type=int, metavar="N", help="at most N; default: the whole trace, or 20000")
    group.add_argument("--skip", type=int, default=0, metavar="N", help="the first N are not measured (default 0)")
    group.add_argument(
        "--block-tokens", type=int, metavar="N", help="tokens a block; default: what the trace's hash ids say, or 16"
    )
    group.add_argument("--seed", type=int, default=plain.seed, metavar="N", help="of everything drawn (default 0)")


def _add_cluster(group: Any) -> None:
    plain = Setup()
    policies = [*POLICIES, *PACKERS]
    group.add_argument(
        "--policy",
        choices=policies,
        default=plain.policy,
        metavar="NAME",
        help=f"{', '.join(POLICIES)}: which instance computes a prompt (default {plain.policy}); "
        f"{', '.join(PACKERS)}: pack what decodes onto as few GPUs as it takes, and count migrations",
    )
    # Options without a default get Setup's, so that it is known which were given.
    group.add_argument("--gpus", type=int, metavar="N", help=f"all of them (default {plain.gpus})")
    group.add_argument("--prefill", type=int, metavar="P", help="instances that only prefill, with --decode")
    group.add_argument("--decode", type=int, metavar="D", help="instances that only decode; --gpus is void")
    group.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs an instance (default 1)")
    group.add_argument(
        "--model", choices=MODELS, default=plain.model, metavar="NAME", help=f"{', '.join(MODELS)} ({plain.model})"
    )
    group.add_argument(
        "--hardware",
        choices=GPUS,
        default=plain.hardware,
        metavar="NAME",
        help=f"{', '.join(GPUS)} ({plain.hardware})",
    )
    group.add_argument("--profile", type=Path, metavar="FILE", help="measured by profile_ops, in place of --model")
    group.add_argument("--hbm-gb", type=float, metavar="GB", help="HBM for KV a GPU; default: what the weights leave")
    group.add_argument("--dram-gb", type=float, metavar="GB", help="DRAM for KV a GPU (default 0)")
    group.add_argument("--link-gb-s", type=float, metavar="GB", help="between instances, GB/s a GPU; default: its own")
    group.add_argument(
        "--fetch", action="store_true", default=None, help="fetch prefixes from other instances where it pays"
    )
    group.add_argument(
        "--learn",
        choices=("response", "dispatch", "events"),
        help=f"when the router learns what an instance holds (default {plain.learn}; response: with the answer; "
        "events: at dispatch, and from KV events as well, which is exact, and slower to simulate)",
    )
    group.add_argument(
        "--ttl", type=float, metavar="S",
        help=f"how long the router remembers what it learnt from no event (default {plain.ttl_s:g}; 0: forever)",
    )  # fmt: skip
    group.add_argument(
        "--cap", type=float, metavar="X", help=f"most load of an instance, in means of all (default {plain.cap:g})"
    )
    group.add_argument(
        "--thrift", type=float, metavar="X",
        help="a second of computing what others hold counts X more: keep-hits (default 7), queue-plus-exec (0)",
    )  # fmt: skip
    group.add_argument(
        "--slack", type=float, metavar="PART", help="of mell: of a GPU's KV left free for growth (default 0.025)"
    )
    group.add_argument(
        "--batch-tokens",
        type=int,
        metavar="N",
        help="of a step, prompts and decoding together (default: vLLM's, 2048, or 8192 on an H100 or H200)",
    )
    group.add_argument(
        "--batch-requests",
        type=int,
        metavar="N",
        help="at a time (default: vLLM's, 256, or with chunks on an H100 or H200 1024; no more than --batch-tokens)",
    )
    group.add_argument(
        "--whole-prompts",
        action="store_true",
        default=None,
        help="no chunked prefill: whole prompts, --batch-tokens together (default 8192), while what decodes waits",
    )


def _add_questions(group: Any) -> None:
    group.add_argument(
        "--sweep", metavar="WHAT=A,B,...", help=f"one run for each value; WHAT is one of {', '.join(_SWEPT)}"
    )
    group.add_argument("--find-gpus", action="store_true", help="the fewest GPUs that keep --slo-ttft or --slo-tpot")
    group.add_argument(
        "--slo-ttft",
        type=float,
        metavar="S",
        help="seconds to the first token, at most: tells which share keeps it",
    )
    group.add_argument("--slo-tpot", type=float, metavar="S", help="seconds between tokens, at most; likewise")
    group.add_argument(
        "--slo-share", type=float, metavar="Q", help=f"of requests for which it is kept (default {_SHARE:g})"
    )
    group.add_argument("--gpus-max", type=int, metavar="N", help=f"for --find-gpus, at most (default {_GPUS_MAX})")
    group.add_argument("--out", type=Path, metavar="DIR", help="write sim.json there, and plots where matplotlib is")
    group.add_argument("--json", action="store_true", help="print JSON in place of the table")
    group.add_argument("--quiet", action="store_true", help="no progress")


def _run(arguments: argparse.Namespace) -> None:
    if arguments.slack is not None and arguments.policy != "mell":
        raise ArgumentError(f"--slack is of --policy mell, not of {arguments.policy}")
    if arguments.policy in PACKERS:
        result = _packed(arguments)
    elif arguments.find_gpus:
        result = _found(arguments)
    else:
        result = _simulated(arguments)
    if arguments.out is not None:
        sim_show.write(arguments.out, result)
    print(json.dumps(result, indent=1) if arguments.json else sim_show.table(result))


def _setup(arguments: argparse.Namespace, **changes: Any) -> Setup:
    """The setup from the command line. Raises ArgumentError."""
    if bool(arguments.prefill) != bool(arguments.decode):
        raise ArgumentError("--prefill and --decode go together: neither can do without the other")
    profile = None
    if arguments.profile is not None:
        try:
            profile = CostModel.fit(load_profile(arguments.profile))
        except OSError as error:
            raise ArgumentError(f"--profile: {error}") from error
    fields = (
        "trace gpus prefill decode tp model hardware hbm_gb dram_gb link_gb_s block_tokens rate rate_scale requests "
        "skip seed fetch learn batch_tokens batch_requests cap thrift"
    )
    given = {name: value for name in fields.split() if (value := getattr(arguments, name)) is not None}
    if arguments.whole_prompts:
        given["chunked"] = False
    if arguments.ttl is not None:
        if not arguments.ttl >= 0:
            raise ArgumentError(f"--ttl is {arguments.ttl}; it must be at least 0 seconds")
        given["ttl_s"] = arguments.ttl
    given["workload"] = arguments.workload or (None if arguments.trace else Setup.workload)
    given["policy"] = arguments.policy if arguments.policy in POLICIES else Setup.policy
    return Setup(profile=profile, **{**given, **changes})


def _simulated(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run, or one for each value of --sweep."""
    if arguments.gpus_max is not None:
        raise ArgumentError("--gpus-max is for --find-gpus")
    slo = _slo(arguments)
    setup = _setup(arguments)
    values: list[Any] = [None]
    field, what = "", ""
    if arguments.sweep:
        what, field, values = _swept(arguments.sweep)
        if field == "gpus" and setup.prefill:
            raise ArgumentError("--sweep gpus: with --prefill and --decode the number of GPUs is theirs")
    setups = [replace(setup, **{field: value}) if field else setup for value in values]
    for each in setups:  # all are checked before the first one takes its time
        workload = each.make_workload()
        each.check_sessions(workload)
        each.make_cluster(workload.block_tokens)
    runs = []
    for value, each in zip(values, setups, strict=True):
        with sim_show.Progress(arguments.quiet, f"{what}={value}" if what else each.policy, arguments.requests) as bar:
            runs.append(_entry(each, each.run(bar.told), value, slo))
    return {**_head(setup), "sweep": what or None, "slo": slo and _promise(slo), "runs": runs}


def _slo(arguments: argparse.Namespace) -> Slo | None:
    """The promised limits, if any. Raises ArgumentError."""
    share = _SHARE if arguments.slo_share is None else arguments.slo_share
    if arguments.slo_ttft is None and arguments.slo_tpot is None and not arguments.find_gpus:
        if arguments.slo_share is not None:
            raise ArgumentError("--slo-share is of --slo-ttft or --slo-tpot: neither is given")
        return None
    return Slo(arguments.slo_ttft, arguments.slo_tpot, share)


def _promise(slo: Slo) -> dict[str, Any]:
    return {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "share": slo.quantile}


def _swept(text: str) -> tuple[str, str, list[Any]]:
    """WHAT=A,B,... as its name, its field and its values."""
    what, _, given = text.partition("=")
    if what not in _SWEPT or not given:
        raise ArgumentError(f"--sweep {text}: it is WHAT=A,B,..., and WHAT one of {', '.join(_SWEPT)}")
    field, kind = _SWEPT[what]
    try:
        values = [kind(value) for value in given.split(",")]
    except ValueError as error:
        raise ArgumentError(f"--sweep {text}: {error}") from error
    if len(values) > _SWEPT_MAX:
        raise ArgumentError(f"--sweep {what}: {len(values)} values; at most {_SWEPT_MAX}")
    return what, field, values


def _found(arguments: argparse.Namespace) -> dict[str, Any]:
    """Finds the fewest GPUs that keep the promise."""
    if arguments.sweep:
        raise ArgumentError("--find-gpus and --sweep exclude each other")
    slo = _slo(arguments)
    assert slo is not None  # for --find-gpus there is one, or it is refused
    setup = _setup(arguments)
    gpus_max = _GPUS_MAX if arguments.gpus_max is None else arguments.gpus_max
    reasons: list[str] = []
    with sim_show.Progress(arguments.quiet, "find-gpus", None) as bar:
        found, tries = find_gpus(
            setup,
            slo,
            gpus_max,
            told=bar.told,
            tried=lambda each: bar.note(f"{each.setup.gpu_count} GPUs: {'kept' if each.kept else 'not kept'}"),
            hopeless=reasons.append,
        )
    return {
        **_head(setup),
        "sweep": "gpus",
        "slo": _promise(slo),
        "gpus_needed": found.setup.gpu_count if found else None,
        "gpus_max": gpus_max,
        "out_of_reach": reasons[0] if reasons else None,
        "runs": [_entry(each.setup, each.measures, each.setup.gpu_count, slo) for each in tries],
    }


def _packed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulates packing by MELL or one of its baselines."""
    given = {name: getattr(arguments, name) for name in _NOT_PACKED}
    useless = [name for name, value in given.items() if value is not None and value is not False]  # 0 is given
    if useless:
        options = ", ".join("--" + name.replace("_", "-") for name in useless)
        raise ArgumentError(
            f"--policy {arguments.policy} finds the number of GPUs itself, and packs what decodes alone: it has no use "
            f"for {options}"
        )
    setup = _setup(arguments)
    with sim_show.Progress(arguments.quiet, arguments.policy, arguments.requests) as bar:
        packed = pack(setup, arguments.policy, bar.told, arguments.slack)
    return {**_head(setup), "policy": arguments.policy, "packed": packed}


def _head(setup: Setup) -> dict[str, Any]:
    """A description of the simulation."""
    workload = setup.make_workload()
    measured = setup.profile is not None
    return {
        "workload": workload.name,
        "notes": list(workload.notes),
        "block_tokens": workload.block_tokens,
        "policy": setup.policy,
        "model": "measured profile" if measured else setup.model,
        "hardware": "measured profile" if measured else setup.hardware,
        "tp": setup.tp,
        "hbm_gb_per_gpu": setup.hbm_gb_each,
        "seed": setup.seed,
    }


def _entry(setup: Setup, measures: Measures, value: Any, slo: Slo | None) -> dict[str, Any]:
    """One run, ready for JSON; with a promise, whether it was kept, and for which share of the requests each limit."""
    promised = {} if slo is None else {"kept": slo.kept(measures), "within": slo.within(measures)}
    return {
        "value": value,
        "policy": setup.policy,
        "gpus": setup.gpu_count,
        "prefill": setup.prefill,
        "decode": setup.decode,
        "hbm_gb_per_gpu": setup.hbm_gb_each,
        "dram_gb_per_gpu": setup.dram_gb,
        **measures.as_json(),
        "ttft_cdf": _thin(measures.ttft_s.cumulative()),
        **promised,
    }


def _thin(points: list[tuple[float, float]], most: int = 200) -> list[tuple[float, float]]:
    """A sample of at most this many of them, including the last."""
    step = -(-len(points) // most) or 1
    return [*points[:-1:step], *points[-1:]]
