"""match, insert and evict in a tree of many prompts of 4,096 tokens, half of them shared.

kvpool twice: the index alone, whose values are opaque, and a pool, whose values are its blocks, tiny ones, so that as
many prompts fit. The peers answer the same questions about the same prompts.
"""

from __future__ import annotations

from functools import partial
from statistics import median

from bench.context import Context
from bench.measure import Sample, interleave
from bench.remote import Remote
from bench.result import Report, Row, timed_row
from bench.workload import Prompts

TITLE = "Prompt index: prompts of 4,096 tokens (256 blocks of 16), the first half one of 100 system prompts"
_SHAPE = Prompts(4096, 2048)
_TINY_LEAVES = Prompts(4096, 4080)
_SGLANG = ("SGLang Rust", "SGLang Python")
_VLLM_PROMPTS = 1000
_ROUNDS = 5
_SUBJECT = "bench.api.index_subject"


def run(context: Context) -> Report:
    report = Report()
    prompts = context.pick(5_000, 100_000)
    _measure_index(context, report, prompts)
    _measure_pool(context, report, prompts)
    _measure_small(context, report)
    report.notes += [
        "SGLang: its match and the collection of the indices, as ours gives the addresses; match alone is in the JSON.",
        f"vLLM: {_VLLM_PROMPTS:,} prompts, its hashes computed before and not counted (see fig10), and no pins.",
        "insert: with the release of its pins. Half new: the system prompt is there.",
        "Eviction: the target is 1 us a leaf and 0.05 us a block.",
    ]
    return report


def _measure_index(context: Context, report: Report, prompts: int) -> None:
    with context.subjects(_SUBJECT, *_SGLANG, "vLLM") as subjects:
        subjects["kvpool"].ask("build", kind="index", prompts=prompts, tokens=_SHAPE.tokens, shared=_SHAPE.shared)
        build = {"tokens": _SHAPE.tokens, "shared": _SHAPE.shared}
        trees = {name: remote for name, remote in subjects.items() if name != "vLLM"}
        context.ask_peers(trees, "build", prompts=prompts, **build)
        blocks = {name: remote for name, remote in subjects.items() if name == "vLLM"}
        context.ask_peers(blocks, "build", prompts=_VLLM_PROMPTS, **build)
        for remote in trees.values():
            remote.ask("check")

        n = context.pick(60, 400)
        collected = _ask(trees, "collect_random", n, seeds=True) | _ask(blocks, "match_random", n, seeds=True)
        matched = _ask({name: trees[name] for name in _SGLANG if name in trees}, "match_random", n, seeds=True)
        report.rows.append(_match_row(f"match, random prompt of {prompts:,}", 5, collected, matched, prompts))
        collected = _ask(trees, "collect_same", n) | _ask(blocks, "match_same", n)
        matched = _ask({name: trees[name] for name in _SGLANG if name in trees}, "match_same", n)
        report.rows.append(_match_row("match, same prompt again", 2, collected, matched, prompts))
        own = {"kvpool": subjects["kvpool"]}
        lists = _ask(own, "collect_lists", n, seeds=True)
        report.rows.append(timed_row("match, a list of ints, random prompt", lists, 30, prompts=prompts))

        n = context.pick(20, 60)
        new = _ask({**trees, **blocks}, "insert_new", n)
        report.rows.append(timed_row("insert, half new, contiguous values", new, 15, prompts=prompts))
        for what, target, options in _INSERTIONS:
            report.rows.append(timed_row(f"insert, {what} values", _ask(own, "insert_new", n, **options), target))
        _measure_eviction(context, report, trees, "index", prompts)


_INSERTIONS = (
    ("half new, scattered", 20, {"scattered": True}),
    ("all new, contiguous", 15, {"shared": False}),
    ("all new, scattered", 20, {"shared": False, "scattered": True}),
)


