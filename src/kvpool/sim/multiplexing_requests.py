"""The requests of a mesh, what became of them, and the sums over all."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.policy import multiplexing as mux

__all__ = ["Counts", "Request"]


@dataclass(slots=True, eq=False)
class Request:
    """A request and what became of it.

    Attributes:
        model: Whom it asks.
        time_s: When it came.
        prompt: Tokens.
        output: Tokens of its answer.
        made: Of these, those that are there.
        stopped: How often it lost its blocks.
        first_s: When its first token was there; below 0: not yet.
        end_s: When its last token was there; below 0: not yet.
        steps: What a scheduler sees of it while it decodes: without a block, and with one.
    """

    model: str
    time_s: float
    prompt: int
    output: int
    made: int = 0
    stopped: int = 0
    first_s: float = -1.0
    end_s: float = -1.0
    steps: list[mux.Waiting] | None = field(default=None, repr=False)

    @property
    def cached(self) -> int:
        """Tokens whose KV is there while it decodes: the newest one's is written by the next step."""
        return self.prompt + self.made - 1

    @property
    def to_compute(self) -> int:
        """Tokens of its next prefill: the prompt, and what was made before it was stopped."""
        return self.prompt + self.made


@dataclass
class Counts:
    """Sums of a mesh, over its whole run.

    Attributes:
        arrived: Requests.
        refused: Those that could never have the memory for all their tokens.
        ended: Those that have all their tokens.
        tokens: That were made.
        computed: Tokens of prompts, those of stopped requests again.
        jobs: Started.
        stopped: How often a request lost its blocks.
        used: Units times seconds, by model; while measured.
        read_s: Seconds of reading with all of the bandwidth.
    """

    arrived: int = 0
    refused: int = 0
    ended: int = 0
    tokens: int = 0
    computed: int = 0
    jobs: int = 0
    stopped: int = 0
    used: dict[str, float] = field(default_factory=dict)
    read_s: float = 0.0
