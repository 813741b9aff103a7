"""The protocol of live migration, without clock and network: seeds of `migration_kit`, and single rules."""

from __future__ import annotations

import numpy as np
import pytest
from kit import repeats
from policy.migration_kit import BLOCK, ID, exchange, fetch, pair, progress
from policy.migration_town import Town

import kvpool
from kvpool.policy import migration as policy

SEEDS = range(repeats(40, long=3000))


def moves_of(town):
    return sum(len({number for (name, _), number in town.decoded_by.items() if name == request}) - 1
               for request in town.prompts)  # fmt: skip


@pytest.mark.parametrize("false_proofs", [False, True])
@pytest.mark.parametrize("faults", [0, 1, 3])
def test_a_request_ends_in_exactly_one_place_with_its_tokens(faults, false_proofs):
    moves = 0
    for seed in SEEDS:
        town = Town(seed, faults, false_proofs, length=60, evicting=seed % 2 == 1)
        town.run(120)
        town.check_ends()
        assert faults or not town.lost
        moves += moves_of(town)
    assert moves > len(SEEDS) / 4  # something was tested


# ---- single rules


def test_full_blocks_go_ahead_and_the_last_one_goes_when_the_request_has_stopped():
    source, destination = pair(tokens=10)
    assert destination.work() == (0, 8, False)  # of 9 whole tokens
    fetch(destination)
    exchange(source, destination, 1)
    assert source.round_over()
    assert not source.advance(progress(15))
    exchange(source, destination, 2)
    assert destination.work() == (8, 12, False)
    fetch(destination)
    exchange(source, destination, 3)
    assert source.advance(progress(15))  # nothing full is left
    source.hand_over(progress(16), b"state")
    exchange(source, destination, 4)
    assert not destination.ready
    assert destination.work() == (12, 15, True)
    fetch(destination)
    assert destination.ready
    assert destination.engine_state == b"state"
    assert destination.term == policy.Term(1, 1)
    destination.decode()
    exchange(source, destination, 5)
    assert source.state == destination.state == "released"
    assert destination.sent == 4


def test_rounds_that_do_not_shrink_end():
    source, destination = pair(tokens=10, way="tokens", left_tokens=1)
    for number, tokens in enumerate((20, 30, 40), 1):
        fetch(destination)
        exchange(source, destination, number)
        if source.advance(progress(tokens)):
            break
        destination.hear(source.says())
    assert (tokens, source.rounds) == (30, 1)


def test_a_request_that_was_handed_over_is_kept_by_no_cancel():
    source, destination = pair()
    fetch(destination)
    exchange(source, destination, 1)
    source.hand_over(progress(10), b"")
    assert not source.cancel("late")
    assert source.state == "handed"
    source.withdraw()
    destination.hear(source.says())
    assert destination.state == "failed"  # it did not decode yet, and never will
    source.hear(destination.says(2))
    assert source.state == "back"
    assert source.term == policy.Term(2, 1)
    assert not source.by_proof
    destination.hear(source.says())
    assert destination.state == "failed"


def test_a_request_that_decodes_is_not_given_back():
    source, destination = pair()
    fetch(destination)
    exchange(source, destination, 1)
    source.hand_over(progress(10), b"")
    destination.hear(source.says())
    fetch(destination)
    destination.decode()
    source.withdraw()
    destination.hear(source.says())
    destination.fail("too late")
    source.hear(destination.says(2))
    assert source.state == "released"
    assert destination.state == "decoding"


@pytest.mark.parametrize("proof", ["ended", "fenced", None])
def test_a_hand_over_that_was_heard_is_enough(proof):
    """The source dies, or its blocks cannot be fetched, before the last of them are here."""
    source, destination = pair()
    fetch(destination)
    exchange(source, destination, 1)
    source.hand_over(progress(10), b"")
    assert not destination.compute_rest()
    destination.hear(source.says())
    assert destination.work() == (8, 9, True)
    if proof is None:
        assert destination.compute_rest()
    else:
        destination.gone("it is gone", ended=proof == "ended")
    assert destination.alone == (proof is not None)
    assert destination.way == "tokens"
    assert destination.work() == (8, 9, True)
    destination.brought(9, 0)
    assert destination.ready
    destination.decode()
    assert not destination.compute_rest()


def test_what_a_source_has_asked_back_before_it_died_is_not_given_back_to_it():
    source, destination = pair()
    fetch(destination)
    exchange(source, destination, 1)
    source.hand_over(progress(10), b"")
    destination.hear(source.says())
    source.withdraw()
    destination.hear(source.says(), gone=True)
    destination.gone("it is gone", ended=True)
    fetch(destination)
    destination.decode()
    assert destination.state == "decoding"


def test_what_a_fenced_source_asks_back_when_it_wakes_is_given_back_if_it_is_not_decoded_yet():
    source, destination = pair()
    fetch(destination)
    exchange(source, destination, 1)
    source.hand_over(progress(10), b"")
    destination.hear(source.says())
    source.withdraw()
    destination.hear(source.says(), gone=True)
    destination.gone("it is fenced", ended=False)
    assert destination.state == "moving"
    exchange(source, destination, 2)
    assert destination.state == "failed"
    source.hear(destination.says(3))
    assert source.state == "back"


