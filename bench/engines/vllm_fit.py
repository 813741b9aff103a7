"""The simulator's engine against vLLM: times to the first token and between tokens, at loads that the fit has not seen.

vLLM runs on the CPU, with a llama of random weights. First it serves requests all at once, and then at half the rate
that this gave; the times of its steps make a cost model (`kvpool.policy.cost.fit_steps`). Then it serves other requests
at three loads, and the simulator the same requests at the same times.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.context import Context
from bench.engines.vllm_engine import BLOCK, BLOCKS, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS
from bench.engines.vllm_ttft import PYTHON, Process
from bench.result import Report, Row, Skipped
from kvpool.policy import cost, routing
from kvpool.sim.cluster import Cluster, ClusterSim
from kvpool.sim.instance import Batching
from kvpool.sim.measures import Measures
from kvpool.sim.requests import SimRequest

TITLE = "The simulator fitted to vLLM on the CPU, at loads that the fit has not seen"
PEERS: set[str] = set()
SHAPE = cost.ModelShape(LAYERS, HIDDEN, HEADS, KV_HEADS, 2 * HIDDEN, 512, HEAD_DIM, "bfloat16")
_BATCHING = Batching(batch_tokens=256, batch_requests=8)
_PROMPT, _ANSWER = (32, 768), (8, 64)  # tokens, evenly spread
_LOADS = (0.3, 0.5, 0.7)  # of the requests a second when all come at once
_ERROR_MOST = 10.0  # percent

Requests = list[list[float]]


def run(context: Context) -> Report:
    if not list(PYTHON.parents[1].glob("lib/python*/site-packages/vllm")):
        raise Skipped(f"vLLM is not installed in {PYTHON}: make test-engines installs it")
    fitted_of = context.pick(16, 60), context.pick(16, 120)
    count = context.pick(12, 150)
    report = Report()
    with tempfile.TemporaryDirectory() as name:
        engine = Process(Path(name), "bench.engines.vllm_steps")
        try:
            arguments = {
                "max_num_batched_tokens": _BATCHING.batch_tokens,
                "max_num_seqs": _BATCHING.batch_requests,
                "async_scheduling": False,
            }
            versions = engine(
                "start", model=str(Path(name) / "model"), connector=False, max_len=1024, arguments=arguments
            )
            engine("serve", requests=requests_of(8, None, 0), seed=0)  # warms up
            model, rate = _fit(engine, fitted_of, report)
            for number, load in enumerate(_LOADS):
                report.rows += _compare(engine, model, load, requests_of(count, load * rate, 10 + number), 10 + number)
        finally:
            engine.close()
    report.notes = [
        f"vLLM {versions['vllm']}, torch {versions['torch']}, on the CPU, one process; a llama with random weights, "
        f"{LAYERS} layers, {HIDDEN} wide. Prompts of {_PROMPT[0]} to {_PROMPT[1]} tokens, answers of {_ANSWER[0]} to "
        f"{_ANSWER[1]}; {_BATCHING.batch_tokens} tokens a step, {_BATCHING.batch_requests} requests.",
        f"Fitted to {sum(fitted_of)} requests; {count} others at each load, a share of {rate:.2f} requests a second.",
    ]
    return report


def requests_of(count: int, rate: float | None, seed: int) -> Requests:
    """(seconds, tokens of the prompt, tokens of the answer); random arrivals, or with no rate all at once."""
    dice = np.random.default_rng(seed)
    times = np.zeros(count) if rate is None else np.cumsum(dice.exponential(1 / rate, count))
    prompts, answers = (dice.integers(least, most + 1, count) for least, most in (_PROMPT, _ANSWER))
    return [[float(t), int(p), int(a)] for t, p, a in zip(times, prompts, answers, strict=True)]


def _fit(engine: Process, counts: tuple[int, int], report: Report) -> tuple[cost.CostModel, float]:
    """The cost model, and the requests a second that the engine can do."""
    burst = engine("serve", requests=requests_of(counts[0], None, 1), seed=1)
    rate = counts[0] / max(burst["last"])
    spread = engine("serve", requests=requests_of(counts[1], 0.5 * rate, 2), seed=2)
    steps = [
        cost.Step(seconds, tuple((new, before) for new, before in parts))
        for seconds, parts in burst["steps"] + spread["steps"]
    ]
    model = cost.fit_steps(SHAPE, steps, BLOCK)
    predicted = [model.batch_s([(new + before, before) for new, before in step.parts]) for step in steps]
    errors = cost.ErrorReport.of(predicted, [step.seconds for step in steps])
    report.rows.append(
        Row(
            "error of a step in the fit, mean",
            100 * errors.mean,
            "%",
            details={"steps": len(steps), "all": str(errors)},
        )
    )
    return model, rate


def simulated(model: cost.CostModel, requests: Requests) -> Measures:
    """What the simulator predicts for one engine that gets these."""
    cluster = Cluster(model, BLOCK, hbm_blocks=BLOCKS, colocated=1, policy=routing.LeastLoad, batching=_BATCHING)
    blocks = -(-_PROMPT[1] // BLOCK)

    def arrivals() -> Any:
        for number, (time_s, prompt, answer) in enumerate(requests):
            ids = np.arange(number * blocks, number * blocks + -(-int(prompt) // BLOCK), dtype=np.int32)
            yield SimRequest(time_s, ids, int(prompt), int(answer))

    return ClusterSim(cluster).run(arrivals())


def _compare(engine: Process, model: cost.CostModel, load: float, requests: Requests, seed: int) -> list[Row]:
    told = engine("serve", requests=requests, seed=seed)
    done = simulated(model, requests)
    ttft_s = [first - request[0] for first, request in zip(told["first"], requests, strict=True)]
    tpot_s = [
        (last - first) / (request[2] - 1)
        for first, last, request in zip(told["first"], told["last"], requests, strict=True)
    ]
    rows = []
    for what, measured, predicted in (("TTFT", ttft_s, done.ttft_s.mean), ("TPOT", tpot_s, done.tpot_s.mean)):
        real = sum(measured) / len(measured)
        error = 100 * abs(predicted - real) / real
        at = f"load {load:.0%}: {what}"
        rows.append(Row(f"{at}, mean, simulated", 1e3 * predicted, "ms", peers={"vLLM": 1e3 * real}))
        rows.append(Row(f"{at}, error", error, "%", target=_ERROR_MOST))
    return rows
