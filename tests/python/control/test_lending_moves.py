"""What goes to creditors and what comes home, with pools that are made up."""

from __future__ import annotations

import dataclasses

import pytest
from control.lending_kit import FakeCluster, FakeRegistration, FakeSequence, enter, town_of

from kvpool import ArgumentError, Busy, ClosedError, DeadlineExceeded, OutOfBlocks, PeerLost, StateError
from kvpool.control.lending import Lending


def check_all(town):
    """No block is lost or had twice, and each loan has both ends."""
    for pool in town.pools.values():
        assert len(set(pool.free_blocks)) == len(pool.free_blocks)
        if not pool.closed:
            borrowed = {addr for addr in pool.borrowed if not pool.owner(addr).closed}
            lent = {addr for each in town.pools.values() for addr, to in each.lent.items() if to == pool.name}
            assert borrowed == {addr for addr in lent if not pool.owner(addr).closed}


def test_the_oldest_leaves_go_and_their_room_is_free():
    town, [(a, lending), (b, _)] = town_of(20, 40)
    seq = FakeSequence(a, 18)
    assert lending.offload(seq, 3) == 4  # a leaf
    assert seq.owners == [2] * 4 + [1] * 14
    assert len(a.free_blocks) == 6
    seq.check()
    assert lending.offload(seq, 8) == 8
    assert seq.owners == [2] * 12 + [1] * 6
    assert len(b.lent) == 12
    seq.check()
    check_all(town)


def test_the_tail_stays():
    _, [(a, lending), _] = town_of(20, 40)
    seq = FakeSequence(a, 18)
    seq.tokens = 18 * 256 - 255  # the last block has one token
    with pytest.raises(ArgumentError, match="14 lie here"):
        lending.offload(seq, 15)
    assert lending.offload(seq, 14) == 14
    seq.check()
    seq.tokens = 0  # nothing is written, so nothing may go
    with pytest.raises(ArgumentError, match="0 lie here"):
        lending.offload(seq, 1)


def test_blocks_that_are_not_written_stay():
    _, [(a, lending), _] = town_of(20, 40, tail=1)
    seq = FakeSequence(a, 18)
    seq.tokens = 5 * 256
    with pytest.raises(ArgumentError, match="4 lie here"):
        lending.offload(seq, 5)


@pytest.mark.parametrize("refusal", [OutOfBlocks("no"), Busy("no"), PeerLost("no"), DeadlineExceeded("no")])
def test_a_member_that_refuses_is_not_asked_again_and_the_next_one_is(refusal):
    town, [(a, lending), *others] = town_of(20, 40, 40, 40, 40, 40)
    seq = FakeSequence(a, 18)
    for pool, _ in others[:-1]:
        pool.refusal = refusal
    assert lending.offload(seq, 4) == 4
    assert seq.owners[:4] == [6] * 4
    assert len(a.asked) == len(set(a.asked))  # each at most once, beyond the first three too
    for pool, _ in others[:-1]:
        pool.refusal = None
    a.asked.clear()
    assert lending.offload(seq, 4) == 4
    assert a.asked == ["m6"]  # the others' refusals are known until they publish again
    seq.check()
    check_all(town)


def test_a_refusal_counts_until_its_time_is_over():
    _, [(a, lending), (b, _)] = town_of(20, 40)
    now = [0.0]
    lending._members._clock = lambda: now[0]
    seq = FakeSequence(a, 18)
    b.refusal = Busy("no")
    with pytest.raises(OutOfBlocks):
        lending.offload(seq, 4)
    asked = len(a.asked)
    b.refusal = None
    with pytest.raises(OutOfBlocks):
        lending.offload(seq, 4)
    assert len(a.asked) == asked  # it is known that it refused
    now[0] = 36_001.0
    assert lending.offload(seq, 4) == 4


def test_a_new_row_ends_a_correction():
    _, [(a, lending), (b, b_lending)] = town_of(20, 40)
    seq = FakeSequence(a, 18)
    b.refusal = Busy("no")
    with pytest.raises(OutOfBlocks):
        lending.offload(seq, 4)
    b.refusal = None
    own = FakeSequence(b, 10)
    assert b_lending.publish()
    assert lending.offload(seq, 4) == 4
    own.check()


def test_several_creditors_lend_parts_when_none_has_all():
    town, [(a, lending), *_] = town_of(20, 5, 5, 5)
    seq = FakeSequence(a, 18)
    assert lending.offload(seq, 12) == 12
    assert sorted(seq.owners[:12]) == [2] * 4 + [3] * 4 + [4] * 4
    seq.check()
    check_all(town)


def test_too_little_room_everywhere_changes_nothing():
    town, [(a, lending), (b, _), (c, _)] = town_of(20, 5, 5)
    seq = FakeSequence(a, 18)
    with pytest.raises(OutOfBlocks, match="10 of 12"):
        lending.offload(seq, 12)
    assert seq.owners == [1] * 18
    assert (len(b.free_blocks), len(c.free_blocks), len(a.borrowed)) == (5, 5, 0)
    check_all(town)


