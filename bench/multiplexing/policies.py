"""The policies of many models: a step of quotas and of ADBS at 32 models, and placement of 19 models on 32 GPUs.

The models of the placement are those of MuxServe's Table 1, four sizes of Llamas by their shapes, with rates by a power
law (exponent 0.9, §4.2) and requests of ShareGPT's mean lengths. Times come from the roofline of an A100, without any
measurement. The largest rate is 20 requests a second, and half and double of that.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
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
_TOKENS, _UNITS = 16, 32  # of a block: a unit is 16 KiB, and a token of a model of 7B in half precision 32 of them
_WARM_UP = 200  # steps
_STEADY = 1.1  # the memory, as a multiple of what requests hold at first: prompts wait for memory
_PRESSURE = 1.0  # likewise: decode waits for memory, too


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

    def schedule(self, steps: int, memory: float) -> dict[str, float]:
        """Microseconds of steps of ADBS, one after the other, in a memory that is full: see `Engine`."""
        engine = Engine(Random(2), memory)
        for _ in range(_WARM_UP):
            engine.step()
        sample = summarize([engine.step() for _ in range(steps)])
        return {"median_us": sample.median_us, "p99_us": sample.p99_us, **engine.seen()}

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


class Engine:
    """32 models that run by ADBS, with 64 requests and 8 prompts each: each answer that ends makes a prompt come.

    Half of the running jobs end between two steps. A token more takes a block for one request in sixteen. An answer
    ends with a probability of 1 / 338 a token. If nothing can go on, the request that `preemption` names starts anew.

    Args:
        dice: For lengths and ends.
        memory: The capacity, as a multiple of what the requests hold at first.
    """

    def __init__(self, dice: Random, memory: float) -> None:
        self._dice = dice
        self._next = 0
        self._held: dict[Hashable, int] = {}  # units, by request
        self._of: dict[Hashable, str] = {}  # the model
        names = [f"m{at}" for at in range(_MODELS)]
        decode = {name: [self._request(name) for _ in range(64)] for name in names}
        for request in self._of:
            self._held[request] = self._prompt() + _UNITS * dice.randrange(_OUTPUT // _TOKENS)
        self._capacity = int(memory * sum(self._held.values()))
        quotas = mux.targets(
            self._capacity,
            {name: mux.QuotaRule() for name in names},
            {name: float(self._used(name)) for name in names},
        )
        self._state = mux.State(
            [
                mux.ModelQueues(
                    name,
                    tuple(self._waiting(self._request(name)) for _ in range(8)),
                    tuple(self._waiting(request) for request in decode[name]),
                    quota=quotas[name],
                    used=self._used(name),
                    prefill_share=0.4,
                    decode_share=0.1,
                    limit=self._capacity,
                )
                for name in names
            ],
            self._free(),
        )
        self._jobs = self._lacking = self._steps = self._preempted = 0

    def step(self) -> float:
        """A step, and what happens until the next one. Returns the microseconds that ADBS has taken."""
        jobs: list[mux.Job] = []
        (took,) = time_calls(lambda state: jobs.extend(mux.ADBS().step(state)), [self._state])
        self._steps += 1
        self._jobs += len(jobs)
        self._lacking += any(
            each.decode and each.decode[0].units > self._state.available for each in self._state.models
        )
        stopped = None if jobs or self._state.running else mux.preemption(self._state)
        before = {each.request: each.units for model in self._state.models for each in (*model.prefill, *model.decode)}
        for job in jobs:
            for request in job.requests:
                self._held[request] = self._held.get(request, 0) + before[request]
        state = mux.started(self._state, jobs)
        ended = list(state.running[: -(-len(state.running) // 2)])
        self._preempted += stopped is not None
        self._state = self._after(state, ended, stopped)
        return took

    def seen(self) -> dict[str, float]:
        """Measures of the states that the steps met, which show whether each state is as its name says."""
        return {
            "free_percent": 100 * self._free() / self._capacity,
            "lacking_percent": 100 * self._lacking / self._steps,
            "jobs": self._jobs / self._steps,
            "preempted": self._preempted / self._steps,
        }

    def _after(self, state: mux.State, ended: list[mux.Job], stopped: mux.Job | None) -> mux.State:
        """The next state: requests of ended jobs wait for a token more, or have their answers."""
        come: dict[str, list[Hashable]] = {}
        go_on: dict[str, list[Hashable]] = {}
        for job in ended:
            for request in job.requests:
                if job.phase == "decode" and self._dice.random() < 1 / _OUTPUT:
                    del self._held[request], self._of[request]
                    come.setdefault(job.model, []).append(self._request(job.model))
                else:
                    go_on.setdefault(job.model, []).append(request)
        gone = set() if stopped is None else set(stopped.requests)
        for request in gone:
            del self._held[request]
            come.setdefault(self._of[request], []).append(request)
        models = []
        for model in state.models:
            prefill = (*model.prefill, *map(self._waiting, come.get(model.name, ())))
            left = tuple(each for each in model.decode if each.request not in gone)
            decode = (*left, *map(self._waiting, go_on.get(model.name, ())))
            models.append(replace(model, prefill=prefill, decode=decode, used=self._used(model.name)))
        return replace(state, models=models, available=self._free(), running=state.running[len(ended) :])

    def _request(self, model: str) -> Hashable:
        self._next += 1
        self._of[self._next] = model
        return self._next

    def _waiting(self, request: Hashable) -> mux.Waiting:
        if request not in self._held:
            return mux.Waiting(request, self._prompt())
        return mux.Waiting(request, _UNITS * (self._dice.randrange(_TOKENS) == 0))

    def _prompt(self) -> int:
        return _UNITS * self._dice.randrange(1, 2 * _PROMPT // _TOKENS)

    def _used(self, model: str) -> int:
        return sum(units for request, units in self._held.items() if self._of[request] == model)

    def _free(self) -> int:
        return self._capacity - sum(self._held.values())


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
        few = context.pick(100, 1000)
        steady = subject.ask("schedule", steps=few, memory=_STEADY)
        pressed = subject.ask("schedule", steps=few, memory=_PRESSURE)
        report.rows += [
            Row("quotas of 32 models adapt", steps["adapt_us"], "us", _STEP_US),
            Row("room is made with 31 neighbours", steps["reclaim_us"], "us", _STEP_US),
            Row(
                "a step of ADBS at 32 models, memory full, steady", steady["median_us"], "us", _STEP_US, details=steady
            ),
            Row("the same, requests wait for memory", pressed["median_us"], "us", _STEP_US, details=pressed),
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
