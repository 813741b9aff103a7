"""Two network namespaces and a cable: cut both ways, one way, flapping. The kernels at its ends notice nothing.

Bugs these tests are there to find: a pair that stays apart after the cable works again (4); blocks that a partition
takes with it (3); a request that waits for the end of the partition instead of its deadline (2).
"""

from __future__ import annotations

import functools
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from transfer.kit import SECRET
from victims import LEASE, Nursery, Victim, eventually, repeats, seed_of

import kvpool

NO_NAMESPACES = "this machine lets no process make a network namespace"
NOTICED_SECONDS = 10 * (LEASE + 1)
HEALED_SECONDS = 30.0  # promised: two leases


@functools.cache
def command() -> tuple[str, ...] | None:
    """How to start a process that may make network namespaces; None where nobody may."""
    if shutil.which("unshare"):
        for start in ((), ("unshare", "--user", "--map-root-user")):
            if subprocess.run([*start, "unshare", "--net", "true"], capture_output=True, check=False).returncode == 0:
                return start
    return None


@dataclass
class Ends:
    """Each listens, and calls the other one; `a` sends, `b` receives."""

    a: Victim
    b: Victim
    hardware: list[bytes]

    def cut(self, *, a_to_b: bool = True, b_to_a: bool = True) -> None:
        self.a("aim(0, to)", to=None if a_to_b else self.hardware[1])
        self.b("aim(1, to)", to=None if b_to_a else self.hardware[0])

    def heal(self) -> None:
        self.cut(a_to_b=False, b_to_a=False)

    def meet(self) -> None:
        """Connects until both see each other: a may still see a peer that b has lost, for up to a lease."""

        def met() -> bool:
            return self.a("call(pool, there)") == "b" and self.b("[peer.name for peer in pool.peers.list()]") == ["a"]

        eventually(met)

    def transfer(self, number: int) -> None:
        sent = self.a("stamp(pool, addrs, number)\npool.transfer('b', addrs).wait(60).addrs.tolist()", number=number)
        self.take(sent, number)

    def take(self, sent: list[int], number: int) -> None:
        """Checks the item that b has received, and closes it."""
        code = "item = pool.inbox.receive(60)\nwrong = check(pool, sent, number)\nitem.close()\nwrong"
        assert self.b(code, sent=sent, number=number) == []

    def check_nothing_is_left(self) -> None:
        for end in (self.a, self.b):
            end("eventually(lambda: blocks_at_peers(pool) == 0)\npool.audit()\nNone")
        assert self.a("pool.stats().hbm.active") == 4
        eventually(lambda: self.b("while item := pool.inbox.receive(0): item.close()\npool.stats().hbm.active") == 0)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    start = command()
    if start is None:
        pytest.skip(NO_NAMESPACES)
    one = Nursery(command=start)
    yield one
    one.close()


@pytest.fixture
def lease() -> float:
    """A test that is not about it takes a longer one."""
    return LEASE


@pytest.fixture
def ends(nursery: Nursery, lease: float) -> Iterator[Ends]:
    with nursery.victim(own_network=True) as a, nursery.victim(own_network=True) as b:
        a("from wires import *\nlay_wire(pid)", pid=b("from wires import *\nos.getpid()"))
        both = Ends(a, b, [a("take_end(0)"), b("take_end(1)")])
        both.heal()
        for end, victim in enumerate((a, b)):
            victim(
                "pool = big_pool(secret=secret, routes=('sock',), name=name, lease_s=lease)\n"
                "pool.peers.listen(f'tcp:{address_on_wire(end)}:4711')\nthere = f'tcp:{address_on_wire(1 - end)}:4711'",
                secret=SECRET, name="ab"[end], end=end, lease=lease,
            )  # fmt: skip
        a("addrs = pool.alloc(4)")
        both.meet()
        both.transfer(1)
        yield both


SHAPES = {"both ways": (True, True), "there": (True, False), "back": (False, True)}


@pytest.mark.parametrize("shape", SHAPES)
def test_both_sides_notice_a_partition_and_reconnect_when_it_ends(ends, shape):
    there, back = SHAPES[shape]
    assert ends.b("len(pool.alloc(5, instance='a'))") == 5
    ends.cut(a_to_b=there, b_to_a=back)
    began = time.monotonic()
    with pytest.raises(kvpool.PeerLost):
        ends.a("pool.transfer('b', addrs, timeout=60).wait()")
    ends.b("eventually(lambda: pool.peers.list() == [])")
    assert time.monotonic() - began < NOTICED_SECONDS
    with pytest.raises((kvpool.DeadlineExceeded, kvpool.PeerLost)):
        ends.a("pool.peers.connect(there, timeout=0.3)")
    ends.check_nothing_is_left()
    ends.heal()
    healed = time.monotonic()
    ends.meet()
    assert time.monotonic() - healed < HEALED_SECONDS
    ends.transfer(2)
    ends.check_nothing_is_left()


@pytest.mark.parametrize("lease", [30.0])
def test_a_partition_shorter_than_the_lease_loses_no_peer(ends):
    for number in range(2, 6):
        ends.cut()
        ends.a("stamp(pool, addrs, number)\nhandle = pool.transfer('b', addrs, timeout=60)", number=number)
        time.sleep(LEASE / 5)
        ends.heal()
        ends.take(ends.a("handle.wait().addrs.tolist()"), number)
    ends.check_nothing_is_left()


@pytest.mark.parametrize("lease", [60.0])
def test_a_deadline_is_kept_within_a_partition(ends):
    """Which goes on, and would be noticed much later."""
    ends.cut()
    began = time.monotonic()
    with pytest.raises(kvpool.DeadlineExceeded):
        ends.a("pool.transfer('b', addrs, timeout=0.1).wait()")
    assert time.monotonic() - began < 30
    ends.heal()
    ends.meet()
    ends.transfer(3)
    ends.check_nothing_is_left()


def transfer_when_healed(ends, number, healed):
    """One side may notice late that the other was silent, and part from it once more."""
    while True:
        ends.meet()
        try:
            ends.transfer(number)
            break
        except kvpool.PeerLost:
            assert time.monotonic() - healed < HEALED_SECONDS
    assert time.monotonic() - healed < HEALED_SECONDS


def test_peers_reconnect_after_flapping(ends, request):
    dice = random.Random(seed_of(request))
    for flap in range(repeats(12, long=500)):
        ends.cut(a_to_b=dice.random() < 0.7, b_to_a=dice.random() < 0.7)
        time.sleep(LEASE * dice.choice([0.1, 0.3, 0.6, 1.5]))
        ends.heal()
        healed = time.monotonic()
        if dice.random() >= 0.5:
            transfer_when_healed(ends, flap + 10, healed)
    transfer_when_healed(ends, 9, healed)
    ends.check_nothing_is_left()
