"""The study of Infinite-LLM (§6): the workloads of Table 2, and the designs that serve them, on assumed GPUs.

The paper names models, GPUs, ranges of context lengths and shares of long requests; the rest is assumed here:

- Lengths of normal requests, three ways (LENGTHS): "chat", as recorded: log-normal with the mean of LMSYS-Chat-1M's
  prompt and answer, 284 tokens, and a long tail; "logarithmic": the logarithm is uniform over the range; "uniform" over
  the range. Long requests are uniform over theirs.
- Of a context the answer is 16 to 1,024 tokens (uniform logarithm), at most half; the rest is the prompt.
- An engine has as few GPUs as hold the model with room for the paper's normal requests: 1, 2 and 4 for 7B, 13B and 70B.
- GPUs are those of `hardware`, with its efficiencies: A100s of 80 GB, eight in a machine. An all-reduce takes 7 us and
  1.5 us a step of its ring beside its bytes (28 us for eight ranks, 100 us for 32); between machines it uses
  every GPU's network interface at once, as NCCL does: 160 GB/s a rank.
- A call to a creditor and its answer take 10 us each way in a machine and 15 us between two, beside their bytes:
  kvpool's goal for a call between two processes of a machine. The paper gives none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError
from kvpool.policy import cost
from kvpool.sim.hardware import GPUS, MODELS, Gpu, kv_room_gb, roofline
from kvpool.sim.lending_engine import Batching
from kvpool.sim.lending_fleet import LendingFleet, Machines
from kvpool.sim.lending_market import Rules
from kvpool.sim.lending_times import StepTimes
from kvpool.sim.workload import LMSYS_PROMPT, LMSYS_RESPONSE, Arrival, long_tailed

__all__ = [
    "BLOCK_TOKENS",
    "DESIGNS",
    "HARDWARE",
    "LEAF_BLOCKS",
    "LENGTHS",
    "LONG_PARTS",
    "SETTINGS",
    "Design",
    "Lengths",
    "Setting",
    "fleet",
    "lending_rules",
    "machines",
    "requests",
]

HARDWARE: Final = "A100-80GB"
LONG_PARTS: Final = (0.01, 0.1, 0.3)
BLOCK_TOKENS: Final = 128  # the paper's rBlocks have no size; larger blocks make simulations quicker
LEAF_BLOCKS: Final = 1024 // BLOCK_TOKENS

_PER_MACHINE: Final = 8  # GPUs
_ALL_REDUCE_S, _RING_STEP_S = 7e-6, 1.5e-6
_RANKS_FAR_BYTES_S: Final = 160e9
_NEAR_S, _FAR_S = 10e-6, 15e-6
_OF_THE_DATA_SHEET: Final = 0.8
_OUTPUT: Final = (16, 1024)

_CHAT_SIGMA: Final = 1.5

Lengths = Literal["chat", "logarithmic", "uniform"]
LENGTHS: Final[tuple[Lengths, ...]] = ("chat", "logarithmic", "uniform")
Design = Literal["lending", "independent", "migrating", "one", "pipeline"]
DESIGNS: Final[tuple[Design, ...]] = ("lending", "independent", "migrating", "one", "pipeline")


@dataclass(frozen=True)
class Setting:
    """A row of Table 2.

    Attributes:
        model: A name of `hardware.MODELS`.
        gpus: All of them.
        tp: GPUs of an engine.
        normal: The longest normal request.
        long: The longest request.
        datasets: The paper's numbers of the three workloads, by their share of long requests.
    """

    model: str
    gpus: int
    tp: int
    normal: int
    long: int
    datasets: tuple[int, int, int]

    @property
    def name(self) -> str:
        """Model and GPUs."""
        return f"{self.model.removeprefix('llama-2-').upper()}, {self.gpus} GPUs"


SETTINGS: Final[tuple[Setting, ...]] = (
    Setting("llama-2-7b", 2, 1, 100_000, 200_000, (1, 7, 13)),
    Setting("llama-2-13b", 4, 2, 140_000, 280_000, (2, 8, 14)),
    Setting("llama-2-70b", 8, 4, 300_000, 600_000, (3, 9, 15)),
    Setting("llama-2-13b", 8, 2, 240_000, 480_000, (4, 10, 16)),
    Setting("llama-2-7b", 16, 1, 600_000, 1_200_000, (5, 11, 17)),
    Setting("llama-2-7b", 32, 1, 950_000, 1_900_000, (6, 12, 18)),
)


def requests(
    setting: Setting,
    long_part: float,
    count: int = 1000,
    seed: int = 0,
    rate: float | None = None,
    lengths: Lengths = "logarithmic",
) -> list[Arrival]:
    """A workload of Table 2.

    Args:
        setting: The row.
        long_part: The share of long requests; exactly so many, in random places.
        count: Requests.
        seed: Determines everything.
        rate: Poisson arrivals, requests a second; None: all at the start.
        lengths: Of normal requests.
    """
    if not 0 <= long_part <= 1 or count < 1:
        raise ArgumentError(f"{count} requests, a share of {long_part} long: at least one, and a share from 0 to 1")
    rng = np.random.default_rng(seed)
    is_long = np.zeros(count, dtype=bool)
    is_long[: round(long_part * count)] = True
    rng.shuffle(is_long)
    spread = rng.random(count)
    if lengths == "chat":
        normal = np.minimum(long_tailed(LMSYS_PROMPT + LMSYS_RESPONSE, _CHAT_SIGMA, count, rng), setting.normal)
    else:
        normal = setting.normal**spread if lengths == "logarithmic" else 1 + spread * (setting.normal - 1)
    context = np.where(is_long, setting.normal + spread * (setting.long - setting.normal), normal)
    tokens = np.maximum(2, context.astype(np.int64))
    low, high = np.log(_OUTPUT[0]), np.log(_OUTPUT[1])
    output = np.minimum(np.exp(rng.uniform(low, high, count)).astype(np.int64), tokens // 2)
    times: npt.NDArray[np.float64] = np.zeros(count)
    if rate is not None:
        times = np.cumsum(rng.exponential(1 / rate, count))
    return [
        Arrival(float(time), int(whole - answer), int(answer))
        for time, whole, answer in zip(times, tokens, output, strict=True)
    ]


def machines(setting: Setting, design: Design, hardware: Mapping[str, Gpu] = GPUS) -> Machines:
    """The engines of a design: all have the same GPUs. Raises ArgumentError where the model cannot be so divided."""
    gpu, model = hardware[HARDWARE], MODELS[setting.model]
    count = setting.gpus // setting.tp
    net = cost.Link(gpu.net_bytes_per_s * setting.tp * _OF_THE_DATA_SHEET, latency_s=_FAR_S)
    near = cost.Link(gpu.peer_bytes_per_s * setting.tp * _OF_THE_DATA_SHEET, latency_s=_NEAR_S)
    per_host = max(1, _PER_MACHINE // setting.tp)
    if design == "one":
        times, memory, engines = _times(setting, gpu, setting.gpus), kv_room_gb(model, gpu, setting.gpus), 1
    elif design == "pipeline":
        hop = near if count <= per_host else net
        times, memory, engines = _times(setting, gpu, setting.tp, count, hop), kv_room_gb(model, gpu, setting.gpus), 1
    else:
        times, memory, engines = _times(setting, gpu, setting.tp), kv_room_gb(model, gpu, setting.tp), count
    blocks = int(memory * 1e9 / (model.kv_bytes_per_token * BLOCK_TOKENS))
    return Machines(engines, times, blocks, near, net, per_host)


def _times(setting: Setting, gpu: Gpu, tp: int, stages: int = 1, hop: cost.Link | None = None) -> StepTimes:
    within = gpu.peer_bytes_per_s * _OF_THE_DATA_SHEET
    link = None
    if tp > 1:
        latency_s = _RING_STEP_S + _ALL_REDUCE_S / (2 * (tp - 1))
        link = cost.Link(within if tp <= _PER_MACHINE else _RANKS_FAR_BYTES_S, latency_s=latency_s)
    model = roofline(MODELS[setting.model], gpu, tp).spread(cost.Parallel(tp=tp, tp_link=link))
    return StepTimes(model, stages, hop) if stages > 1 else StepTimes(model)


def fleet(
    setting: Setting,
    design: Design,
    rules: Rules | None = None,
    chunk_tokens: int = Batching.chunk_tokens,
    seed: int = 0,
) -> LendingFleet:
    """A fleet of a design.

    Args:
        setting: Model and GPUs.
        design: One of DESIGNS.
        rules: Of a lending fleet; by default `lending_rules()`.
        chunk_tokens: As in `Batching`; 0: prompts come with their KV.
        seed: Of the searches for creditors.
    """
    engine = machines(setting, design)
    whole = setting.gpus // setting.tp // engine.engines  # an engine over all GPUs batches as many as the others do
    batching = Batching(BLOCK_TOKENS, chunk_tokens, whole * Batching.batch_requests)
    if design != "lending":
        return LendingFleet(engine, batching, migrate=design == "migrating")
    return LendingFleet(engine, batching, rules or lending_rules(), seed=seed)


def lending_rules(**changes: Any) -> Rules:
    """Those of `Rules`, in leaves of 1,024 tokens and chunks of `Batching`, with some changes."""
    chunk = Batching.chunk_tokens // BLOCK_TOKENS
    return replace(Rules(leaf=LEAF_BLOCKS, chunk=chunk, settle_least=LEAF_BLOCKS), **changes)