def test_a_source_that_is_gone_before_the_hand_over_ends_its_request():
    _, destination = pair()
    destination.gone("its process has ended", ended=True)
    assert destination.state == "failed"


def test_a_lost_acknowledgement_is_answered_again():
    departures, arrivals = policy.Departures(1), policy.Arrivals(2)
    source, destination = pair()
    departures.begin(source)
    fetch(destination)
    exchange(source, destination, 1)
    source.hand_over(progress(10), b"")
    destination.hear(source.says())
    fetch(destination)
    destination.decode()
    source.hear(destination.says(2))
    departures.end(source)  # and `released` is lost
    for _ in range(2):
        destination.hear(departures.answer(destination.says(arrivals.next_number())))
        assert destination.state == "released"


def test_what_was_taken_back_by_proof_is_revoked_when_it_wakes():
    departures = policy.Departures(1)
    source, destination = pair()
    departures.begin(source)
    fetch(destination)
    exchange(source, destination, 1)
    source.hand_over(progress(10), b"")
    destination.hear(source.says())
    fetch(destination)
    destination.decode()
    source.gone("its lease has ended", ended=False)
    assert source.state == "back"
    assert source.term > destination.term
    departures.end(source)
    for number in (9, 10):  # an answer may be lost
        answer = departures.answer(destination.says(number))
        assert answer.phase == "revoked"
    destination.hear(answer)
    assert destination.state == "revoked"
    assert departures.answer(destination.says(11)) is None  # it says that it has failed, and asks no more
    assert not len(departures._taken_back)


def taken_back(departures, number, *, ended=False):
    """A migration that was handed over, and whose destination is gone; what that would say when it wakes."""
    id = policy.MigrationId(1, 2, number)
    source = policy.Source(id, "r", "", "kv", policy.FIRST, 18, progress(10), BLOCK, policy.StopRules())
    departures.begin(source)
    source.hear(policy.DestinationSays(id, 1, "moving", tokens=10, blocks=2, whole=8))
    source.hand_over(progress(10), b"")
    source.gone("it is gone", ended=ended)
    assert source.state == "back"
    departures.end(source)
    return policy.DestinationSays(id, 9, "decoding")


def test_what_was_taken_back_from_a_process_that_has_ended_is_not_remembered():
    departures = policy.Departures(1)
    for number in range(1, 5):
        taken_back(departures, number, ended=True)
    assert not len(departures._taken_back)


def test_what_was_taken_back_is_remembered_up_to_a_bound_and_never_let_go_beyond_it(monkeypatch):
    """One that is forgotten may be decoded here: its destination must not hear that it is its own."""
    monkeypatch.setattr("kvpool.policy.migration.registry._TAKEN_BACK_MAX", 3)
    departures = policy.Departures(1)
    says = [taken_back(departures, number) for number in range(1, 8)]
    assert len(departures._taken_back) == 3
    answers = [departures.answer(each) for each in says]
    assert answers[:4] == [None] * 4
    assert [each.phase for each in answers[4:]] == ["revoked"] * 3
    let_go = policy.DestinationSays(policy.MigrationId(1, 2, 9), 9, "decoding")
    assert departures.answer(let_go).phase == "released"


def test_a_number_that_is_used_up_is_not_accepted_again():
    arrivals = policy.Arrivals(2)
    source, _ = pair()
    offer = source.says()
    assert arrivals.is_new(offer)
    assert arrivals.refuse(offer, "full", full=True).full
    assert not arrivals.is_new(offer)
    assert arrivals.answer(offer).phase == "failed"
    assert arrivals.answer(policy.SourceSays(ID, 5, "cancelled")) is None
    assert policy.Arrivals(3).answer(offer) is None  # it was meant for another incarnation


def test_offers_may_overtake_each_other_and_no_number_comes_back():
    arrivals = policy.Arrivals(2)

    def offer(number):
        return policy.SourceSays(policy.MigrationId(1, 2, number), 1, "offered", f"r{number}")

    arrivals.begin(offer(6), lambda offer: policy.Destination(offer, "kv", 0, BLOCK))
    assert arrivals.is_new(offer(5))
    arrivals.refuse(offer(5), "full")
    arrivals.refuse(offer(4), "full")
    assert not any(arrivals.is_new(offer(number)) for number in (4, 5, 6))
    assert arrivals.is_new(offer(7))
    assert arrivals.is_new(offer(3))
    arrivals.refuse(offer(5000), "full")
    assert not any(arrivals.is_new(offer(number)) for number in (3, 4, 5, 6, 7, 5000))
    assert arrivals.is_new(offer(4999))


