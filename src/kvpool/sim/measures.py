"""What a simulation counts, and the results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvpool.sim.sketch import Sketch

__all__ = ["Measures"]


@dataclass
class Measures:
    """Sums and quantiles over all measured requests; single requests are not kept.

    Attributes:
        arrived: Requests that came, measured or not.
        refused: Those that were longer than an instance has room for.
        ended: Those that have all their tokens.
        ttft_s: From sending to the first token.
        tpot_s: Between tokens after the first, the mean of each request; of answers of two tokens and more.
        jct_s: From sending to the last token.
        prompt_tokens: Tokens of all prompts.
        hbm_tokens: Those found in the HBM of the instance that computed them.
        dram_tokens: Those found in its DRAM.
        fetched_tokens: Those that came from another instance.
        output_tokens: Generated tokens.
        generated_tokens: The same of all requests, measured or not.
        sent_tokens: Tokens of KV that went from prefill to decode instances.
        last_arrival_s: When the last request came.
        end_s: When the last token was there.
        events: Events of the simulation.
        instances: Each one's requests, share of time busy with prefills and with decoding, and longest queue.
        link_busy_s: Seconds of all transfers together.
        link_waited_s: Seconds that transfers waited for others.
    """

    arrived: int = 0
    refused: int = 0
    ended: int = 0
    ttft_s: Sketch = field(default_factory=Sketch)
    tpot_s: Sketch = field(default_factory=Sketch)
    jct_s: Sketch = field(default_factory=Sketch)
    prompt_tokens: int = 0
    hbm_tokens: int = 0
    dram_tokens: int = 0
    fetched_tokens: int = 0
    output_tokens: int = 0
    generated_tokens: int = 0
    sent_tokens: int = 0
    last_arrival_s: float = 0.0
    end_s: float = 0.0
    events: int = 0
    instances: list[dict[str, Any]] = field(default_factory=list)
    link_busy_s: float = 0.0
    link_waited_s: float = 0.0

    @property
    def hit_ratio(self) -> float:
        """Share of the prompts' tokens that their instance had cached, in either tier."""
        return (self.hbm_tokens + self.dram_tokens) / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def imbalance(self) -> float:
        """Busy time of the busiest instance that computes prompts, over their mean; 1 if none was computed."""
        busy = [each["prefill_busy"] + each["decode_busy"] for each in self.instances if each["kind"] != "decode"]
        mean = sum(busy) / len(busy) if busy else 0.0
        return max(busy) / mean if mean else 1.0

    @property
    def utilisation(self) -> float:
        """Mean share of the time for which instances compute, prefills and decoding, until the last token."""
        busy = [each["prefill_busy"] + each["decode_busy"] for each in self.instances]
        return sum(busy) / len(busy) if busy else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated a second, of all requests, until the last token."""
        return self.generated_tokens / self.end_s if self.end_s else 0.0

    @property
    def behind_s(self) -> float:
        """How long after the last arrival the last request ended: long if the cluster is too small."""
        return max(0.0, self.end_s - self.last_arrival_s)

    def as_json(self) -> dict[str, Any]:
        """Everything, ready for JSON; the same bytes for the same simulation."""
        prompt = max(1, self.prompt_tokens)
        return {
            "requests": {"arrived": self.arrived, "refused": self.refused, "ended": self.ended},
            "ttft_s": self.ttft_s.as_json(),
            "tpot_s": self.tpot_s.as_json(),
            "jct_s": self.jct_s.as_json(),
            "quantile_error": self.ttft_s.error,
            "hit_ratio": self.hit_ratio,
            "hit_ratio_hbm": self.hbm_tokens / prompt,
            "hit_ratio_dram": self.dram_tokens / prompt,
            "fetched_ratio": self.fetched_tokens / prompt,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "sent_tokens": self.sent_tokens,
            "last_arrival_s": self.last_arrival_s,
            "end_s": self.end_s,
            "behind_s": self.behind_s,
            "imbalance": self.imbalance,
            "utilisation": self.utilisation,
            "tokens_per_s": self.tokens_per_s,
            "instances": self.instances,
            "links": {"busy_s": self.link_busy_s, "waited_s": self.link_waited_s},
            "events": self.events,
        }
