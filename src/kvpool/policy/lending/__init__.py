"""Lending: members whose memory runs short borrow blocks from others, and debts that go round in a circle are settled.

    ledger.take(row)                                        # what each member publishes of itself
    search = lending.Search(borrower=7, blocks=64, seed=3)
    for creditor in search.propose(ledger): ...             # ask it; on a refusal: search.refuse(...)
    for settlements in lending.settle(ledger.debts(), least=64): ...

    Ledger, Row         who has room, and who owes how much to whom
    worth_publishing    whether a row has moved so far that others should learn of it
    candidates, Search  three creditors to ask, drawn with weights, and three more after three refusals
    plan_offload        which blocks go to which creditors when memory runs short
    plan_payback        which come home when there is room
    plan_prefill        where the blocks of a prompt go that is longer than the memory at home
    settle, steps       the cycles of debts that are brought home, and the order in which that has room
    Freeze, Freezes     what may not change meanwhile, and until when
    Settler             one member's part in settlements: it answers, coordinates, and says what is due
    Said, Call, Answer  what it says to the others, and hears of them

Everything here is pure: data in, plans out. Every member computes for itself from its own ledger; there is no master.
docs/internals/lending.md says why the settlements keep what they promise.
"""

from kvpool.policy.lending.candidates import CANDIDATES, Search, Weights, candidates
from kvpool.policy.lending.coordinator import SettlementRules
from kvpool.policy.lending.freeze import Freeze, Freezes, freeze_of
from kvpool.policy.lending.ledger import BLOCKS_MAX, PUBLISHED_PART, Debts, Ledger, Row, worth_publishing
from kvpool.policy.lending.messages import ANSWERS_MAX, FREEZE_S_MAX, MEMBERS_MAX, Answer, Call, Said
from kvpool.policy.lending.offload import (
    LEAF_BLOCKS,
    Held,
    Loan,
    Offload,
    OffloadPlan,
    Payback,
    payable,
    plan_offload,
    plan_payback,
)
from kvpool.policy.lending.prefill import Away, PrefillPlan, plan_prefill
from kvpool.policy.lending.settle import Settlement, Step, settle, settled, steps
from kvpool.policy.lending.settler import Due, Settler

__all__ = [
    "ANSWERS_MAX",
    "BLOCKS_MAX",
    "CANDIDATES",
    "FREEZE_S_MAX",
    "LEAF_BLOCKS",
    "MEMBERS_MAX",
    "PUBLISHED_PART",
    "Answer",
    "Away",
    "Call",
    "Debts",
    "Due",
    "Freeze",
    "Freezes",
    "Held",
    "Ledger",
    "Loan",
    "Offload",
    "OffloadPlan",
    "Payback",
    "PrefillPlan",
    "Row",
    "Said",
    "Search",
    "Settlement",
    "SettlementRules",
    "Settler",
    "Step",
    "Weights",
    "candidates",
    "freeze_of",
    "payable",
    "plan_offload",
    "plan_payback",
    "plan_prefill",
    "settle",
    "settled",
    "steps",
    "worth_publishing",
]
