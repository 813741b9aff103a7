"""What members publish of their lending, and what they read of others'."""

from __future__ import annotations

import dataclasses
import gc
import logging
import threading
import weakref

import pytest
from control.lending_kit import FakeCluster, FakeRegistration, FakeSequence, Town, enter, town_of
from hypothesis import given, settings
from hypothesis import strategies as st
from policy.lending_kit import row
from transfer.kit import eventually

from kvpool import ArgumentError, Error, Member, MemberEvent, OutOfBlocks, StateError
from kvpool.control.lending import Lending, row_from, row_json


def member_of(fields, **changes):
    return Member("m7", 7, 70, "both", term=changes.pop("term", 1), lending=fields, **changes)


def test_a_row_comes_back_from_a_record_as_it_was():
    made = row(7, 30, dram=20, lent=9, debts={3: 4, 12: 1})
    made = dataclasses.replace(made, wants=2)
    published = Member.from_bytes(member_of(row_json(made)).to_bytes())
    assert row_from(published) == made


def test_who_takes_no_part_or_speaks_a_later_version_has_no_row():
    assert row_from(member_of({})) is None
    assert row_from(member_of({**row_json(row(7)), "v": 2})) is None


@pytest.mark.parametrize(
    "changes",
    [{"free": {"1": -1}}, {"free": {"9": 1}}, {"free": [1]}, {"free": 3}, {"debts": {"7": 3}}, {"debts": {"x": 3}},
     {"lent": "3"}, {"host": None}, {"version": 1.5}, {"blocks": 1 << 50}, {"wants": 1}],
)  # fmt: skip
def test_a_row_that_cannot_be_is_refused_and_costs_nobody_else(changes, caplog):
    bad = {**row_json(row(7)), **changes}
    with pytest.raises(ArgumentError, match="m7 publishes a row"):
        row_from(member_of(bad))
    with pytest.raises(ArgumentError, match="m7 publishes a row"):
        row_from(member_of({name: value for name, value in bad.items() if name != next(iter(changes))}))
    town, [(a, lending), _] = town_of(20, 40)
    seq = FakeSequence(a, 18)
    with caplog.at_level(logging.WARNING, "kvpool.lending"):
        town.show(member_of(bad, term=0), "joined")
        assert lending.offload(seq, 4) == 4
    assert "m7 publishes a row" in caplog.text


def test_small_changes_are_not_published():
    town, [(a, lending)] = town_of(100)
    before = town.published
    taken = FakeSequence(a, 4)
    assert not lending.publish()
    assert lending.row.free_blocks == 100
    taken = [taken, FakeSequence(a, 1)]
    assert lending.publish()
    assert lending.row.free_blocks == 95
    assert town.published == before + 1


def test_the_reserve_is_not_offered_and_what_is_missing_of_it_is_wanted_back():
    _, [(a, lending), (b, b_lending)] = town_of(20, 40, reserve=10)
    assert b_lending.row.free_blocks == 30
    seq = FakeSequence(a, 18)
    lending.offload(seq, 8)
    assert lending.row.debts == {2: 8}
    own = FakeSequence(b, 26)
    assert b_lending.publish()
    assert (b_lending.row.free_blocks, b_lending.row.lent, b_lending.row.wants) == (0, 8, 4)
    own.check()


@pytest.mark.parametrize("is_published", [False, True])  # what it has lent to us we know before its next row
def test_nobody_is_asked_for_more_than_its_cap(is_published):
    town = Town()
    a, lending = enter(town, 1, 40)
    b, b_lending = enter(town, 2, 100, lend_max=10)
    seq = FakeSequence(a, 36)
    assert lending.offload(seq, 8) == 8
    if is_published:
        assert b_lending.publish()
    with pytest.raises(OutOfBlocks):
        lending.offload(seq, 4)
    assert set(a.asked) == {"m2"}
    assert len(b.lent) == 8


def test_two_that_read_the_same_row_do_not_go_beyond_the_cap_together():
    town = Town()
    a, lending = enter(town, 1, 40)
    b, _ = enter(town, 2, 100, lend_max=12)
    c, c_lending = enter(town, 3, 40)
    d, _ = enter(town, 4, 4)
    seq, other = FakeSequence(a, 36), FakeSequence(c, 36)
    lending.offload(seq, 8)
    c_lending.offload(other, 8)  # b has not published yet that it lends 8: it refuses 8 and then lends 4, d the rest
    assert (len(b.lent), len(d.lent)) == (12, 4)
    assert c.asked.count("m2") == 2
    for each in (seq, other):
        each.check()


