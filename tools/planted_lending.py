"""Bugs of lending among members, live and simulated, for `make planted`."""

from __future__ import annotations

from typing import Final

from tools.planted_kit import Bug, in_python

__all__ = ["LENDING_BUGS"]

LENDING_BUGS: Final[tuple[Bug, ...]] = (
    Bug(
        "read-before-it-arrived",
        "control",
        "a sequence reads a creditor's copy of its blocks though the transfer has failed: an answer from other bytes",
        in_python("waiting/handles.py", "    if failures:\n", "    if False:\n"),
        ("python/control/test_lending_moves.py",),
        build="python",
    ),
    Bug(
        "given-up-while-written",
        "control",
        "blocks are given up that a transfer still writes: the creditor refuses them, and they stay lent for ever",
        in_python("waiting/handles.py", "        end(handles)\n        raise\n    if", "        raise\n    if"),
        ("python/control/test_lending_moves.py",),
        build="python",
    ),
    Bug(
        "lent-beyond-the-cap",
        "policy",
        "a member lends all that is free, beyond its lend_max: a neighbour's long request stops its own",
        in_python(
            "policy/lending/ledger.py",
            "return max(0, min(self.free_blocks, self.lend_max - self.lent))",
            "return self.free_blocks",
        ),
        ("python/policy/test_lending_ledger.py", "python/policy/test_lending_cluster.py"),
        build="python",
    ),
    Bug(
        "lent-on",
        "policy",
        "a member that borrows is asked to lend: each loan makes the next one, and debts go round",
        in_python("policy/lending/ledger.py", "return 0 if self.debts else self.can_lend", "return self.can_lend"),
        ("python/policy/test_lending_ledger.py", "python/control/test_lending_moves.py"),
        build="python",
    ),
    Bug(
        "mutual-debt-missed",
        "policy",
        "two members that owe each other blocks keep them apart for ever: the printed algorithm skips the edge back",
        in_python("policy/lending/cycles.py", "if len(whole) > 1:", "if len(whole) > 2:"),
        ("python/policy/test_lending_settlement.py",),
        build="python",
    ),
    Bug(
        "freeze-that-never-ends",
        "policy",
        "a coordinator is stopped between rounds: what the others owe is frozen for ever, and never paid back",
        in_python("policy/lending/freeze.py", "if now >= self.expires:", "if now >= self.expires and not self.number:"),
        ("python/policy/test_lending_freeze.py", "python/policy/test_lending_rounds.py"),
        build="python",
    ),
    Bug(
        "coordinator-killed-between-rounds",
        "policy",
        "a member leaves between two rounds, and the others' blocks stay frozen for a settlement that cannot go on",
        in_python("policy/lending/freeze.py", 'return f"member {member} has left"', "continue"),
        ("python/policy/test_lending_freeze.py", "python/policy/test_lending_rounds.py"),
        build="python",
    ),
    Bug(
        "step-after-its-freeze",
        "control",
        "a step goes on when its freeze is over or its settlement has ended: it uses room that others have by now",
        in_python(
            "control/lending/settling.py",
            "if now_due is None or (now_due.coordinator, now_due.key) != (due.coordinator, due.key):",
            "if False:",
        ),
        ("python/control/test_lending_settling.py",),
        build="python",
    ),
    Bug(
        "step-waits-for-the-stopped",
        "control",
        "a step waits for a creditor that is stopped, long after the freeze is over: nothing else moves meanwhile",
        in_python("control/lending/settling.py", "deadline.within(due.expires - now)", "deadline"),
        ("python/control/test_lending_settling.py",),
        build="python",
    ),
    Bug(
        "round-before-all-agree",
        "policy",
        "a coordinator calls a round when the first member has agreed: debts of others change meanwhile",
        in_python(
            "policy/lending/coordinator.py",
            "is_home = len(answers) == len(call.terms) and all(",
            "is_home = len(answers) > 1 and all(",
        ),
        ("python/policy/test_lending_rounds.py",),
        build="python",
    ),
    Bug(
        "round-brought-twice",
        "policy",
        "what has come home of a round is forgotten: it comes again, and the room that others need is gone",
        in_python("policy/lending/settler.py", "home=answer.home + blocks)", "home=answer.home)"),
        ("python/policy/test_lending_rounds.py",),
        build="python",
    ),
    Bug(
        "answer-to-an-earlier-call",
        "policy",
        "a late record of a settlement that has ended is taken for an answer to the present one",
        in_python(
            "policy/lending/coordinator.py",
            "if answer is not None and answer.key == call.key:",
            "if answer is not None:",
        ),
        ("python/policy/test_lending_rounds.py",),
        build="python",
    ),
    Bug(
        "frozen-blocks-paid-back",
        "control",
        "an engine pays back what a settlement has frozen: the settlement finds nothing to bring home, and ends",
        in_python("control/lending/settling.py", "return policy.payable(found, frozen)", "return tuple(found)"),
        ("python/control/test_lending_settling.py",),
        build="python",
    ),
    Bug(
        "recall-waits-for-the-freeze",
        "control",
        "blocks that a creditor recalls are frozen: they do not come home by its deadline, and are lost",
        in_python(
            "control/lending/lending.py",
            "return policy.plan_payback(self._borrowing.loans(among=addrs), self._own.stats().free, leaf=self._leaf)",
            "return policy.plan_payback("
            "self._settling.payable(self._borrowing.loans(among=addrs)), self._own.stats().free, leaf=self._leaf)",
        ),
        ("python/control/test_lending_settling.py",),
        build="python",
    ),
    Bug(
        "queue-left-out",
        "sim",
        "a simulated step does not wait for what a creditor computes for others: lending looks better than it is",
        in_python(
            "sim/lending_times.py",
            "*(each.queue_s + each.round_trip_s + each.service_s for each in remote)",
            "*(each.round_trip_s + each.service_s for each in remote)",
        ),
        ("python/sim/test_lending_times.py",),
        build="python",
    ),
    Bug(
        "simulated-cap-ignored",
        "sim",
        "a simulated creditor lends all that is free: contexts look longer than a fleet can serve",
        in_python(
            "sim/lending_memory.py",
            "return max(0, min(self.free - self.reserve, self.lend_max - sum(self.lent.values())))",
            "return max(0, self.free - self.reserve)",
        ),
        ("python/sim/test_lending_fleet.py",),
        build="python",
    ),
)