def test_a_transfer_that_fails_changes_nothing():
    town, [(a, lending), (b, _)] = town_of(20, 40)
    seq = FakeSequence(a, 18)
    a.moving_failure = PeerLost("on the way")
    with pytest.raises(PeerLost, match="on the way"):
        lending.offload(seq, 4)
    assert seq.owners == [1] * 18
    assert (len(b.free_blocks), len(a.free_blocks)) == (40, 2)
    check_all(town)


def test_a_switch_that_fails_halfway_is_taken_back():
    town, [(a, lending), *_] = town_of(20, 5, 5, 5)
    seq = FakeSequence(a, 18)
    seq.fails_at = 4  # the second creditor's part
    with pytest.raises(PeerLost, match="at the switch"):
        lending.offload(seq, 12)
    assert seq.owners == [1] * 18
    assert not a.borrowed
    seq.check()
    check_all(town)


def test_blocks_that_the_engine_replaces_meanwhile_stay_its():
    town, [(a, lending), (b, _)] = town_of(30, 40)
    seq = FakeSequence(a, 18)
    other = FakeSequence(a, 4)
    seq.meanwhile = lambda: seq.replace(0, other.addrs)
    with pytest.raises(StateError, match="changed"):
        lending.offload(seq, 4)
    assert seq.addrs[:4].tolist() == other.addrs.tolist()
    assert len(b.free_blocks) == 40
    check_all(town)


def test_blocks_whose_tokens_are_taken_back_while_they_are_copied_stay():
    town, [(a, lending), (b, _)] = town_of(30, 40)
    seq = FakeSequence(a, 18)

    def take_back():
        seq._set_backs += 1

    seq.meanwhile = take_back
    with pytest.raises(StateError):
        lending.offload(seq, 4)
    assert seq.owners == [1] * 18
    assert len(b.free_blocks) == 40
    assert not a.borrowed
    check_all(town)


def test_what_was_begun_ends_before_its_blocks_are_given_up():
    town, [(a, lending), *_] = town_of(30, 8, 8)
    seq = FakeSequence(a, 18)
    ended = []

    class Slow:
        def exception(self, timeout=None):
            ended.append("waited")
            a.writing = False

        def cancel(self):
            ended.append("cancelled")
            return True

    transfers = iter([Slow(), PeerLost("it is gone")])

    def transfer(peer, blocks, *, to, timeout=None):
        one = next(transfers)
        if isinstance(one, Exception):
            raise one
        a.writing = True
        return one

    def free(addrs, free=a.free):
        assert not a.writing
        free(addrs)

    a.transfer, a.free = transfer, free
    with pytest.raises(PeerLost):
        lending.offload(seq, 12)
    assert ended == ["cancelled", "waited"]
    assert not a.borrowed
    check_all(town)


def test_a_borrower_is_not_asked_and_lent_blocks_do_not_go_on():
    town, [(a, a_lending), (b, b_lending), _] = town_of(20, 20, 200)
    theirs = FakeSequence(b, 18)
    b_lending.offload(theirs, 12)  # at m3: its own 14 free blocks may still be lent, but nobody asks for them
    seq = FakeSequence(a, 18)
    a_lending.offload(seq, 4)
    assert a.asked == ["m3"]
    with pytest.raises(ArgumentError, match="lie here"):
        b_lending.offload(theirs, 3)  # what is left of it here is its tail
    assert set(theirs.owners[:12]) == {3}
    check_all(town)


def test_what_comes_home_is_the_oldest_loan_and_leaves_the_reserve():
    town, [(a, lending), (b, _)] = town_of(40, 80, reserve=2)
    first, second = FakeSequence(a, 18), FakeSequence(a, 18)
    lending.offload(second, 8)
    lending.offload(first, 8)
    filler = FakeSequence(a, 10)  # 10 blocks are left free
    assert lending.payback() == 8
    assert second.owners == [1] * 18
    assert first.owners == [2] * 8 + [1] * 10
    assert len(a.free_blocks) == 2
    assert lending.payback() == 0
    a.free(filler.addrs)
    assert lending.payback() == 8
    assert not a.borrowed
    assert len(b.free_blocks) == 80
    for seq in (first, second):
        seq.check()
    check_all(town)


def test_what_a_creditor_wants_comes_home_before_older_loans():
    town, [(a, lending), *_] = town_of(40, 12, 12)
    first, second = FakeSequence(a, 18), FakeSequence(a, 18)
    lending.offload(first, 8)
    lending.offload(second, 8)
    creditor = town.pools[f"m{second.owners[0]}"]
    assert creditor.instance != first.owners[0]
    own = FakeSequence(creditor, 4)
    with enter_reserve(town, creditor) as its:
        assert its.row.wants == 3
        filler = FakeSequence(a, 16)  # four blocks are left free
        assert lending.payback() == 4
    assert second.owners == [creditor.instance] * 4 + [1] * 14
    assert first.owners[0] != 1
    for seq in (first, second, own, filler):
        seq.check()


