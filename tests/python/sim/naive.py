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
