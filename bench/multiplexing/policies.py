"""The policies of many models: a step of quotas and of ADBS at 32 models, and placement of 19 models on 32 GPUs.

The models of the placement are those of MuxServe's Table 1, four sizes of Llamas by their shapes, with rates by a power
law (exponent 0.9, §4.2) and requests of ShareGPT's mean lengths. Times come from the roofline of an A100, without any
measurement. The largest rate is 20 requests a second, and half and double of that.
"""

from __future__ import annotations

from random import Random
from time import thread_time
from typing import Any

from bench.context import Context
from bench.measure import summarize, time_calls
from bench.remote import Remote
from bench.result import Report, Row
from kvpool.policy import multiplexing as mux
from kvpool.sim.hardware import GPUS, MODELS, roofline, weight_bytes

TITLE = "Many models: quotas and ADBS at 32 models, placement of 19 models on 32 GPUs"
PEERS: tuple[str, ...] = ()
_STEP_US, _PLACE_S, _SHARE = 100.0, 10.0, 95.0
_MODELS = 32
_CAPACITY = 5_000_000  # units of 16 KiB in 80 GB
_SIZES = ["llama-2-7b"] * 12 + ["llama-2-13b"] * 4 + ["qwen2.5-32b"] * 2 + ["llama-2-70b"]
_PROMPT, _OUTPUT = 161, 338
_EXPONENT = 0.9


class Subject:
    """The policies; see bench/remote.py."""

    def quotas(self, repeats: int) -> dict[str, float]:
        """Medians in microseconds: adapting all quotas, and making room with 31 neighbours to choose from."""
        dice = Random(1)
        rules = {f"m{at}": mux.QuotaRule(reserve=dice.randrange(50_000)) for at in range(_MODELS)}
        last = mux.first_quotas(_CAPACITY, rules, {model: dice.uniform(1e4, 1e6) for model in rules})
        seen = [
            {model: mux.Seen(dice.randrange(200_000), dice.randrange(200_000)) for model in rules}
            for _ in range(repeats)
        ]
        adapting = summarize(time_calls(lambda each: mux.adapt(last, _CAPACITY, rules, each, 5.0), seen))
        uses = {model: mux.Use(dice.randrange(50_000), 90_000) for model in rules}
        tier = mux.Tier(_CAPACITY, rules, uses, last.units)
        asked = [tier.free + dice.randrange(1, 100_000) for _ in range(repeats)]
        reclaiming = summarize(time_calls(lambda units: mux.reclaim(tier, "m0", units), asked))
        return {"adapt_us": adapting.median_us, "reclaim_us": reclaiming.median_us}

    def schedule(self, repeats: int) -> float:
        """Median in microseconds of a step of ADBS: all models have 8 prompts and 64 requests."""
        dice = Random(2)
        times = []
        for _ in range(repeats):
            models = [
                mux.ModelQueues(
                    f"m{at}",
                    tuple(mux.Waiting(each, dice.randrange(100, 2000)) for each in range(8)),
                    tuple(mux.Waiting(each, int(dice.random() < 0.06)) for each in range(100, 164)),
                    quota=_CAPACITY // _MODELS,
                    used=dice.randrange(_CAPACITY // _MODELS),
                    prefill_share=0.4,
                    decode_share=0.1,
                )
                for at in range(_MODELS)
            ]
            state = mux.State(models, dice.randrange(_CAPACITY))
            passed = mux.started(state, mux.ADBS().step(state)).turns
            state = mux.State(models, state.available, turns=passed)
            times += time_calls(mux.ADBS().step, [state])
        return summarize(times).median_us

    def place(self, rate: float) -> dict[str, Any]:
        """Processor time in seconds of the placement, and what it serves."""
        rates = [rate * (at + 1) ** -_EXPONENT for at in range(len(_SIZES))]
        models = served(_SIZES, rates)
        gpus = mux.Machines(4, 8, int(0.9 * 80e9))
        started = thread_time()
        found = mux.place(models, gpus)
        seconds = thread_time() - started
        return {
            "seconds": seconds,
            "served": found.throughput,
            "wanted": sum(rates),
            "units": [[unit.gpus, [placed.model for placed in unit.models]] for unit in found.units],
        }

    def compare(self, seed: int) -> float:
        """What the placement of 6 models on 4 GPUs serves, in per cent of the exhaustive search."""
        dice = Random(seed)
        names = [dice.choice(["llama-2-7b", "llama-2-13b", "llama-3-8b"]) for _ in range(6)]
        models = served(names, [dice.uniform(0.2, 25.0) for _ in names])
        gpus = mux.Machines(1, 4, int(0.9 * 80e9))
        return 100 * mux.place(models, gpus).throughput / mux.exhaustive(models, gpus).throughput


def served(names: list[str], rates: list[float]) -> list[mux.ServedModel]:
    """Models of these shapes with these rates."""
    made = []
    order = list(range(len(names)))
    Random(0).shuffle(order)  # which sizes are popular
    for at, rate in zip(order, rates, strict=True):
        shape = MODELS[names[at]]
        gpu = GPUS["A100-80GB"]
        link = roofline(shape, gpu, 2).parallel.tp_link
        made.append(
            mux.ServedModel(
                f"{names[at]}/{at}",
                rate,
                _PROMPT,
                _OUTPUT,
                weight_bytes(shape),
                shape.kv_bytes_per_token,
                mux.CostTiming(roofline(shape, gpu), link),
            )
        )
    return made


def run(context: Context) -> Report:
    report = Report()
    with Remote(__name__) as subject:
        steps = subject.ask("quotas", repeats=context.pick(200, 2000))
        adbs_us = subject.ask("schedule", repeats=context.pick(50, 300))
        report.rows += [
            Row("quotas of 32 models adapt", steps["adapt_us"], "us", _STEP_US),
            Row("room is made with 31 neighbours", steps["reclaim_us"], "us", _STEP_US),
            Row("a step of ADBS at 32 models", adbs_us, "us", _STEP_US),
        ]
        for rate in (20.0,) if context.quick else (10.0, 20.0, 40.0):
            placed = subject.ask("place", rate=rate)
            what = f"19 models on 32 GPUs, at most {rate:g} requests/s"
            report.rows.append(Row(f"{what}: time", placed["seconds"], "s", _PLACE_S, details=placed))
            part = 100 * placed["served"] / placed["wanted"]
            report.rows.append(Row(f"{what}: served of what comes", part, "%", better="higher"))
        shares = [subject.ask("compare", seed=seed) for seed in range(1, context.pick(4, 21))]
        report.rows.append(
            Row(
                "least share of the exhaustive search, 4 GPUs",
                min(shares),
                "%",
                _SHARE,
                "higher",
                details={"all": shares},
            )
        )
    report.notes.append("Rates and times are estimates of the policy's own model; processor time of one thread.")
    return report
