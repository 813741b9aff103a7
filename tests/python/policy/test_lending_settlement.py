"""Settlement: which cycles of debts come home, compared with naive code on small graphs."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from policy.lending_kit import DEBTS, best_circulation, has_cycle, net_of

from kvpool import ArgumentError, OutOfBlocks
from kvpool.policy import lending
from kvpool.policy.lending.cycles import components


def flat(rounds):
    return [settlement for settlements in rounds for settlement in settlements]


def after(debts, settlements):
    """The debts that are left, by hand; a debt may not go below zero."""
    left = dict(debts)
    for settlement in settlements:
        ring = [*settlement.members, settlement.members[0]]
        for pair in pairwise(ring):
            left[pair] -= settlement.blocks
            assert left[pair] >= 0
    return left


def random_debts(members, degree, seed):
    dice = Random(seed)
    debts = {}
    for debtor in range(1, members + 1):
        for _ in range(dice.randint(0, 2 * degree)):
            creditor = dice.randint(1, members)
            if creditor != debtor:
                blocks = int(dice.lognormvariate(4, 1.2)) + 1
                debts[debtor, creditor] = debts.get((debtor, creditor), 0) + blocks
    return debts


def dense_debts(seed, members=30):
    dice = Random(seed)
    pairs = [(a, b) for a in range(1, members + 1) for b in range(1, members + 1) if a != b and dice.random() < 0.25]
    return {pair: dice.choice([1, 2, 5, 30, dice.randint(1, 300)]) for pair in pairs}


def check(debts, least, work=10**6):
    """What `settle` promises for every graph; returns how many blocks come home."""
    rounds = lending.settle(debts, least, work)
    left = after(debts, flat(rounds))
    assert all(0 <= left[pair] <= debts[pair] for pair in debts)
    assert net_of(left) == net_of(debts)
    assert not has_cycle([pair for pair, blocks in left.items() if blocks >= least])
    assert all(debts[pair] - left[pair] >= least for pair in debts if left[pair] < debts[pair])
    return sum(debts.values()) - sum(left.values())


@given(DEBTS, st.integers(1, 12))
@example({(1, 2): 5, (2, 1): 3}, 3)
@example({(1, 2): 9, (2, 3): 9, (3, 1): 9, (2, 1): 9}, 4)
def test_no_cycle_stays_no_debt_grows_and_each_net_debt_stays(debts, least):
    check(debts, least)


@given(DEBTS, st.integers(1, 12))
def test_what_is_promised_holds_when_the_work_does_not_suffice(debts, least):
    check(debts, least, work=0)


@pytest.mark.parametrize("work", [0, 50_000])
@pytest.mark.parametrize("least", [1, 16])
def test_what_is_promised_holds_among_many_members(least, work):
    for seed in range(3):
        check(random_debts(150, 4, seed), least, work)


@pytest.mark.parametrize("seed", [14, 24, 31])
def test_cycles_that_a_hasty_flow_leaves_are_cancelled(seed):
    """These graphs leave some when any way is taken."""
    check(dense_debts(seed), 1, work=0)


@given(DEBTS)
def test_as_many_blocks_come_home_as_possible(debts):
    best = best_circulation(debts)
    assert check(debts, 1) == best
    assert sum(each.blocks * len(each.members) for each in flat(lending.settle(debts))) == best


@given(DEBTS, st.integers(2, 12))
def test_with_a_least_number_at_least_the_best_of_its_multiples_comes_home(debts, least):
    times = {pair: blocks // least for pair, blocks in debts.items()}
    assert check(debts, least) >= least * best_circulation(times)


def test_with_a_least_number_the_settled_debts_are_settled_as_far_as_possible():
    """In multiples of 4 the ring of three may bring 4 home each, and then 2 and 3 another 4: 28 with the fractions."""
    assert check({(1, 2): 7, (2, 3): 12, (3, 1): 12, (3, 2): 8}, 4) == 31


@pytest.mark.parametrize("least", [1, 16])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nearly_all_that_can_come_home_does_among_many_members(least, seed):
    """The bound for 16 blocks knows of no least number, so that it may be out of reach."""
    debts = random_debts(70, 3, seed)
    bound = best_circulation({pair: blocks for pair, blocks in debts.items() if blocks >= least})
    left = after(debts, flat(lending.settle(debts, least)))
    assert sum(debts.values()) - sum(left.values()) >= (1.0 if least == 1 else 0.9) * bound


def test_a_work_that_ends_early_costs_little():
    debts = random_debts(300, 4, 5)
    best = sum(each.blocks * len(each.members) for each in flat(lending.settle(debts, work=10**9)))
    early = sum(each.blocks * len(each.members) for each in flat(lending.settle(debts, work=100_000)))
    assert 0.9 * best < early < best


def test_a_diamond_is_no_cycle():
    """The printed algorithm takes any member that it meets twice for a cycle."""
    assert lending.settle({(1, 2): 9, (1, 3): 9, (2, 4): 9, (3, 4): 9}) == []


def test_a_mutual_debt_is_a_cycle():
    """The printed algorithm does not go back to the member that it came from."""
    assert lending.settle({(1, 2): 5, (2, 1): 3}) == [[lending.Settlement((1, 2), 3)]]
    assert lending.settle({(1, 2): 5, (2, 1): 3}, least=4) == []


def test_the_cycle_is_returned_with_the_smallest_id_first():
    assert lending.settle({(7, 3): 8, (3, 9): 6, (9, 7): 7, (9, 2): 50}) == [[lending.Settlement((3, 9, 7), 6)]]


def test_a_long_cycle_gives_way_to_two_short_ones():
    """A greedy choice of the cycle 1, 2, 3, 4 would bring 20 blocks home, and leave the others without their debts."""
    debts = {(1, 2): 5, (2, 3): 5, (3, 4): 5, (4, 1): 5, (2, 1): 5, (4, 3): 5, (3, 2): 5, (1, 4): 5}
    assert check(debts, 1) == 40


@given(DEBTS, st.integers(1, 12), st.randoms())
def test_any_of_the_settlements_may_be_left_out(debts, least, dice):
    some = [each for each in flat(lending.settle(debts, least)) if dice.random() < 0.5]
    assert net_of(after(debts, some)) == net_of(debts)
    assert lending.settled(debts, some) == {
        pair: blocks for pair, blocks in after(debts, some).items() if blocks or not debts[pair]
    }


@given(DEBTS, st.integers(1, 12), st.randoms())
def test_every_member_finds_the_same_in_whatever_order_rows_came(debts, least, dice):
    pairs = list(debts)
    dice.shuffle(pairs)
    assert lending.settle({pair: debts[pair] for pair in pairs}, least) == lending.settle(debts, least)


@given(DEBTS, st.integers(1, 12))
def test_nobody_is_in_two_settlements_of_a_round_and_large_ones_come_first(debts, least):
    rounds = lending.settle(debts, least)
    for settlements in rounds:
        members = [member for settlement in settlements for member in settlement.members]
        assert len(members) == len(set(members))
    sizes = [max(each.blocks * len(each.members) for each in settlements) for settlements in rounds]
    assert sizes == sorted(sizes, reverse=True)


@given(
    st.permutations([1, 2, 3, 4, 5]).map(lambda ids: [1, *[each for each in ids if each != 1]]),
    st.integers(2, 5), st.integers(1, 30), st.integers(1, 9), st.lists(st.integers(0, 4), min_size=5, max_size=5),
)  # fmt: skip
def test_the_steps_of_a_cycle_never_need_more_room_than_there_is(ids, count, blocks, chunk, rooms):
    settlement = lending.Settlement(tuple(ids[:count]), blocks)
    free = dict(zip(settlement.members, rooms, strict=False))
    if not any(free.values()):
        with pytest.raises(OutOfBlocks):
            lending.steps(settlement, free, chunk)
        return
    brought = dict.fromkeys(settlement.debts, 0)
    left = dict(free)
    for step in lending.steps(settlement, free, chunk):
        assert 1 <= step.blocks <= chunk
        left[step.debtor] -= step.blocks
        assert left[step.debtor] >= 0
        left[step.creditor] += step.blocks
        brought[step.debtor, step.creditor] += step.blocks
    assert left == free
    assert set(brought.values()) == {blocks}


@pytest.mark.parametrize(
    ("debts", "least", "text"),
    [
        ({(1, 1): 4}, 1, "owes blocks to itself"),
        ({(1, 2): -1}, 1, "the debt of 1 to 2"),
        ({(1, 2): 1}, 0, "least number"),
        ({(1, 2): 1.5}, 1, "whole number"),
        ({(0, 2): 1}, 1, "a debtor or creditor"),
        ({(1, "2"): 1}, 1, "a debtor or creditor"),
    ],
)
def test_debts_that_cannot_be_are_refused(debts, least, text):
    with pytest.raises(ArgumentError, match=text):
        lending.settle(debts, least)


@pytest.mark.parametrize(("members", "blocks"), [((1,), 1), ((0, 2), 1), ((1, 2, 1), 1), ((2, 1), 1), ((1, 2), 0)])
def test_what_is_no_settlement_cannot_be_made(members, blocks):
    with pytest.raises(ArgumentError):
        lending.Settlement(members, blocks)


def test_a_settlement_that_takes_more_than_a_debt_has_is_refused():
    with pytest.raises(ArgumentError, match="a debt of 3"):
        lending.settled({(1, 2): 5, (2, 1): 3}, [lending.Settlement((1, 2), 4)])


def test_debts_that_would_overflow_are_refused():
    huge = 1 << 59
    with pytest.raises(ArgumentError, match="are allowed"):
        lending.settle({(1, 2): huge, (2, 1): huge, (1, 3): 1})
    assert check({(1, 2): huge, (2, 1): huge}, 1) == 2 * huge


@given(st.integers(1, 9), st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=30))
def test_components_are_the_members_that_reach_each_other(members, pairs):
    out = [[end for begin, end in sorted(pairs) if begin == at and end < members] for at in range(members)]
    reach = [{at} for at in range(members)]
    for _ in range(members):
        reach = [set.union(own, *(reach[other] for other in out[at])) for at, own in enumerate(reach)]
    together = {frozenset(b for b in range(members) if b in reach[a] and a in reach[b]) for a in range(members)}
    assert sorted(components(out)) == sorted(sorted(each) for each in together if len(each) > 1)
