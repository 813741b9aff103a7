"""The plainest models of what the simulator does: a cache as an ordered dict, an engine step by step."""

from __future__ import annotations

from collections import OrderedDict, deque


class NaiveCache:
    """LRU of blocks by their whole prefix; the ends of prompts go first. Blocks of a prompt that runs are held."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.order: OrderedDict[tuple, None] = OrderedDict()

    def serve(self, ids, blocks):
        """How many blocks of a prompt are found. Then it is stored, with `blocks` held for it and its answer."""
        prefixes = [tuple(ids[: at + 1]) for at in range(len(ids))]
        hit = 0
        while hit < len(prefixes) and prefixes[hit] in self.order:
            hit += 1
        for prefix in reversed(prefixes[:hit]):
            self.order.move_to_end(prefix)
        while len(self.order) + blocks - hit > self.capacity:
            self.order.popitem(last=False)
        for prefix in reversed(prefixes):
            self.order[prefix] = None
            self.order.move_to_end(prefix)
        return hit


def naive_engine(requests, model, step_s, batch_requests):
    """One instance without a cache, a prompt at a time, one step of decoding after the other.

    Returns the times of first and last tokens of requests (time, prompt, output), which are in order.
    """
    now = 0.0
    waiting, running = deque(), {}
    first, last = {}, {}
    coming = deque(enumerate(requests))
    while coming or waiting or running:
        while coming and coming[0][1][0] <= now:
            waiting.append(coming.popleft())
        if waiting and len(running) < batch_requests:
            number, (_, prompt, output) = waiting.popleft()
            now += model.exec_s(prompt)
            first[number] = now
            if output == 1:
                last[number] = now
            else:
                running[number] = [prompt + 1, output - 1]
        elif running:
            now += step_s(len(running), sum(context for context, _ in running.values()))
            for number in list(running):
                running[number][0] += 1
                running[number][1] -= 1
                if not running[number][1]:
                    del running[number]
                    last[number] = now
        else:
            now = coming[0][1][0]
    return first, last


def naive_chunked_engine(requests, step_s, batch_tokens, batch_requests):
    """One instance without a cache, a step at a time, as vLLM's scheduler fills it.

    What runs comes first, in the order in which it began: one token for a request that decodes, as much as there is
    room for of a prompt. Then requests that wait begin, as long as there is room.

    Args:
        requests: (time, prompt, output), in order.
        step_s: The time of a step: of (tokens, tokens before) for each chunk of a prompt, of how many requests that
            decode, and of the tokens that these have.
        batch_tokens: Of a step.
        batch_requests: That run.

    Returns:
        The times of first and last tokens.
    """
    now = 0.0
    waiting, running = deque(), {}  # number: [tokens that are there, of prompt and answer; prompt; output]
    first, last = {}, {}
    coming = deque(enumerate(requests))
    while coming or waiting or running:
        while coming and coming[0][1][0] <= now:
            waiting.append(coming.popleft())
        room, takes = batch_tokens, {}
        for number, (there, prompt, _) in running.items():
            takes[number] = min(room, prompt - there if there < prompt else 1)
            room -= takes[number]
        while waiting and room and len(running) < batch_requests:
            number, (_, prompt, output) = waiting.popleft()
            running[number] = [0, prompt, output]
            takes[number] = min(room, prompt)
            room -= takes[number]
        if not running:
            now = coming[0][1][0]
            continue
        chunks, contexts = [], []
        for number, (there, prompt, _) in running.items():
            if there < prompt:
                chunks.append((there + takes[number], there))
            else:
                contexts.append(there)
        now += step_s(chunks, len(contexts), sum(contexts))
        for number, take in takes.items():
            request = running[number]
            there, prompt, output = request
            decodes = there >= prompt
            request[0] += take
            if not decodes and request[0] == prompt:
                first[number] = now
                request[0] += 1  # the first token is one of the context from now on
            if request[0] == prompt + output:
                del running[number]
                last[number] = now
    return first, last
