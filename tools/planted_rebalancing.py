"""Bugs of rebalancing by epochs, for `make planted`."""

from __future__ import annotations

from typing import Final

from tools.planted_kit import Bug, in_python

__all__ = ["REBALANCING_BUGS"]

_LEASES: Final = ("python/control/test_rebalancing_leases.py",)
_SEATS: Final = ("python/control/test_rebalancing_seats.py",)
_TURNS: Final = ("python/policy/test_rebalancing_turns.py", "python/control/test_rebalancing.py", *_LEASES)
_KILLED: Final = ("multiprocess/test_planner_kill.py",)
_PLAN: Final = ("python/policy/test_rebalancing_plan.py",)
_EPOCHS: Final = ("python/control/test_rebalancing.py",)
_ENDS: Final = ("python/control/test_rebalancing_ends.py",)
_ACCEPT: Final = "if plan.planner != planner or plan.number <= self.accepted:"
_NEWEST: Final = "if any(plan.number < state.last for state in others):"
_NEW_TERM: Final = "            term += 1 + (self._instance - term - 1) % _INSTANCES\n"
_READ: Final = "if plan is not None and self.seat.accept(plan, planner, [each.state for each in said.values()]):"

REBALANCING_BUGS: Final = (
    Bug(
        "plan-carried-out-twice",
        "policy",
        "an instance carries out the plan of an epoch again each time it reads it",
        in_python("policy/rebalancing/turns.py", _ACCEPT, _ACCEPT.replace("<=", "<")),
        _TURNS,
        build="python",
    ),
    Bug(
        "plan-of-an-old-epoch",
        "policy",
        "a plan that comes late is carried out after a newer one",
        in_python("policy/rebalancing/turns.py", _ACCEPT, _ACCEPT.replace("<=", "==")),
        _TURNS,
        build="python",
    ),
    Bug(
        "plan-of-anybody",
        "policy",
        "an instance carries out what a member plans that it does not take for the planner",
        in_python("policy/rebalancing/turns.py", _ACCEPT, "if plan.number <= self.accepted:"),
        _TURNS,
        build="python",
    ),
    Bug(
        "same-term-after-a-takeover",
        "policy",
        "an instance that takes over plans in the term of the one before, whose late plans then count",
        in_python("policy/rebalancing/turns.py", _NEW_TERM, "            pass\n"),
        _TURNS,
        build="python",
    ),
    Bug(
        "term-of-two-planners",
        "policy",
        "two members that take over at once have one term: two plans have one number, and the older one counts",
        in_python("policy/rebalancing/turns.py", _NEW_TERM, "            term += 1\n"),
        _LEASES,
        build="python",
    ),
    Bug(
        "moves-count-on-each-other",
        "policy",
        "two moves of a plan are promised the same room: the second is refused",
        in_python("policy/rebalancing/planner.py", "                left[move.destination] -= tokens\n", ""),
        _PLAN,
        build="python",
    ),
    Bug(
        "request-on-its-way-moves-again",
        "policy",
        "a request that is claimed by two instances is planned to move away from one of them",
        in_python("policy/rebalancing/picture.py", "if row.free and not leaves:", "if row.free:"),
        _PLAN,
        build="python",
    ),
    Bug(
        "queue-of-an-old-plan",
        "control",
        "moves of a plan that have not begun are carried out after the next plan has come",
        in_python(
            "control/rebalancing/carrying.py",
            "            self._queue = deque((move, names[move.destination], lease) for move in free)\n",
            "            self._queue.extend((move, names[move.destination], lease) for move in free)\n",
        ),
        _EPOCHS,
        build="python",
    ),
    Bug(
        "begun-twice",
        "control",
        "a request that begins to move while the next plan is accepted moves twice: its mover dies, and at last all do",
        in_python("control/rebalancing/carrying.py", " if move.request not in self._begun]", "]")
        + in_python("control/rebalancing/carrying.py", "if move.request not in self._begun:", "if True:")
        + in_python(
            "control/rebalancing/carrying.py", "self._begun.pop(move.request, None)", "del self._begun[move.request]"
        )
        + in_python(
            "control/rebalancing/carrying.py",
            "            with self._lock:\n"
            "                self._threads.discard(threading.current_thread())\n"
            "            raise\n",
            "            raise\n",
        ),
        _EPOCHS,
        build="python",
    ),
    Bug(
        "end-asked-for-once",
        "policy",
        "an instance that was asked to end and could not just then is never asked again: it runs empty for ever",
        in_python(
            "policy/rebalancing/plan.py", "(self.moves or self.placed or self.ends)", "(self.moves or self.placed)"
        ),
        _ENDS,
        build="python",
    ),
    Bug(
        "ends-while-a-request-comes",
        "control",
        "an instance does not say that a request is on its way to it: it is asked to end, again and again",
        in_python("control/rebalancing/epochs.py", "            len(arriving),\n", "            0,\n"),
        _ENDS,
        build="python",
    ),
    Bug(
        "planner-that-only-lives",
        "policy",
        "a planner whose heartbeat goes on and whose plans do not is waited for, for ever: nobody plans",
        in_python("policy/rebalancing/beats.py", "            left.discard(found)\n", "            break\n"),
        _LEASES,
        build="python",
    ),
    Bug(
        "back-after-the-end",
        "control",
        "a step that outlives the end of a rebalancer publishes once more: all wait for plans that do not come",
        in_python("control/rebalancing/seat.py", "fields != self._shared.published and not self.left:", "True:"),
        _LEASES,
        build="python",
    ),
    Bug(
        "taken-back-for-another",
        "control",
        "a rebalancer that is closed after a later one of its member began takes back what that one says",
        in_python("control/rebalancing/seat.py", "            if not was_left:\n", "            if True:\n"),
        _SEATS,
        build="python",
    ),
    Bug(
        "plans-of-two-rebalancers",
        "control",
        "a rebalancer that follows another one of its member carries out the plan again that this has carried out",
        in_python("control/rebalancing/seat.py", "        return self._shared.book\n", "        return self._own\n")
        + in_python(
            "control/rebalancing/seat.py",
            "        self._left = False\n",
            "        self._left = False\n        self._own = PlanBook(registration.instance)\n",
        ),
        _SEATS,
        build="python",
    ),
    Bug(
        "planner-without-a-lease",
        "control",
        "an instance that the cluster has given up goes on planning and carrying out",
        in_python(
            "control/rebalancing/epochs.py",
            "        if lease is not None and self._is_new(began, lease):\n",
            "        lease = lease or 0\n        if True:\n",
        ),
        _LEASES,
        build="python",
    ),
    Bug(
        "old-plan-that-is-back",
        "policy",
        "an instance that missed the plan of another planner carries out the older one of a planner that is back",
        in_python("policy/rebalancing/turns.py", _NEWEST, "if False:"),
        _TURNS,
        build="python",
    ),
    Bug(
        "not-asked-for-anew",
        "control",
        "a planner that is back wants what it wanted before, and does not say so anew: nobody accepts it any more",
        in_python("control/rebalancing/epochs.py", "number.term > self._plan.number.term or ", ""),
        _LEASES,
        build="python",
    ),
    Bug(
        "planned-under-an-old-lease",
        "control",
        "a planner that was stopped for longer than its lease while it planned carries out its plan when it wakes",
        in_python(
            "control/rebalancing/epochs.py",
            "        if self._late:  #",
            "        if False:  #",
        ),
        _LEASES,
        build="python",
    ),
    Bug(
        "read-under-an-old-lease",
        "control",
        "an instance that was stopped for longer than its lease acts on what it has read before",
        in_python(
            "control/rebalancing/epochs.py",
            "if lease is not None and self._is_new(began, lease):",
            "if lease is not None:",
        ),
        _LEASES,
        build="python",
    ),
    Bug(
        "begun-under-an-old-lease",
        "control",
        "an instance that has lost its lease goes on with the moves of its last plan that wait",
        in_python(
            "control/rebalancing/carrying.py", "            if self._lease() != lease:\n", "            if False:\n"
        ),
        _LEASES,
        build="python",
    ),
    Bug(
        "plan-carried-out-when-read",
        "control",
        "an instance carries out a plan of another process whenever it reads it: requests are asked to move twice",
        in_python("control/rebalancing/epochs.py", _READ, "if plan is not None:"),
        _KILLED,
        build="python",
    ),
    Bug(
        "woken-planner-believed",
        "policy",
        "the plan of a planner that wakes after another one has planned is carried out by the other processes",
        in_python("policy/rebalancing/turns.py", _ACCEPT, _ACCEPT.replace("<=", "=="))
        + in_python("policy/rebalancing/turns.py", _NEWEST, "if False:"),
        _KILLED,
        build="python",
    ),
    Bug(
        "woken-planner-believed-by-one",
        "policy",
        "the plan of a planner that wakes is carried out by the one process that has missed the newer plan",
        in_python("policy/rebalancing/turns.py", _NEWEST, "if False:"),
        _KILLED,
        build="python",
    ),
    Bug(
        "woken-planner-believes-itself",
        "control",
        "a planner that was stopped while it planned wakes as a member again, and carries out what it has planned",
        in_python("control/rebalancing/epochs.py", "        if self._late:  #", "        if False:  #"),
        _KILLED,
        build="python",
    ),
)
