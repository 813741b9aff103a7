"""The study of MuxServe (§4): its models, its baselines, and what is measured of a run, on assumed GPUs.

Assumed, beside the data sheets and efficiencies of `hardware`:

- The host launches the kernels of a step one by one: a decode step takes at least 0.39 ms a layer, a prefill 0.63 ms.
  The profile that MuxServe's authors publish (`examples/placement/llama.json` of their repository) shows it: 12.6, 16,
  23.5 and 31 ms a step for LLaMA 7B, 13B, 30B and 65B on four and eight A100s, whatever the batch up to 32. GRAPHS is
  an engine that launches a whole step at once.
- An all-reduce within a node takes 7 us and 1.5 us a step of its ring, beside its bytes.
- Lengths are log-normal with ShareGPT's means, 161 and 338 tokens, and at most 2,048.
- A tenth of each GPU's memory is for activations and libraries, in all designs and however many models share the GPU.
  Each process of an engine needs some, so this favours designs that share.
- A prefill job begins with half of the compute, also where the placement gives its model more: the estimate counts with
  that, and so with less time. With ADBS a job gets more where nobody waits for it; one of FCFS or by steps has all.
- A request is in time if it ends within SLO scale times what it takes alone, on the fewest GPUs that hold its model.

Throughput is the paper's: requests a second of each model, weighted by its part of all requests. Only requests that end
within the measured window count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Final, Literal

from kvpool.errors import ArgumentError
from kvpool.policy import multiplexing as mux
from kvpool.sim.hardware import GPUS, MODELS, roofline, weight_bytes
from kvpool.sim.loop import Loop
from kvpool.sim.multiplexing_memory import UNIT_BYTES, MeshMemory, Sharing
from kvpool.sim.multiplexing_mesh import Mesh, Resident, Scheduler
from kvpool.sim.multiplexing_requests import Counts, Request
from kvpool.sim.multiplexing_times import JobTimes, Launches, Ring
from kvpool.sim.multiplexing_workload import SHAREGPT, Lengths, ModelArrival

__all__ = [
    "DESIGNS",
    "EAGER",
    "GRAPHS",
    "HARDWARE",
    "MIXED",
    "TABLE_1",
    "Design",
    "Outcome",
    "Window",
    "machines",
    "serve",
    "served_models",
]

HARDWARE: Final = "A100-80GB"
EAGER: Final = Launches(prefill_s=0.63e-3, decode_s=0.39e-3)
GRAPHS: Final = Launches()
_ALL_REDUCE_S, _RING_STEP_S = 7e-6, 1.5e-6
_OF_THE_DATA_SHEET: Final = 0.8
_USABLE: Final = 0.9

# Table 1: 4B-8B, 8B-21B, 21B-41B and 41B-70B.
TABLE_1: Final = ("llama-2-7b",) * 12 + ("llama-2-13b",) * 4 + ("llama-30b",) * 2 + ("llama-65b",)
# The real workload of §4.3 has 16 models; the sizes are those that the authors' repository names for it.
MIXED: Final = ("llama-2-7b",) * 4 + ("llama-2-13b",) * 6 + ("llama-30b",) * 3 + ("llama-65b",) * 3


@dataclass(frozen=True)
class Design:
    """A way to serve many models.

    Attributes:
        name: For a person.
        place: Makes the placement.
        scheduler: Of each mesh.
        sharing: Of its memory.
    """

    name: str
    place: Callable[[Sequence[mux.ServedModel], mux.Machines], mux.Placement]
    scheduler: Scheduler
    sharing: Sharing = "unified"


DESIGNS: Final = (
    Design("muxserve", mux.place, mux.ADBS()),
    Design("spatial", mux.spatial, mux.FCFS()),
    Design("temporal", mux.place, mux.Temporal()),
)


def machines(nodes: int = 4, gpus: int = 8) -> mux.Machines:
    """Nodes of HARDWARE; a tenth of each GPU's memory is for activations and libraries."""
    return mux.Machines(nodes, gpus, int(_USABLE * GPUS[HARDWARE].memory_gb * 1e9))


def served_models(
    shapes: Sequence[str],
    rates: Sequence[float],
    lengths: Lengths | Sequence[Lengths] = SHAREGPT,
    launches: Launches = EAGER,
    shuffle: int | None = None,
) -> list[mux.ServedModel]:
    """Models with their workloads.

    Args:
        shapes: Names of `hardware.MODELS`.
        rates: Requests a second of each.
        lengths: Of their requests; of all, or of each.
        launches: Of the host.
        shuffle: A seed by which rates go to models in a random order; None: in the order given.

    Raises:
        ArgumentError: There are not as many rates as models.
    """
    if len(shapes) != len(rates):
        raise ArgumentError(f"{len(shapes)} models and {len(rates)} rates")
    order = list(range(len(rates)))
    if shuffle is not None:
        Random(shuffle).shuffle(order)
    gpu = GPUS[HARDWARE]
    times = {name: JobTimes(roofline(MODELS[name], gpu), _ring(), launches) for name in dict.fromkeys(shapes)}
    made = []
    for at, name in enumerate(shapes):
        of = lengths if isinstance(lengths, Lengths) else lengths[at]
        shape = MODELS[name]
        made.append(
            mux.ServedModel(
                f"{name}/{at}",
                rates[order[at]],
                round(of.prompt),
                round(of.output),
                weight_bytes(shape),
                shape.kv_bytes_per_token,
                times[name],
            )
        )
    return made


def _ring() -> Ring:
    """Between the GPUs of a node."""
    return Ring(GPUS[HARDWARE].peer_bytes_per_s * _OF_THE_DATA_SHEET, _ALL_REDUCE_S, _RING_STEP_S)


