"""The second process of the demo: python -m kvpool.cli.demo.second ADDRESS QUESTION.

Connects to the first one, waits for the blocks that it sends, answers the question and later ones with and without
them, and prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
from statistics import median
from typing import Final

from kvpool.cli.demo.answering import Engine, make_pool, prompts
from kvpool.cli.demo.blas_threads import one_blas_thread
from kvpool.errors import StateError

_ROUNDS: Final = 3  # new questions, each answered with the cache off and on


def main() -> None:
    """See the module."""
    address, question = sys.argv[1], int(sys.argv[2])
    with one_blas_thread(), make_pool("second") as pool, make_pool("second-off") as plain:
        off, on = Engine(plain, caches=False), Engine(pool, caches=True)
        off.warm()
        on.warm()
        pool.peers.connect(address)
        item = pool.inbox.receive(timeout=30)
        if item is None:
            raise StateError("nothing came")
        with item:
            pairs = [(off.answer(prompt), on.answer(prompt)) for prompt in prompts(question + _ROUNDS)[question:]]
    if any(without.tokens != with_.tokens for without, with_ in pairs):
        raise StateError("an answer with the cache differs from the one without")
    said = {
        "tokens": pairs[0][1].tokens,
        "cached": min(with_.cached for _, with_ in pairs),
        "off_s": median(without.first_s for without, _ in pairs),
        "on_s": median(with_.first_s for _, with_ in pairs),
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
