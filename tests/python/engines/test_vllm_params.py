"""What clients and proxies write into ``kv_transfer_params``."""

from __future__ import annotations

import pytest

from kvpool.engines.vllm.params import Announced, Params, letter, parts, read, read_letter

RIGHT = {"from": "prefill-0", "id": "ab12", "tokens": 64}


def test_what_an_answer_tells_is_read():
    announced = Announced("prefill-0", "ab12", 64)
    assert announced.told() == {"kvpool": RIGHT}
    assert read(announced.told()) == Params(announced=announced)
    assert read({"kvpool": {"to": "decode-0"}, "other": 1}) == Params(to="decode-0")
    assert read({"kvpool": {**RIGHT, "to": "decode-0"}}) == Params("decode-0", announced)
    assert read({"kvpool": {"pull": "one"}}) == Params(pull="one")
    for nothing in (None, {}, {"do_remote_decode": True}):
        assert read(nothing) == Params()


@pytest.mark.parametrize(
    "fields",
    [
        None, 3, "decode-0", ["to"], {"to": 3}, {"to": None}, {"to": "x" * 256}, {"to": "a\nb"}, {"to": ["decode-0"]},
        {**RIGHT, "id": None}, {**RIGHT, "id": ""}, {**RIGHT, "id": "x" * 65}, {**RIGHT, "id": 7},
        {**RIGHT, "tokens": 0}, {**RIGHT, "tokens": -1}, {**RIGHT, "tokens": True}, {**RIGHT, "tokens": 1 << 31},
        {"pull": 3}, {"pull": "x" * 256}, {"pull": ["one"], "to": "decode-0"},
        {**RIGHT, "tokens": "64"}, {**RIGHT, "tokens": 64.0}, {**RIGHT, "from": 3}, {"from": "prefill-0"},
    ],
)  # fmt: skip
def test_what_is_wrong_is_ignored_with_a_warning(fields, caplog):
    assert read({"kvpool": fields}) == Params()
    assert "ignored" in caplog.text


def test_a_letter_carries_the_id():
    assert read_letter(letter("ab12")) == ("ab12", True)
    assert read_letter(letter("ab12", complete=False)) == ("ab12", False)
    for other in (b"", b"ab12", b"kvpool-prompt \xff", letter("x" * 70)):
        assert read_letter(other) == ("", False)


def test_the_parts_of_a_prompt_with_the_longest_id_are_read():
    longest = "x" * 64
    assert read({"kvpool": {**RIGHT, "id": longest}}).announced
    for part in parts(longest, 100):
        assert read_letter(letter(part)) == (part, True)
