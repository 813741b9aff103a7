"""What a step takes when a part of its attention is computed by others (DistAttention, Infinite-LLM §4.6).

A layer's attention lasts until the slowest part is there:

    layer = max(local, each creditor: queue + round trip + remote)
    step  = products and all else of the whole model + layers * layer

A step may carry tokens of prompts (a chunk) beside the next token of each sequence that decodes. All of it comes from a
cost model, so each design of a fleet pays the same for the same work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvpool.errors import ArgumentError
from kvpool.policy.cost import CostModel, Link

__all__ = ["Load", "Part", "Remote", "StepTimes", "layer_s", "queue_s"]

_BUSY_MAX: Final = 0.95
_SUM_BYTES: Final = 4  # a creditor answers in float32: the output, and for each head its maximum and sum


@dataclass
class Part:
    """Attention over tokens that lie in one place.

    Attributes:
        rows: Queries that look at them.
        reads: Tokens whose K and V are read.
        pairs: Queries times tokens of prompts that are computed: what takes arithmetic rather than reading.
    """

    rows: int = 0
    reads: int = 0
    pairs: float = 0.0

    def add(self, rows: int, reads: int, pairs: float = 0.0) -> None:
        """Adds the attention of one more sequence."""
        self.rows += rows
        self.reads += reads
        self.pairs += pairs


@dataclass(frozen=True)
class Load:
    """What a creditor computes for one borrower.

    Attributes:
        service_s: Seconds of a layer's call.
        share: Of the creditor's time.
    """

    service_s: float
    share: float


@dataclass(frozen=True)
class Remote:
    """A creditor's part of a layer: seconds in its queue, on the way there and back, and of computing."""

    queue_s: float
    round_trip_s: float
    service_s: float


def layer_s(local_s: float, remote: Iterable[Remote]) -> float:
    """Attention of a layer: local and remote parts run at the same time, and the slowest counts."""
    return max([local_s, *(each.queue_s + each.round_trip_s + each.service_s for each in remote)])


def queue_s(loads: Iterable[Load], kernel_s: float = 0.0) -> float:
    """How long a call waits at a creditor.

    For what is left of the creditor's kernel under way; then for the calls of others, as in a queue whose services have
    one length each (Pollaczek and Khinchine): what is left of the call under way, over the share of time that is left.

    Args:
        loads: Of the other borrowers.
        kernel_s: The longest kernel of the creditor's own step; 0 while it has no work.
    """
    present = [load for load in loads if load.share > 0]
    busy = min(_BUSY_MAX, sum(load.share for load in present))
    return kernel_s / 2 + sum(load.share * load.service_s / 2 for load in present) / (1 - busy)


@dataclass
class Work:
    """What a step computes.

    Attributes:
        decoding: Sequences that get their next token.
        new: Tokens of prompts.
        local: Attention over tokens at home.
        remote: Attention over those at each creditor.
        longest: The most tokens of one sequence that decodes.
    """

    decoding: int = 0
    new: int = 0
    local: Part = field(default_factory=Part)
    remote: dict[int, Part] = field(default_factory=dict)
    longest: int = 0


class StepTimes:
    """The times of one instance's steps.

    Args:
        model: The cost model, with the instance's tensor parallelism.
        stages: Of a pipeline over as many instances; 1: none. Each stage has 1 / stages of the layers.
        hop: Between two stages.
    """

    def __init__(self, model: CostModel, stages: int = 1, hop: Link | None = None) -> None:
        if stages < 1 or (stages > 1) != (hop is not None):
            raise ArgumentError(f"{stages} stages: a pipeline has 2 or more, and a link between them")
        shape, tp = model.model, model.parallel.tp
        pair, _, read = model.fits.linear["attention"][:3]
        self.layers = shape.layers
        self.stages = stages
        self.kv_bytes = shape.kv_bytes_per_token
        self.pair_s = pair / tp
        self.read_s = read / tp
        self._model = model
        self._hop = hop
        self._wide = shape.heads * shape.head_dim * shape.itemsize
        self._answer = shape.heads * (shape.head_dim + 2) * _SUM_BYTES
        self._logits_s = model.fits.linear["lm_head"][0] / tp  # of each row after the first
        self._linear: dict[tuple[int, int], float] = {}

    def part_s(self, part: Part) -> float:
        """A layer's attention over one place."""
        return self.read_s * part.reads + self.pair_s * part.pairs

    def kernel_s(self, work: Work) -> float:
        """The longest kernel of a step: attention, or a product that reads half of a layer's weights."""
        return max(self.part_s(work.local), self.linear_s(work.decoding, work.new) / self.layers / 2)

    def round_trip_s(self, rows: int, link: Link) -> float:
        """Queries to a creditor and partial results back."""
        return link.time_s(rows * self._wide) + link.time_s(rows * self._answer)

    def linear_s(self, decoding: int, new: int) -> float:
        """All of a step but the attention over tokens: products, norms, communication between ranks, the logits.

        The sequences of a batch share one call of attention, and each row of them has logits.
        """
        known = self._linear.get((decoding, new))
        if known is None:
            rows = decoding + new
            attention = self.layers * (self.pair_s * rows * rows / 2 + self.read_s * rows)
            known = self._model.exec_s(rows) - attention + self._logits_s * max(0, decoding - 1)
            self._linear[decoding, new] = known
        return known

    def step_s(self, work: Work, remote: Iterable[Remote] = ()) -> float:
        """Seconds of a step. In a pipeline: until each sequence has its next token, and each stage a chunk."""
        local_s = self.part_s(work.local)
        if self.stages == 1 or self._hop is None:
            return self.linear_s(work.decoding, work.new) + self.layers * layer_s(local_s, remote)
        batches = self.stages if work.new else min(self.stages, work.decoding)
        rows, new = -(-work.decoding // batches), -(-work.new // batches)
        linear = self.linear_s(rows, new)
        attention = self.layers * local_s
        longest = self.layers * self.read_s * work.longest
        stage_bound = (batches * linear + attention) / self.stages  # each stage takes all batches in turn
        batch_bound = linear + max(attention / batches, longest)  # each batch goes through all stages
        hops = self.stages * self._hop.time_s((rows + new) * self._wide)
        return max(stage_bound, batch_bound) + hops
