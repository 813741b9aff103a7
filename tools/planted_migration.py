"""Bugs of live migration, for `make planted`."""

from __future__ import annotations

from typing import Final

from tools.planted_kit import Bug, in_python

__all__ = ["MIGRATION_BUGS"]

_PROTOCOL: Final = ("python/policy/test_migration.py",)
_CARRIED_OUT: Final = tuple(f"python/control/test_migration{part}.py" for part in ("", "_room", "_ends"))

MIGRATION_BUGS: Final[tuple[Bug, ...]] = (
    Bug(
        "decoded-a-token-too-early",
        "policy",
        "a destination decodes when all tokens but one are there: other tokens than without migration",
        in_python(
            "policy/migration/destination.py",
            "handed is not None and self.whole >= handed.whole",
            "handed is not None and self.whole + 1 >= handed.whole",
        ),
        _PROTOCOL,
        build="python",
    ),
    Bug(
        "block-sent-before-its-last-write",
        "policy",
        "a block is sent ahead while a step still writes to it: its last tokens are missing at the destination",
        in_python(
            "policy/migration/source.py",
            "return progress.whole // self._block_tokens",
            "return min(-(-progress.whole // self._block_tokens), len(progress.tokens) // self._block_tokens)",
        ),
        _PROTOCOL,
        build="python",
    ),
    Bug(
        "freed-before-the-destination-decodes",
        "policy",
        "a source ends when it has handed a request over: the blocks are gone when the destination fails",
        in_python(
            "policy/migration/source.py",
            '_ENDED: Final = ("released", "back")',
            '_ENDED: Final = ("handed", "released", "back")',
        ),
        _PROTOCOL,
        build="python",
    ),
    Bug(
        "cancelled-after-the-hand-over",
        "policy",
        "a request that was handed over is kept by a cancel: it runs twice",
        in_python(
            "policy/migration/source.py",
            'return self.state in ("offered", "moving")',
            'return self.state in ("offered", "moving", "handed")',
        ),
        _PROTOCOL,
        build="python",
    ),
    Bug(
        "handed-over-without-a-term",
        "policy",
        "both places decode in one term: the reader cannot tell a source that has taken its request back",
        in_python(
            "policy/migration/source.py",
            "        self._term = self._term.next(self.id.source)\n        self.state = ",
            "        self.state = ",
        ),
        _PROTOCOL,
        build="python",
    ),
    Bug(
        "handed-over-twice",
        "policy",
        "an offer that was repeated is accepted again when it has failed: a request arrives that has stayed",
        in_python(
            "policy/migration/registry.py",
            "            and said.id.number not in self._used_of(said.id.source)\n",
            "",
        ),
        _PROTOCOL,
        build="python",
    ),
    Bug(
        "failed-and-decoded",
        "policy",
        "a destination gives up a request that it decodes: the source goes on, too",
        in_python(
            "policy/migration/destination.py",
            '        if self.state == "moving":\n            self.state, self.why, self.full',
            "        if not self.ended:\n            self.state, self.why, self.full",
        ),
        _PROTOCOL,
        build="python",
    ),
    Bug(
        "old-term-heard",
        "policy",
        "the reader takes what a place puts out that has lost its request: tokens of two runs are mixed",
        in_python("policy/migration/terms.py", "if term < self._terms.get(request, term):", "if False:"),
        _PROTOCOL,
        build="python",
    ),
    Bug(
        "released-at-the-hand-over",
        "control",
        "a source frees the blocks of a request when it hands it over: the destination fetches what others wrote",
        in_python(
            "control/migration/leaving.py",
            '        self.handle._note("handed over")\n',
            '        self.handle._note("handed over")\n        self._engine.release(source.request)\n',
        ),
        _CARRIED_OUT,
        build="python",
    ),
    Bug(
        "resumed-in-the-old-term",
        "control",
        "a source that takes a request back puts it out in its old term: the reader hears the lost destination, not it",
        in_python(
            "control/migration/leaving.py",
            "self._engine.resume(source.request, source.term)",
            "self._engine.resume(source.request, policy.FIRST)",
        ),
        _CARRIED_OUT,
        build="python",
    ),
    Bug(
        "room-found-piece-by-piece",
        "control",
        "a destination accepts a request that it has no room for: it is full when half of the blocks have moved",
        in_python(
            "control/migration/room.py",
            "own = pool.alloc(missing, medium) if missing > 0 else np.empty(0, np.uint64)",
            "own = np.empty(0, np.uint64)",
        ),
        _CARRIED_OUT,
        build="python",
    ),
    Bug(
        "room-of-a-failed-request-lost",
        "control",
        "blocks of a request that did not arrive are never freed: the pool shrinks with each cancel",
        in_python(
            "control/migration/arriving.py",
            "                is_free = self._room.give_up()\n            elif",
            "                is_free = True\n            elif",
        ),
        _CARRIED_OUT,
        build="python",
    ),
    Bug(
        "sender-not-checked",
        "control",
        "a message of an incarnation that has gone counts for the one that has its name now",
        in_python("control/migration/migrations.py", "if self._evidence.incarnation(peer) != sender:", "if False:"),
        _CARRIED_OUT,
        build="python",
    ),
    Bug(
        "silence-taken-for-death",
        "control",
        "a request is taken back from a destination that was only silent: both decode it",
        in_python(
            "control/migration/evidence.py",
            "        told = self._ask_engine(peer, incarnation)",
            "        if all(info.name != peer for info in self._pool.peers):\n"
            '            return "ended"\n'
            "        told = self._ask_engine(peer, incarnation)",
        ),
        ("multiprocess/test_migration_kill.py",),
        build="python",
    ),
    Bug(
        "cut-link-taken-for-death",
        "control",
        "a request is taken back because its destination could not say that it decodes: both decode it",
        in_python(
            "control/migration/evidence.py",
            "        told = self._ask_engine(peer, incarnation)",
            "        if all(info.name != peer for info in self._pool.peers):\n"
            '            return "fenced"\n'
            "        told = self._ask_engine(peer, incarnation)",
        ),
        ("multiprocess/test_migration_link.py",),
        build="python",
    ),
    Bug(
        "fenced-for-ever",
        "control",
        "an operator who knows that a fenced source's host is dead is not asked: its requests are kept for ever",
        in_python("control/migration/evidence.py", "if fenced and told is None else told", "if fenced else told"),
        ("python/control/test_migration_evidence.py",),
        build="python",
    ),
    Bug(
        "let-go-and-taken-back",
        "policy",
        "a source that is asked again about a request that it has let go says that it has taken it back: it is lost",
        in_python("policy/migration/registry.py", "        if said.id in self._taken_back:\n", "        if True:\n"),
        ("multiprocess/test_migration_link.py",),
        build="python",
    ),
    Bug(
        "forgotten-and-let-go",
        "policy",
        "a destination that wakes long after its request was taken back hears that it has it: it runs twice",
        in_python("policy/migration/registry.py", "if said.id.number <= self._silent_to:", "if False:"),
        _PROTOCOL,
        build="python",
    ),
    Bug(
        "back-after-the-end-of-its-source",
        "policy",
        "a source that has heard that its request is decoded elsewhere goes on with it when that instance dies",
        in_python(
            "policy/migration/source.py",
            "        if not self.ended:\n            self.by_proof",
            '        if self.state != "back":\n            self.by_proof',
        ),
        ("python/policy/test_migration_moments.py",),
        build="python",
    ),
    Bug(
        "asked-back-by-a-dead-source",
        "policy",
        "a request that its source has asked back before it died is given back to it: it is lost",
        in_python("policy/migration/destination.py", 'if gone and said.phase == "withdrawn":', "if False:"),
        ("python/policy/test_migration.py", "python/control/test_migration_alone.py"),
        build="python",
    ),
    Bug(
        "given-back-to-a-dead-source",
        "control",
        "a request for which the engine has no room when its source has just died is given back to it: it is lost",
        in_python("control/migration/arriving.py", "        self._look_for_source()  # it may have died since\n", ""),
        ("python/control/test_migration_alone.py",),
        build="python",
    ),
    Bug(
        "fenced-only-if-it-was-met",
        "control",
        "a member that was lost before a migration met it is waited for, for ever: nothing proves that it is gone",
        in_python(
            "control/migration/evidence.py",
            "or incarnation not in self._departed:",
            "or incarnation not in self._departed or incarnation not in self._processes:",
        ),
        ("python/control/test_migration_evidence.py",),
        build="python",
    ),
    Bug(
        "backlog-without-a-bound",
        "policy",
        "moves wait for a link that is closed while plans go on: more in each epoch, until memory is full",
        in_python("policy/mell/backlog.py", "if len(self._waiting) > self._chain_max * len(sizes):", "if False:"),
        ("python/policy/test_mell_backlog.py",),
        build="python",
    ),
    Bug(
        "dropped-twice",
        "control",
        "an engine is told twice to drop a request that its source has taken back",
        in_python("control/migration/incoming.py", "elif kept.id not in self._dropping:", "else:"),
        ("python/control/test_migration_drops.py",),
        build="python",
    ),
    Bug(
        "parts-of-others",
        "policy",
        "what an epoch has carried of a request that ended counts for another one: its move is made without its KV",
        in_python(
            "policy/mell/backlog.py",
            "each.parts = {name: min(part, sizes[name]) for name, part in each.parts.items() if name in sizes}",
            "each.parts = {name: min(each.carried, each.move.tokens) for name in each.move.requests[:1] if each.parts}",
        ),
        ("python/policy/test_mell_backlog_parts.py",),
        build="python",
    ),
    Bug(
        "handed-over-too-late",
        "control",
        "a request whose deadline passes while the engine stops it is handed over all the same, and in doubt",
        in_python(
            "control/migration/leaving.py",
            "            self._keep(late)\n        if late is not None or self._was_cancelled()",
            "            pass\n        if self._was_cancelled()",
        ),
        ("python/control/test_migration_moments.py",),
        build="python",
    ),
    Bug(
        "given-up-for-an-error",
        "control",
        "an error at the destination gives a request up whose source has died just then: nobody has it",
        in_python(
            "control/migration/arriving.py",
            "                    if not found.handed:  # else",
            "                    if True:  # else",
        ),
        ("python/control/test_migration_moments.py",),
        build="python",
    ),
    Bug(
        "planned-without-memory",
        "control",
        "an instance that has lost a rank goes on taking part: plans send requests to where no peer can reach them",
        in_python("control/rebalancing/epochs.py", "        self._migrations.check()\n", ""),
        ("python/control/test_rebalancing_lost.py",),
        build="python",
    ),
    Bug(
        "asked-back-without-memory",
        "control",
        "an instance that has lost a rank asks for what it has handed over, and is heard: nobody has the request",
        in_python(
            "control/migration/leaving.py",
            "if not self.source.cancel(str(why)) and self._may_ask():",
            "if not self.source.cancel(str(why)):",
        ),
        ("python/control/test_migration_asked_back.py",),
        build="python",
    ),
    Bug(
        "deaf-while-an-error-lasts",
        "control",
        "a destination that meets an error again and again does not hear its source, and keeps the request stopped",
        in_python("control/migration/arriving.py", "                    self._hear_without_proof()\n", ""),
        ("python/control/test_migration_asked_back.py",),
        build="python",
    ),
    Bug(
        "parts-counted-twice",
        "policy",
        "what was carried for one move counts for a later one of the same requests: that is made without their KV",
        in_python("policy/mell/backlog.py", "and carrying.number not in waiting", "and True"),
        ("python/policy/test_mell_backlog_parts.py",),
        build="python",
    ),
)
