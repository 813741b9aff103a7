"""A process with one engine of vLLM that serves requests as they arrive, and says how long each of its steps took."""

from __future__ import annotations

import time
from typing import Any

from bench.engines.vllm_engine import Engine
from bench.engines.vllm_ttft import prompt_of


class StepEngine(Engine):
    """Commands are methods; what they return is the answer."""

    def serve(self, requests: list[list[float]], seed: int) -> dict[str, Any]:
        """Serves requests at their times.

        Args:
            requests: (seconds from the start, tokens of the prompt, tokens of the answer), in the order of the times.
            seed: Prompts of other seeds have nothing in common.

        Returns:
            steps: (seconds, [(tokens computed, tokens before them) of each request]).
            first: Seconds from the start until each request's first token.
            last: The same until its last one.
        """
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        self._watch(engine.engine_core.engine_core.scheduler)
        steps: list[tuple[float, list[tuple[int, int]]]] = []
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        prompts = [prompt_of(int(length), seed * len(requests) + at) for at, (_, length, _) in enumerate(requests)]
        began, sent = time.perf_counter(), 0
        while sent < len(requests) or engine.has_unfinished_requests():
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, began + requests[sent][0] - time.perf_counter()))
            start = time.perf_counter()
            while sent < len(requests) and began + requests[sent][0] <= start:
                answer = SamplingParams(
                    temperature=0, max_tokens=int(requests[sent][2]), detokenize=False, ignore_eos=True
                )
                engine.add_request(str(sent), {"prompt_token_ids": prompts[sent]}, answer)
                sent += 1
            if not engine.has_unfinished_requests():
                continue
            self._parts: list[tuple[int, int]] = []
            outputs = engine.step()
            end = time.perf_counter()
            if self._parts:
                steps.append((end - start, self._parts))
            for output in outputs:
                if output.outputs[0].token_ids:
                    first.setdefault(int(output.request_id), end - began)
                    last[int(output.request_id)] = end - began
        self.llm.reset_prefix_cache()
        return {
            "steps": steps,
            "first": [first[at] for at in range(len(requests))],
            "last": [last[at] for at in range(len(requests))],
        }

    def _watch(self, scheduler: Any) -> None:
        """From now on `_parts` is what the last step computes."""
        if hasattr(self, "_watched"):
            return
        self._watched = True
        plain = scheduler.schedule

        def schedule(*arguments: Any, **named: Any) -> Any:
            output = plain(*arguments, **named)
            before = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
            others = output.scheduled_cached_reqs
            before |= dict(zip(others.req_ids, others.num_computed_tokens, strict=True))
            self._parts = [(count, before[name]) for name, count in output.num_scheduled_tokens.items()]
            return output

        scheduler.schedule = schedule


if __name__ == "__main__":
    from bench.engines.answering import answer_lines

    answer_lines(StepEngine())
