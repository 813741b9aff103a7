"""The second process of the demo: python -m kvpool.control.demo.second ADDRESS QUESTION.

Connects to the first one, waits for the blocks that it sends, answers the question by them, and prints a line of JSON.
"""

from __future__ import annotations

import json
import sys

from kvpool.control.demo.answering import BLOCKS, LAYOUT, Engine, prompts
from kvpool.errors import StateError
from kvpool.pool import Pool


def main() -> None:
    """See the module."""
    address, question = sys.argv[1], int(sys.argv[2])
    with Pool(LAYOUT, hbm_blocks=4 * BLOCKS, name="second") as pool:
        engine = Engine(pool, caches=True)
        engine.warm()
        pool.peers.connect(address)
        item = pool.inbox.receive(timeout=30)
        if item is None:
            raise StateError("nothing came")
        with item:
            answer = engine.answer(prompts(question + 1)[question])
    print(json.dumps(answer._asdict()))


if __name__ == "__main__":
    main()
