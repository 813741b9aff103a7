"""Lending: members whose memory runs short borrow blocks from others, and debts that go round in a circle are settled.

    ledger.take(row)                                        # what each member publishes of itself
    search = lending.Search(borrower=7, blocks=64, seed=3)
    for creditor in search.propose(ledger): ...             # ask it; on a refusal: search.refuse(...)
    for settlements in lending.settle(ledger.debts(), least=64): ...

    Ledger, Row         who has room, and who owes how much to whom
    worth_publishing    whether a row has moved so far that others should learn of it
    candidates, Search  three creditors to ask, drawn with weights, and three more after three refusals
    settle, steps       the cycles of debts that are brought home, and the order in which that has room

Everything here is pure: data in, plans out. Every member computes for itself from its own ledger; there is no master.
docs/internals/lending.md says why the settlements keep what they promise.
"""

from kvpool.policy.lending.candidates import CANDIDATES, Search, Weights, candidates
from kvpool.policy.lending.ledger import PUBLISHED_PART, Debts, Ledger, Row, worth_publishing
from kvpool.policy.lending.settle import Settlement, Step, settle, settled, steps

__all__ = [
    "CANDIDATES",
    "PUBLISHED_PART",
    "Debts",
    "Ledger",
    "Row",
    "Search",
    "Settlement",
    "Step",
    "Weights",
    "candidates",
    "settle",
    "settled",
    "steps",
    "worth_publishing",
]
