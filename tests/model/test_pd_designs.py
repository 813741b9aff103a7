"""The designs of the PD example: all give the same tokens, and each moves and keeps what it promises."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from pd_disaggregated.records import COLOCATED, DISAGGREGATED, Answer, RunResult, Session, Setting, Turn  # noqa: E402
from pd_disaggregated.reference import Reference, WrongTokens  # noqa: E402
from pd_kit import CONFIG, SETTINGS, TOKEN_BYTES, by_turn, chats, play, tokens, whole  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # each run imports PyTorch in every instance
SESSIONS = chats()


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    one = Reference(CONFIG)
    yield one
    one.close()


@pytest.fixture(scope="module")
def runs(reference: Reference) -> dict[str, RunResult]:
    """One run of each design, with the same tokens as a single process."""
    return {name: play(setting, SESSIONS, reference) for name, setting in SETTINGS.items()}


def test_all_designs_answer_with_the_tokens_of_one_process(runs: dict[str, RunResult], reference: Reference) -> None:
    first = SESSIONS[0]
    alone = reference.tokens(
        torch.cat([torch.from_numpy(first.prefix), torch.from_numpy(first.turns[0].added)]).numpy(), 8
    )
    for result in runs.values():
        assert by_turn(result)[0].tokens == alone
        assert all(answer.attempts == 1 for answer in result.answers)


def test_times_are_in_order(runs: dict[str, RunResult]) -> None:
    for result in runs.values():
        for answer in result.answers:
            assert answer.second_s is not None
            assert 0 <= answer.asked_s < answer.first_s < answer.second_s <= answer.done_s <= result.wall_s
            assert answer.kvpool_s > 0
        for session in range(len(SESSIONS)):
            turns = by_turn(result, session)
            assert all(before.done_s <= after.asked_s for before, after in itertools.pairwise(turns))


def test_colocated_sends_nothing(runs: dict[str, RunResult]) -> None:
    for name in COLOCATED:
        for answer in runs[name].answers:
            assert (answer.bytes_to_decode, answer.bytes_to_prefill, answer.cached_at_decode) == (0, 0, 0)
            assert answer.prefill == answer.decode


def test_without_a_cache_nothing_is_found_and_nothing_is_kept(runs: dict[str, RunResult]) -> None:
    for name in ("PD", "PD-Basic"):
        assert {answer.cached_at_prefill for answer in runs[name].answers} == {0}
        assert {stats.hbm.historical for stats in runs[name].audits.values()} == {0}


def cached(runs: dict[str, RunResult], name: str) -> list[int]:
    return [answer.cached_at_prefill for answer in by_turn(runs[name])]


def test_prefill_finds_earlier_answers_only_where_it_gets_them(runs: dict[str, RunResult]) -> None:
    turns = by_turn(runs["PD-Basic"])
    prompts = [whole(turn.prompt_tokens) for turn in turns]
    answered = [whole(turn.prompt_tokens + len(turn.tokens) - 1) for turn in turns]  # the last token has no KV
    assert cached(runs, "PD-Caching-1") == cached(runs, "PD-Caching-2") == [0, *prompts[:-1]]
    assert cached(runs, "PD-Caching-3") == cached(runs, "PD-CC") == [0, *answered[:-1]]


def test_all_blocks_or_those_that_decode_lacks_are_sent(runs: dict[str, RunResult]) -> None:
    for name in ("PD-Basic", "PD-Caching-1"):
        for answer in runs[name].answers:  # the last block, too, which is not full
            assert answer.bytes_to_decode == -(-answer.prompt_tokens // 4) * 4 * TOKEN_BYTES
            assert answer.cached_at_decode == 0
    for name in ("PD-Caching-2", "PD-Caching-3"):
        turns = by_turn(runs[name])
        answered = [whole(turn.prompt_tokens + len(turn.tokens) - 1) for turn in turns]
        assert [turn.cached_at_decode for turn in turns] == [0, *answered[:-1]]
        for turn in turns:
            assert turn.bytes_to_decode == (whole(turn.prompt_tokens) - turn.cached_at_decode) * TOKEN_BYTES


def test_only_the_last_design_sends_back_and_only_answers(runs: dict[str, RunResult]) -> None:
    """Where decode is done before prefill has kept the prompt, as on a busy machine, that is new there, too."""
    for name in DISAGGREGATED[:-1]:
        assert {answer.bytes_to_prefill for answer in runs[name].answers} == {0}
    for turn in by_turn(runs["PD-Caching-3"]):
        end, prompt = whole(turn.prompt_tokens + len(turn.tokens) - 1), whole(turn.prompt_tokens)
        assert turn.bytes_to_prefill in ((end - prompt) * TOKEN_BYTES, (end - turn.cached_at_prefill) * TOKEN_BYTES)


@pytest.mark.parametrize("design", DISAGGREGATED)
def test_layer_by_layer_the_same_blocks_arrive(design: str, runs: dict[str, RunResult], reference: Reference) -> None:
    result = play(Setting(design, 1, 1, "by_layer"), SESSIONS[:2], reference)
    for session in range(2):
        for mine, other in zip(by_turn(result, session), by_turn(runs[design], session), strict=True):
            assert mine.tokens == other.tokens
            assert (mine.cached_at_prefill, mine.cached_at_decode) == (other.cached_at_prefill, other.cached_at_decode)
            # The block in which a prompt ends travels by itself, whether it is full or not.
            assert 0 <= mine.bytes_to_decode - other.bytes_to_decode <= 4 * TOKEN_BYTES


@pytest.mark.parametrize("strategy", ["by_request_agg", "by_layer"])
@pytest.mark.parametrize("design", ["PD-Basic", "PD-Caching-3"])
def test_short_prompts_and_answers(design: str, strategy: str, reference: Reference) -> None:
    """Less than a block; exactly one; an answer of one token, which needs no decoding."""
    lengths = [(1, 2), (3, 1), (4, 3), (8, 1), (5, 6)]
    sessions = [
        Session(number, 0.0, tokens(0, 0), (Turn(tokens(length, number), new), Turn(tokens(2, number), 2)), True)
        for number, (length, new) in enumerate(lengths)
    ]
    result = play(Setting(design, 1, 1, strategy), sessions, reference)
    assert [by_turn(result, number)[0].second_s is None for number in range(5)] == [False, True, False, True, False]


def test_questions_on_a_document_share_it(reference: Reference) -> None:
    session = Session(0, 0.0, tokens(40, 1), tuple(Turn(tokens(6, 10 + turn), 5) for turn in range(3)), remembers=False)
    for design in ("PD-Caching-1", "PD-Caching-2"):
        turns = by_turn(play(SETTINGS[design], [session], reference))
        assert [turn.prompt_tokens for turn in turns] == [46, 46, 46]
        assert [turn.cached_at_prefill for turn in turns] == [0, 40, 40]
        assert [turn.cached_at_decode for turn in turns] == ([0, 0, 0] if design == "PD-Caching-1" else [0, 40, 40])


def test_a_wrong_token_is_found(reference: Reference) -> None:
    session = Session(0, 0.0, tokens(9, 1), (Turn(tokens(3, 2), 4),), remembers=True)
    right = reference.tokens(
        torch.cat([torch.from_numpy(session.prefix), torch.from_numpy(session.turns[0].added)]).numpy(), 4
    )

    def answer(given: tuple[int, ...]) -> Answer:
        return Answer(0, 0, 12, 0, 0, given, 0.0, 1.0, 2.0, 3.0, "p", "d", 0, 0, 0.0)

    reference.check([session], [answer(right)])
    with pytest.raises(WrongTokens, match="session 0, turn 0"):
        reference.check([session], [answer((*right[:-1], right[-1] ^ 1))])
    with pytest.raises(WrongTokens, match="None"):
        reference.check([session], [])