def test_numbers_of_the_sources_that_were_heard_last_are_remembered(monkeypatch):
    monkeypatch.setattr("kvpool.policy.migration.registry._SOURCES_MAX", 2)
    arrivals = policy.Arrivals(2)
    offers = [policy.SourceSays(policy.MigrationId(source, 2, 1), 1, "offered", "r") for source in range(10, 15)]
    for offer in offers:
        arrivals.refuse(offer, "full")
        assert not arrivals.is_new(offers[0])
    assert not arrivals.is_new(offers[-1])
    assert len(arrivals._used) == 2


@pytest.mark.parametrize("names", [("r" * 1025, ""), ("r", "n" * 1025)])
def test_a_name_that_is_not_read_is_not_written(names):
    request, namespace = names
    says = policy.SourceSays(ID, 1, "offered", request, namespace)
    with pytest.raises(kvpool.ArgumentError, match="1024 are allowed"):
        policy.encode(says)
    says = policy.SourceSays(ID, 1, "offered", request[:1024], namespace[:1024])
    assert policy.decode(policy.encode(says)).request == request[:1024]


def test_what_is_decoded_here_is_not_forgotten_before_its_source_has_let_it_go():
    """Also if nothing is done for it any more: its thread has failed, or migrations were closed."""
    arrivals, departures = policy.Arrivals(2), policy.Departures(1)
    source, destination = decoded(arrivals)
    departures.begin(source)
    arrivals.end(destination)
    assert arrivals.kept == (destination,)
    assert arrivals.find(ID) is destination
    assert arrivals.holds_back("r")
    assert destination.says(9).phase == "decoding"
    source.hear(destination.says(9))
    destination.hear(source.says())
    assert destination.settled
    arrivals.end(destination)
    assert arrivals.find(ID) is None


def test_a_source_that_is_given_up_in_doubt_answers_nothing():
    departures = policy.Departures(1)
    source, destination = decoded(policy.Arrivals(2))
    departures.begin(source)
    departures.end(source)
    assert departures.answer(destination.says(3)) is None


def decoded(arrivals):
    """The source has handed over, and has not heard that the destination decodes."""
    source, _ = pair()
    destination = arrivals.begin(source.says(), lambda offer: policy.Destination(offer, "kv", 0, BLOCK))
    fetch(destination)
    exchange(source, destination, 1)
    source.hand_over(progress(10), b"")
    destination.hear(source.says())
    assert not arrivals.holds_back("r")
    fetch(destination)
    assert arrivals.holds_back("r")  # while the engine adopts it, too
    destination.decode()
    return source, destination


def test_a_request_whose_source_is_fenced_does_not_migrate_on_before_the_source_has_ended():
    arrivals = policy.Arrivals(2)
    _, destination = decoded(arrivals)
    assert arrivals.holds_back("r")
    destination.gone("fenced", ended=False)
    arrivals.end(destination)
    assert arrivals.kept == (destination,)
    assert arrivals.holds_back("r")
    assert arrivals.find(ID) is destination
    assert destination.says(7).phase == "decoding"
    destination.gone("its process has ended", ended=True)
    arrivals.end(destination)
    assert not arrivals.kept
    assert not arrivals.holds_back("r")


def test_an_engine_that_contradicts_itself_is_found():
    source, destination = pair()
    fetch(destination)
    exchange(source, destination, 1)
    with pytest.raises(kvpool.ArgumentError, match="fewer tokens"):
        source.advance(progress(9))
    changed = policy.Progress(progress(12).tokens + np.int32(1), 11, progress(12).blocks)
    with pytest.raises(kvpool.ArgumentError, match="others than before"):
        source.advance(changed)
    moved = policy.Progress(progress(10).tokens, 9, progress(10).blocks + np.uint64(5))
    with pytest.raises(kvpool.ArgumentError, match="lie elsewhere"):
        source.advance(moved)
    with pytest.raises(kvpool.ArgumentError, match="whole in a stopped request"):
        source.hand_over(progress(12, 10), b"")


def test_a_reader_drops_old_terms_and_what_it_has():
    gate = policy.OutputGate()
    old, new = policy.Term(1, 5), policy.Term(2, 4)
    assert gate.accept("r", old, 0)
    assert not gate.accept("r", old, 0)
    assert gate.accept("r", new, 1)
    assert not gate.accept("r", old, 2)
    assert not gate.accept("r", new, 0)
    assert gate.delivered("r") == 2
    with pytest.raises(kvpool.ArgumentError, match="comes after 2"):
        gate.accept("r", new, 3)
    assert not gate.accept("r", old, 2)
    gate.forget("r")
    assert gate.accept("r", old, 0)


def test_a_token_that_comes_too_early_does_not_end_the_term_of_those_before_it():
    gate = policy.OutputGate()
    for position in range(3):
        gate.accept("r", policy.FIRST, position)
    with pytest.raises(kvpool.ArgumentError, match="comes after 3"):
        gate.accept("r", policy.Term(1, 5), 4)
    assert gate.accept("r", policy.FIRST, 3)
    assert gate.accept("r", policy.Term(1, 5), 4)
    assert not gate.accept("r", policy.FIRST, 5)