def test_what_is_lent_beyond_a_lowered_cap_is_wanted_back_and_comes_back():
    town = Town()
    a, lending = enter(town, 1, 40)
    b, b_lending = enter(town, 2, 100, lend_max=20)
    c, c_lending = enter(town, 3, 18)
    seq, other = FakeSequence(a, 18), FakeSequence(c, 18)
    lending.offload(seq, 8)
    c_lending.offload(other, 8)
    assert len(b.lent) == 16
    b.peers.lend_max = 8
    b_lending.publish()
    assert (b_lending.row.wants, b_lending.row.can_lend) == (8, 0)
    assert lending.payback() >= 8
    assert len(b.lent) <= 8
    b_lending.publish()
    assert b_lending.row.wants == 0
    for each in (seq, other):
        each.check()


def test_blocks_move_even_if_the_row_cannot_be_published():
    town = Town()
    a, lending = enter(town, 1, 20)
    enter(town, 2, 40)
    lending._own._registration.failure = StateError("another incarnation has the name")
    seq = FakeSequence(a, 18)
    assert lending.offload(seq, 4) == 4
    with pytest.raises(StateError):
        lending.publish()
    lending._own._registration.failure = None
    assert lending.publish()


def test_a_second_lending_of_a_process_is_heard():
    town, [(a, lending), (b, b_lending)] = town_of(20, 40)
    b_lending.close()
    registration = FakeRegistration(town, town.members[2])
    with Lending(b, FakeCluster(town, registration)):
        seq = FakeSequence(a, 18)
        assert lending.offload(seq, 4) == 4


def test_a_member_that_is_back_in_a_new_term_keeps_its_own_row():
    """Its "regained" callbacks publish; the loss of its last term waits among the events until then."""
    town, [(_, lending)] = town_of(20)
    ledger, before = lending._members.ledger, town.members[1]
    town.members[1] = dataclasses.replace(before, term=before.term + 1)
    town.tell(MemberEvent("lost", before))
    town.tell(MemberEvent("joined", town.members[1]))
    ledger.take(dataclasses.replace(lending.row, term=before.term + 1))  # what publish() takes
    for _ in range(2):
        lending._own.row = None  # it has moved
        assert lending.publish()
        assert ledger.version(1) == (before.term + 1, lending.row.version)
        assert 1 in ledger


def test_a_pool_that_is_no_member_cannot_lend():
    town, [(a, _)] = town_of(20)
    with pytest.raises(StateError, match="attach"):
        Lending(a, FakeCluster(town, None))


def threads():
    return [one for one in threading.enumerate() if one.name == "kvpool-lending"]


def test_the_thread_publishes_by_itself_and_ends_with_its_owner():
    town, [(a, _)] = town_of(100)
    before = set(threads())
    cluster = FakeCluster(town, FakeRegistration(town, town.members[1]))
    cluster.heartbeat_s = 0.01
    made = Lending(a, cluster)
    (thread,) = set(threads()) - before
    FakeSequence(a, 20)
    eventually(lambda: town.members[1].lending["free"] == {"2": 80})
    watching, weak = len(town.watchers), weakref.ref(made)
    del made
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert weak() is None
    assert len(town.watchers) == watching - 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_done_in_whatever_order_no_block_is_lost(data):
    """Offloads, paybacks, rows that are published or not, refusals, members that draw nothing: the books agree."""
    _, made = town_of(*data.draw(st.lists(st.integers(8, 40), min_size=2, max_size=4)), tail=1)
    sequences = []
    for _ in range(data.draw(st.integers(1, 12))):
        pool, lending = data.draw(st.sampled_from(made))
        own = [seq for seq in sequences if seq.pool is pool]
        what = data.draw(st.sampled_from(["begin", "offload", "payback", "publish", "refuse", "fail", "end"]))
        try:
            if what == "begin":
                sequences.append(FakeSequence(pool, data.draw(st.integers(1, 12))))
            elif what == "offload" and own:
                seq, blocks = data.draw(st.sampled_from(own)), data.draw(st.integers(1, 9))
                free = len(pool.free_blocks)
                went = lending.offload(seq, blocks)
                assert blocks <= went < blocks + 4
                assert len(pool.free_blocks) == free + went
            elif what == "payback":
                lending.payback()
            elif what == "publish":
                lending.publish()
            elif what == "refuse":
                pool.refusal = data.draw(st.sampled_from([None, OutOfBlocks("no")]))
            elif what == "fail":
                pool.moving_failure = data.draw(st.sampled_from([None, StateError("no")]))
            elif what == "end" and own:
                seq = own[0]
                sequences.remove(seq)
                seq.closed = True
                pool.free(seq.addrs)
        except Error:
            pass
        for seq in sequences:
            seq.check()
        for pool, _ in made:
            used = [addr for seq in sequences for addr in seq.addrs.tolist() if pool.owner(addr) is pool]
            assert len(used) == len(set(used)) == pool.blocks - len(pool.free_blocks)
            assert set(pool.lent) == {
                addr for seq in sequences for addr in seq.addrs.tolist() if addr in used and seq.pool is not pool
            }
