"""What a unit, a mesh of GPUs with the models on it, would serve: eq. 3, Algorithm 2, and the limits of memory.

Eq. 3: a batch of b requests of model m ends after the prefills of all models, one after the other, and m's own decode:

    throughput(m) = min(b_m / (sum over i of t_p(i) + t_d(m) * l_o(m)), W_m)

W_b is printed where the rate W_m of the model is meant. Decode jobs of all models run beside each other. Where their
shares sum up to more than the mesh, they take turns; and where they would read more than the memory gives, they wait
for it. t_d grows by the larger factor of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvpool.errors import ArgumentError
from kvpool.policy.multiplexing.timing import Timing
from kvpool.policy.quotas.arguments import number_above_0, power_of_2, share_of, whole

__all__ = ["BATCH_MAX", "SHARES", "Candidate", "Machines", "ServedModel", "Unit", "candidates", "estimate_unit"]

SHARES: Final = tuple(step / 10 for step in range(1, 11))
BATCH_MAX: Final = 256
_ROUNDS: Final = 8  # of the mutual dependence of batches; it converges in two or three, or memory ends it
_MET: Final = 1 - 1e-9
_NEARLY_MOST: Final = 0.95  # of what the best share serves, where none meets the rate: the rest is for other models


@dataclass(frozen=True)
class ServedModel:
    """A model and its workload.

    Attributes:
        name: Of the model.
        rate: Requests a second, W_m; 0 for one that is kept ready only.
        prompt_tokens: Of a request, on average.
        output_tokens: Likewise.
        weight_bytes: Of one replica.
        kv_bytes_per_token: Of all layers.
        timing: How long its jobs take.
        tp_degrees: The numbers of GPUs that it may be split over: powers of two, as meshes have.
        prefill_share: The least share of a prefill job. The estimate counts with its unit's share if that is more; what
            a scheduler gives is `ModelQueues.prefill_share`.
    """

    name: str
    rate: float
    prompt_tokens: int
    output_tokens: int
    weight_bytes: int
    kv_bytes_per_token: int
    timing: Timing
    tp_degrees: tuple[int, ...] = (1, 2, 4, 8)
    prefill_share: float = 0.5

    def __post_init__(self) -> None:
        number_above_0(self.rate, f"the rate of {self.name!r}", zero=True)
        for what in ("prompt_tokens", "output_tokens", "weight_bytes", "kv_bytes_per_token"):
            whole(getattr(self, what), f"{what} of {self.name!r}", 1)
        share_of(self.prefill_share, f"prefill_share of {self.name!r}")
        if not self.tp_degrees:
            raise ArgumentError(f"{self.name!r} has no parallelism that it may run with")
        for degree in self.tp_degrees:
            power_of_2(degree, f"a parallelism of {self.name!r}")

    @property
    def request_bytes(self) -> int:
        """KV of a request at its end."""
        return (self.prompt_tokens + self.output_tokens) * self.kv_bytes_per_token


@dataclass(frozen=True)
class Machines:
    """Equal nodes of equal GPUs.

    Attributes:
        nodes: How many.
        gpus: Of a node. Tensor parallelism stays within a node.
        gpu_bytes: Memory of a GPU.
        activation_bytes: Of these, kept for activations.
    """

    nodes: int
    gpus: int
    gpu_bytes: int
    activation_bytes: int = 0

    def __post_init__(self) -> None:
        whole(self.nodes, "nodes", 1)
        whole(self.gpus, "gpus", 1)
        whole(self.gpu_bytes, "gpu_bytes", 1)
        if whole(self.activation_bytes, "activation_bytes") >= self.gpu_bytes:
            raise ArgumentError(f"activations of {self.activation_bytes} bytes leave nothing of {self.gpu_bytes}")

    def mesh_bytes(self, size: int) -> int:
        """Memory of a mesh of so many GPUs for weights and KV."""
        return size * (self.gpu_bytes - self.activation_bytes)


class Candidate(NamedTuple):
    """A way to run a model alone: with the fewest compute units that serve its rate (Algorithm 2).

    Attributes:
        tp: GPUs.
        share: Of their compute units.
        batch: Requests that decode together.
        throughput: Requests a second, at most the rate.
        unmet: Whether the rate is not met. Then no share meets it, and this is the smallest that serves nearly most.
    """

    tp: int
    share: float
    batch: int
    throughput: float
    unmet: bool


class Unit(NamedTuple):
    """What the models of a mesh serve together, in the order in which they were given.

    Attributes:
        throughputs: Requests a second of each.
        batches: Requests that decode together.
        load: The sum of their shares; above 1, decode jobs wait for each other.
    """

    throughputs: tuple[float, ...]
    batches: tuple[int, ...]
    load: float


def candidates(model: ServedModel, machines: Machines, shares: Sequence[float] = SHARES) -> tuple[Candidate, ...]:
    """Algorithm 2: one candidate for each parallelism within a node whose memory suffices.

    Parallelisms that do not meet the rate are candidates, too, with `unmet`: as printed, a model that none of them
    serves in full would not be placed at all. One that the timing does not know, because it was not measured or the
    model cannot be split so, is left out.

    Raises:
        ArgumentError: No parallelism is known to the timing, the model with one request is larger than every mesh, or a
            share is not above 0 and at most 1.
    """
    found = []
    unknown: ArgumentError | None = None
    for tp in sorted(set(model.tp_degrees)):
        left = machines.mesh_bytes(tp) - model.weight_bytes
        if tp > machines.gpus or left < model.request_bytes:
            continue
        try:
            model.timing.prefill_s(1.0, 1, model.prompt_tokens, tp)
            model.timing.decode_s(1.0, 1, model.prompt_tokens, tp)
        except ArgumentError as error:
            unknown = error
            continue
        limit = min(BATCH_MAX, left // model.request_bytes)
        tried: list[Candidate] = []
        for share in sorted(share_of(each, "a share") for each in shares):
            batch, throughput = _smallest_batch(model, tp, share, 0.0, 1.0, limit)
            tried.append(Candidate(tp, share, batch, throughput, throughput < model.rate * _MET))
            if not tried[-1].unmet:
                break
        if tried:
            enough = max(each.throughput for each in tried) * (_NEARLY_MOST if tried[-1].unmet else _MET)
            found.append(next(each for each in tried if each.throughput >= enough))
    if not found and unknown is not None:
        raise ArgumentError(f"{model.name!r} has no parallelism whose times are known: {unknown}")
    if not found:
        raise ArgumentError(
            f"{model.name!r} has {model.weight_bytes} bytes of weights and {model.request_bytes} of a request: larger "
            f"than every mesh that it may run on",
            largest=machines.mesh_bytes(max((tp for tp in model.tp_degrees if tp <= machines.gpus), default=0)),
        )
    return tuple(found)


def estimate_unit(models: Sequence[ServedModel], tp: int, shares: Sequence[float], machines: Machines) -> Unit | None:
    """F(b, W_b) of eq. 1, model by model: the smallest batches that serve the rates, as far as memory goes.

    The batches depend on each other by the prefills of the others; they are found by going round, from 1 upwards.

    Args:
        models: On the mesh.
        tp: Its GPUs; all models are split over all of them.
        shares: Of each model's decode jobs.
        machines: For their memory.

    Returns:
        None if weights and one request of each do not fit.
    """
    left = machines.mesh_bytes(tp) - sum(model.weight_bytes for model in models)
    if left < sum(model.request_bytes for model in models):
        return None
    load = sum(shares)
    limits = [min(BATCH_MAX, left // model.request_bytes) for model in models]
    batches = [1] * len(models)
    for _ in range(_ROUNDS):
        before = list(batches)
        crowd = _crowd(models, tp, shares, batches)
        prefills = [_prefill_s(*each, tp) for each in zip(models, shares, batches, strict=True)]
        together = sum(prefills)
        for at, model in enumerate(models):
            others_s = together - prefills[at]
            batch, _ = _smallest_batch(model, tp, shares[at], others_s, crowd, limits[at])
            batches[at] = min(limits[at], max(before[at], batch))  # larger ones read less often: never back again
        needed = sum(batch * model.request_bytes for batch, model in zip(batches, models, strict=True))
        if needed > left:
            limits = _fitting(left / needed, left, batches, models)
            batches = [min(pair) for pair in zip(batches, limits, strict=True)]
        elif batches == before:
            break
    prefills = [_prefill_s(*each, tp) for each in zip(models, shares, batches, strict=True)]
    throughputs = []
    crowd = _crowd(models, tp, shares, batches)
    for at, model in enumerate(models):
        served = _throughput_of(model, tp, shares[at], sum(prefills) - prefills[at], crowd)(batches[at])
        throughputs.append(model.rate if served >= model.rate * _MET else served)
    return Unit(tuple(throughputs), tuple(batches), load)


def _crowd(models: Sequence[ServedModel], tp: int, shares: Sequence[float], batches: Sequence[int]) -> float:
    """The factor by which decode jobs of all models beside each other take longer than alone."""
    reads = 0.0  # of the bandwidth
    if len(models) > 1:
        for model, share, batch in zip(models, shares, batches, strict=True):
            middle = _middle(model)
            step_s = model.timing.decode_s(share, batch, middle, tp)
            busy = min(1.0, model.rate * model.output_tokens * step_s / batch)  # an unpopular model pauses
            reads += busy * model.timing.decode_reads_s(batch, middle, tp) / step_s
    return max(1.0, sum(shares), reads)


def _middle(model: ServedModel) -> int:
    """Tokens of a request half way."""
    return model.prompt_tokens + model.output_tokens // 2


def _fitting(part: float, left: int, batches: Sequence[int], models: Sequence[ServedModel]) -> list[int]:
    """Batches cut by the same part, at least 1 each, that fit into memory. REQUIRES: 1 of each fits."""
    limits = [max(1, int(batch * part)) for batch in batches]
    over = sum(limit * model.request_bytes for limit, model in zip(limits, models, strict=True)) - left
    while over > 0:  # those that were rounded up to 1 are paid for by the largest
        at = max(range(len(models)), key=lambda at: (limits[at] - 1) * models[at].request_bytes)
        step = min(limits[at] - 1, max(1, -(-over // models[at].request_bytes)))
        limits[at] -= step
        over -= step * models[at].request_bytes
    return limits


def _prefill_s(model: ServedModel, share: float, batch: int, tp: int) -> float:
    return model.timing.prefill_s(max(share, model.prefill_share), batch, model.prompt_tokens, tp)


def _smallest_batch(
    model: ServedModel, tp: int, share: float, others_s: float, crowd: float, limit: int
) -> tuple[int, float]:
    """The smallest batch that serves the rate, by doubling and halving; otherwise the one that serves most.

    Throughput grows with the batch but for waves of thread blocks. A batch that is found serves the rate even where it
    does not; a smaller one may exist there.
    """
    served = _throughput_of(model, tp, share, others_s, crowd)
    low, high = 0, 1
    best, most = 1, served(1)
    while most < model.rate * _MET and high < limit:
        low, high = high, min(limit, 2 * high)
        if (now := served(high)) > most:
            best, most = high, now
    if most < model.rate * _MET:
        return best, most
    low = min(low, best - 1)
    high = best
    while high - low > 1:
        middle = (low + high) // 2
        if served(middle) >= model.rate * _MET:
            high = middle
        else:
            low = middle
    return high, model.rate


def _throughput_of(model: ServedModel, tp: int, share: float, others_s: float, crowd: float) -> Callable[[int], float]:
    middle = _middle(model)

    def served(batch: int) -> float:
        decode_s = crowd * model.timing.decode_s(share, batch, middle, tp) * model.output_tokens
        return batch / (others_s + _prefill_s(model, share, batch, tp) + decode_s)

    return served