def _measure_pool(context: Context, report: Report, prompts: int) -> None:
    with Remote(_SUBJECT) as pool:
        pool.ask("build", kind="pool", prompts=prompts, tokens=_SHAPE.tokens, shared=_SHAPE.shared)
        pool.ask("check")
        own = {"kvpool": pool}
        n = context.pick(60, 400)
        for what, operation, target, seeds in (
            (f"match, random prompt of {prompts:,}", "collect_random", 5, True),
            ("match, same prompt again", "collect_same", 2, False),
            ("match, a list of ints, random prompt", "collect_lists", 30, True),
        ):
            report.rows.append(
                timed_row(f"Pool: {what}", _ask(own, operation, n, seeds=seeds), target, prompts=prompts)
            )
        n = context.pick(20, 60)
        for what, target, options in (("half new, contiguous", 15, {}), *_INSERTIONS):
            samples = _ask(own, "insert_new", n, **options)
            report.rows.append(timed_row(f"Pool: insert, {what} blocks", samples, target, prompts=prompts))
        _measure_eviction(context, report, own, "pool", prompts)


def _measure_small(context: Context, report: Report) -> None:
    """Eviction from a small tree, for comparison, and of leaves of a single block."""
    with context.subjects(_SUBJECT, *_SGLANG) as subjects:
        subjects["kvpool"].ask("build", kind="index", prompts=1000, tokens=_SHAPE.tokens, shared=_SHAPE.shared)
        context.ask_peers(subjects, "build", prompts=1000, tokens=_SHAPE.tokens, shared=_SHAPE.shared)
        _measure_eviction(context, report, subjects, "index", 1000)
    prompts = context.pick(5_000, 100_000)
    with Remote(_SUBJECT) as tree:
        tree.ask("build", kind="index", prompts=prompts, tokens=_TINY_LEAVES.tokens, shared=_TINY_LEAVES.shared)
        row = Row(
            what=f"evict {prompts // 20:,} leaves of 1 block at once, {prompts:,} prompts, a leaf",
            value=_median_eviction_us(tree, prompts // 20),
            target=_eviction_target_us(1),
        )
        report.rows.append(row)


def _measure_eviction(context: Context, report: Report, subjects: dict[str, Remote], kind: str, prompts: int) -> None:
    """Takes its leaves away from the tree, so it comes last."""
    blocks = _SHAPE.leaf_blocks
    prefix = "Pool: " if kind == "pool" else ""
    # A call of SGLang's Python tree takes a sixth of a second at 100,000 prompts.
    times = {
        name: partial(remote.ask, "evict_leaf", n=2 if name == "SGLang Python" else 40)
        for name, remote in subjects.items()
    }
    what = f"{prefix}evict a leaf of {blocks} blocks, {prompts:,} prompts"
    report.rows.append(timed_row(what, interleave(times, _ROUNDS), _eviction_target_us(blocks), prompts=prompts))
    leaves = prompts // 20
    row = Row(
        what=f"{prefix}evict {leaves:,} leaves of {blocks} blocks at once, {prompts:,} prompts, a leaf",
        value=_median_eviction_us(subjects["kvpool"], leaves),
        target=_eviction_target_us(blocks),
    )
    report.rows.append(row)


def _median_eviction_us(tree: Remote, leaves: int) -> float:
    """Of a leaf, over several calls that evict so many each."""
    times: list[float] = [tree.ask("evict_leaves", leaves=leaves) for _ in range(_ROUNDS)]
    return median(times)


def _eviction_target_us(blocks: int) -> float:
    return 1 + 0.05 * blocks


def _ask(
    subjects: dict[str, Remote], operation: str, n: int, *, seeds: bool = False, **options: bool
) -> dict[str, Sample]:
    """Asks the subjects in turns; with seeds, each round about other prompts, the same for all."""
    if not subjects:
        return {}
    rounds = {name: iter(range(_ROUNDS)) for name in subjects}

    def times(name: str) -> list[float]:
        seed = {"seed": 100 + next(rounds[name])} if seeds else {}
        answer: list[float] = subjects[name].ask(operation, n=n, **seed, **options)
        return answer

    return interleave({name: partial(times, name) for name in subjects}, _ROUNDS)


def _match_row(what: str, target: float, collected: dict[str, Sample], matched: dict[str, Sample], prompts: int) -> Row:
    alone = {name: sample.median_us for name, sample in matched.items()}
    return timed_row(what, collected, target, prompts=prompts, peers_without_indices_us=alone)