def enter_reserve(town, pool):
    """The same member with a reserve that it has used up."""
    return Lending(pool, FakeCluster(town, FakeRegistration(town, town.members[pool.instance])), reserve=3)


def test_a_creditor_that_is_gone_keeps_nothing_else_from_coming_home():
    town, [(a, lending), *_] = town_of(40, 8, 8)
    first, second = FakeSequence(a, 18), FakeSequence(a, 18)
    lending.offload(first, 8)
    lending.offload(second, 8)
    gone = town.pools[f"m{first.owners[0]}"]
    assert second.owners[0] != gone.instance
    town.remove(gone.name)
    before = len(a.free_blocks)
    assert lending.payback() == 8
    assert second.owners == [1] * 18
    assert first.owners[:8] == [gone.instance] * 8  # as attention over it will say
    assert len(a.free_blocks) == before - 8
    second.check()


def test_sequences_that_have_ended_are_forgotten():
    _, [(a, lending), (b, _)] = town_of(40, 40)
    seq = FakeSequence(a, 18)
    lending.offload(seq, 8)
    a.free(seq.addrs)
    seq.closed = True
    assert lending.payback() == 0
    assert lending._borrowing._sequences == {}
    assert len(b.free_blocks) == 40


def test_what_the_engine_offloaded_by_itself_comes_home_too():
    _, [(a, lending), _] = town_of(40, 40)
    seq = FakeSequence(a, 18)
    lent = a.alloc(4, 2, False, instance="m2")
    a.transfer("m2", seq.addrs[:4], to=lent)
    a.free(seq.replace(0, lent))
    assert lending.payback() == 0
    lending.watch(seq)
    assert lending.payback() == 4
    seq.check()


def test_what_a_creditor_recalls_comes_home_and_nothing_else():
    town, [(a, lending), (b, _)] = town_of(40, 40, reserve=6)
    seq, other = FakeSequence(a, 18), FakeSequence(a, 18)
    lending.offload(seq, 8)
    lending.offload(other, 8)
    filler = FakeSequence(a, 17)  # three blocks are left, less than the reserve
    recalled = seq.addrs[2:7].tolist()
    assert lending.give_back([*recalled, 12 << 50 | 2 << 47]) == 3
    assert seq.owners == [2] * 4 + [1] * 3 + [2] + [1] * 10
    a.free(filler.addrs[:9])
    assert lending.give_back(recalled) == 2
    assert seq.owners == [2] * 2 + [1] * 5 + [2] + [1] * 10
    assert other.owners == [2] * 8 + [1] * 10
    assert lending.give_back(recalled) == lending.give_back([]) == 0
    seq.check()
    assert len(b.lent) == 11
    check_all(town)


def test_a_deadline_that_is_over_changes_nothing():
    town, [(a, lending), _] = town_of(20, 40)
    seq = FakeSequence(a, 18)
    with pytest.raises(DeadlineExceeded):
        lending.offload(seq, 4, timeout=0.0)
    assert seq.owners == [1] * 18
    assert not a.borrowed
    check_all(town)


def test_wrong_arguments_are_refused():
    town, [(a, lending), _] = town_of(20, 40)
    seq = FakeSequence(a, 18)
    for blocks in (0, -1, True, 1.5):
        with pytest.raises(ArgumentError, match="blocks"):
            lending.offload(seq, blocks)
    with pytest.raises(ArgumentError, match="timeout"):
        lending.payback(timeout=-1.0)
    for options in ({"lend_max": -1}, {"reserve": -1}, {"tail": 0}, {"medium": 3}):
        with pytest.raises(ArgumentError):
            enter(town, 9, 10, **options)


def test_after_close_nothing_moves_and_nobody_asks():
    _, [(a, a_lending), (b, b_lending)] = town_of(20, 40)
    seq = FakeSequence(a, 18)
    b_lending.close()
    b_lending.close()
    with pytest.raises(OutOfBlocks):
        a_lending.offload(seq, 4)
    assert a.asked == []
    theirs = FakeSequence(b, 18)
    with pytest.raises(ClosedError):
        b_lending.offload(theirs, 4)
    with pytest.raises(ClosedError):
        b_lending.payback()
    a.closed = True
    with pytest.raises(ClosedError):
        a_lending.offload(seq, 4)


def test_a_member_that_is_draining_is_not_asked():
    town, [(a, lending), _] = town_of(20, 40)
    seq = FakeSequence(a, 18)
    town.show(dataclasses.replace(town.members[2], state="draining"))
    with pytest.raises(OutOfBlocks):
        lending.offload(seq, 4)
    assert a.asked == []
    town.show(dataclasses.replace(town.members[2], state="up"))
    assert lending.offload(seq, 4) == 4