@dataclass(frozen=True)
class Window:
    """Which requests are measured.

    Attributes:
        seconds: Until when requests come.
        warm_up_s: When measuring begins.
        slo_max: The largest SLO scale that is asked for: requests have so long to end after the last has come.
    """

    seconds: float = 80.0
    warm_up_s: float = 20.0
    slo_max: float = 8.0

    def __post_init__(self) -> None:
        if not 0 <= self.warm_up_s < self.seconds or self.slo_max < 0:
            raise ArgumentError(f"a warm-up of {self.warm_up_s} s in {self.seconds} s, SLO scales to {self.slo_max}")


@dataclass(frozen=True)
class Outcome:
    """What a design made of a workload.

    Attributes:
        models: With their rates.
        window: What was measured.
        requests: All that came.
        counts: Of each mesh.
        placement: The meshes.
    """

    models: Sequence[mux.ServedModel]
    window: Window
    requests: Sequence[Request]
    counts: Sequence[Counts]
    placement: mux.Placement
    _by_name: dict[str, mux.ServedModel] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {model.name: model for model in self.models})

    @cached_property
    def throughputs(self) -> dict[str, float]:
        """Requests a second that ended within the window, by model."""
        begin, end = self.window.warm_up_s, self.window.seconds
        found = dict.fromkeys(self._by_name, 0.0)
        for request in self.requests:
            if begin <= request.end_s < end:
                found[request.model] += 1 / (end - begin)
        return found

    @property
    def requests_s(self) -> float:
        """Of all models, not weighted."""
        return sum(self.throughputs.values())

    @property
    def weighted(self) -> float:
        """The paper's throughput: weighted by the rates."""
        rates = {model.name: model.rate for model in self.models}
        return sum(each * rates[name] for name, each in self.throughputs.items()) / sum(rates.values())

    def attainment(self, scale: float) -> float:
        """The part of the measured requests that ended within `scale` times what they take alone."""
        if not 0 < scale <= self.window.slo_max:
            raise ArgumentError(f"an SLO scale of {scale}: above 0, at most {self.window.slo_max:g}")
        measured = [each for each in self.requests if each.time_s >= self.window.warm_up_s]
        met = sum(
            each.end_s >= 0 and each.end_s - each.time_s <= scale * alone_s(self._by_name[each.model], each)
            for each in measured
        )
        return met / max(1, len(measured))

    def total(self, of: Literal["arrived", "refused", "ended", "tokens", "computed", "jobs", "stopped"]) -> int:
        """A count over all meshes."""
        return sum(getattr(each, of) for each in self.counts)


def alone_s(model: mux.ServedModel, request: Request) -> float:
    """Seconds that a request takes alone on the fewest GPUs that hold its model and it."""
    timing = model.timing
    needed = model.weight_bytes + (request.prompt + request.output) * model.kv_bytes_per_token
    per_gpu = machines(1, 1).mesh_bytes(1)
    tp = next((each for each in sorted(model.tp_degrees) if each * per_gpu >= needed), max(model.tp_degrees))
    steps = request.output - 1
    decode_s = timing.decode_s(1.0, 1, request.prompt + steps // 2, tp) if steps else 0.0
    return timing.prefill_s(1.0, 1, request.prompt, tp) + steps * decode_s


def serve(
    placement: mux.Placement,
    models: Sequence[mux.ServedModel],
    arrivals: Sequence[ModelArrival],
    gpus: mux.Machines,
    scheduler: Scheduler,
    sharing: Sharing = "unified",
    window: Window | None = None,
    growth: bool = True,
    check: bool = False,
) -> Outcome:
    """Runs the requests over the meshes of a placement.

    Args:
        placement: Of these models.
        models: As they were placed.
        arrivals: Within the window, in order.
        gpus: For their memory.
        scheduler: Of each mesh.
        sharing: Of memory.
        window: What is measured.
        growth: As in `MeshMemory`.
        check: Whether to check the invariants after each event; for tests.
    """
    window = window or Window()
    by_name = {model.name: model for model in models}
    measured = (window.warm_up_s, window.seconds)
    requests: list[Request] = []
    counts = []
    of_model: dict[str, list[ModelArrival]] = {name: [] for name in by_name}
    for each in arrivals:
        of_model[each.model].append(each)
    for unit in placement.units:
        members = [by_name[placed.model] for placed in unit.models]
        room = gpus.mesh_bytes(unit.gpus) - sum(model.weight_bytes for model in members)
        memory = MeshMemory(room // UNIT_BYTES, members, sharing, growth)
        loop = Loop()
        residents = [_resident(by_name[placed.model], placed) for placed in unit.models]
        mesh = Mesh(residents, unit.gpus, scheduler, memory, loop, measured)
        comes = sorted(each for model in members for each in of_model[model.name])
        until = window.seconds
        for each in comes:
            request = Request(each.model, each.time_s, each.prompt, each.output)
            loop.at(each.time_s, mesh.arrive, request)
            until = max(until, each.time_s + window.slo_max * alone_s(by_name[each.model], request))
        mesh.run(until, check)
        requests += mesh.requests
        counts.append(mesh.counts)
    return Outcome(models, window, requests, counts, placement)


def _resident(model: mux.ServedModel, placed: mux.Placed) -> Resident:
    times = model.timing
    if not isinstance(times, JobTimes):
        raise ArgumentError(f"{model.name!r} has times of {type(times).__name__}: a simulation needs JobTimes")
    return Resident(model, times, placed.share, model.prefill_share)
