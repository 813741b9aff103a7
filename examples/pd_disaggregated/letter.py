"""What a decode instance must know beside the KV; it travels in `private` of the transfer (MemServe §5.1, PD-Basic)."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from pd_disaggregated.records import Tokens


@dataclass(frozen=True, eq=False)
class Letter:
    """The metadata of a request, as prefill sends it to decode.

    Attributes:
        request: Its number, the dispatcher's.
        attempt: From 1: how often the dispatcher has tried.
        prompt: All its tokens: the last ones may fill no whole block, and the KV of a prompt does not tell them.
        new_tokens: How many are to be generated, the first one included. The only sampling parameter: decoding is
            greedy.
        first: The first token, which prefill has generated. None in a letter that comes before it is known; then
            another letter follows.
    """

    request: int
    attempt: int
    prompt: Tokens
    new_tokens: int
    first: int | None

    @property
    def key(self) -> tuple[int, int]:
        """Names the attempt at the request."""
        return self.request, self.attempt

    def pack(self) -> bytes:
        """As bytes: a line of JSON, then the prompt as int32."""
        head = {
            "request": self.request,
            "attempt": self.attempt,
            "new_tokens": self.new_tokens,
            "first": self.first,
        }
        return json.dumps(head).encode() + b"\n" + self.prompt.astype("<i4").tobytes()

    @classmethod
    def unpack(cls, content: bytes) -> Letter:
        """What `pack` has packed.

        Raises:
            ValueError: It is no letter.
        """
        head, line_end, prompt = content.partition(b"\n")
        if not line_end or len(prompt) % 4:
            raise ValueError(f"{len(content)} bytes are no letter")
        fields = json.loads(head)
        if not isinstance(fields, dict) or fields.keys() != {"request", "attempt", "new_tokens", "first"}:
            raise ValueError(f"a letter has other fields than {sorted(fields)}")
        return cls(prompt=np.frombuffer(prompt, "<i4").astype(np.int32), **fields)
