"""From bodies to tokens: what begins alike has tokens that begin alike."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kvpool.control.router.errors import Refusal
from kvpool.control.router.prompts import Asked, ByteTokens, PromptReader, chat_text, load_tokenizer
from kvpool.errors import ArgumentError

TEXTS = st.text(st.characters(codec=None), max_size=200)  # lone surrogates too: JSON can hold them
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}))
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXTS | PARTS}),
        st.just({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}),
    ),
    max_size=5,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=10,
)


def read(kind: str, headers: dict[str, str] | None = None, **fields) -> Asked:
    return asyncio.run(PromptReader(ByteTokens()).read(kind, headers or {}, json.dumps(fields).encode()))


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that they have in common from the start."""
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size


@given(TEXTS, TEXTS)
def test_a_text_that_goes_on_keeps_its_tokens_but_for_the_last(text, more):
    size = len(text.encode("utf-8", "surrogatepass"))
    one, other = ByteTokens().encode(text), ByteTokens().encode(text + more)
    assert one.dtype == np.int32
    assert len(one) == max(1, -(-size // 4))
    assert common(one, other) >= size // 4


@given(MESSAGES, MESSAGES, st.sampled_from([None, [{"type": "function", "function": {"name": "f"}}]]))
def test_a_chat_that_goes_on_begins_with_what_it_was(messages, more, tools):
    assert chat_text(messages + more, tools).startswith(chat_text(messages, tools))


def test_who_says_what_makes_a_difference():
    hello = {"role": "user", "content": "hello"}
    assert chat_text([hello]) != chat_text([hello | {"role": "system"}])
    assert chat_text([hello], [{"name": "f"}]) != chat_text([hello])
    image = {"type": "image_url", "image_url": {"url": "data:,a"}}
    other = {"type": "image_url", "image_url": {"url": "data:,b"}}
    assert chat_text([{"role": "user", "content": [image]}]) != chat_text([{"role": "user", "content": [other]}])


def test_tokens_are_taken_as_they_are_and_share_nothing_with_texts():
    asked = read("completions", prompt=[5, 6, 7])
    assert asked.tokens.tolist() == [5, 6, 7]
    assert asked.namespace != read("completions", prompt="x").namespace


def test_the_first_of_several_prompts_decides():
    assert (
        read("completions", prompt=["one", "two"]).tokens.tolist() == read("completions", prompt="one").tokens.tolist()
    )
    assert read("completions", prompt=[[1, 2], [3]]).tokens.tolist() == [1, 2]


@pytest.mark.parametrize("prompt", [[-1], [2**31], [True], [1.5], [None], {}, 7, None, []])
def test_what_are_no_tokens_is_not_taken_for_tokens(prompt):
    asked = read("completions", prompt=prompt)
    assert len(asked.tokens) >= 1
    assert asked.namespace != read("completions", prompt=[1]).namespace


@pytest.mark.parametrize(("size", "aside"), [(1000, False), (2 << 20, True)])
def test_long_prompts_are_read_where_others_do_not_wait(size, aside):
    where = []

    class Noted(ByteTokens):
        def encode(self, text: str) -> np.ndarray:
            where.append(threading.current_thread())
            return super().encode(text)

    body = json.dumps({"prompt": "x" * size}).encode()
    asked = asyncio.run(PromptReader(Noted()).read("completions", {}, body))
    assert len(asked.tokens) == size // 4
    assert (where != [threading.current_thread()]) == aside


def test_sessions_come_from_the_header_or_the_user():
    assert read("completions", {"x-session-id": "h"}, prompt="x", user="u").session == "h"
    assert read("completions", prompt="x", user="u").session == "u"
    assert read("chat", messages=[]).session is None
    assert read("completions", prompt="x", user=7).session is None


def test_what_clients_make_up_is_kept_short():
    sessions = {read("completions", prompt="x", user=user).session for user in ("u" * 1000, "u" * 1001, "ü", "\ud800")}
    assert len(sessions) == 4
    assert all(len(session) == 64 and session.isascii() for session in sessions)


def test_model_and_salt_make_the_namespace():
    spaces = [read("completions", prompt="x", **fields).namespace for fields in (
        {}, {"model": "m"}, {"model": "n"}, {"model": "m", "cache_salt": "s"}, {"model": "m", "cache_salt": None},
        {"model": "m" * 1000}, {"model": "m" * 1001}, {"model": {"odd": 1}},
    )]  # fmt: skip
    assert len(set(spaces)) == 7  # a salt of null is none
    assert max(map(len, spaces)) <= 64


def test_streaming_is_asked_for_by_true_alone():
    assert read("chat", messages=[], stream=True).stream
    assert not read("chat", messages=[], stream=1).stream


@given(
    JSON, st.sampled_from(["completions", "chat"]), st.sampled_from(["prompt", "messages", "tools", "user", "model"])
)
def test_any_json_object_is_read(value, kind, field):
    assert len(read(kind, **{field: value}).tokens) >= 1


def test_what_is_nested_too_deeply_is_refused():
    for body in (b"[" * 100_000, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"):
        with pytest.raises(Refusal) as refused:
            asyncio.run(PromptReader(ByteTokens()).read("completions", {}, body))
        assert refused.value.status == 400


def test_a_tokenizer_file_makes_the_tokens(tmp_path):
    words = {word: number for number, word in enumerate(["<unk>", "one", "two", "three"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    file = tmp_path / "tokenizer.json"
    made.save(str(file))
    reader = PromptReader(load_tokenizer(file))
    body = json.dumps({"prompt": "three two one four"}).encode()
    assert asyncio.run(reader.read("completions", {}, body)).tokens.tolist() == [3, 2, 1, 0]
    assert len(asyncio.run(reader.read("completions", {}, b'{"prompt": ""}')).tokens) == 1
    assert len(asyncio.run(reader.read("completions", {}, b'{"prompt": "\\ud800"}')).tokens) == 1


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="No such file"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "wrong.json").write_text("{}")
    with pytest.raises(ArgumentError, match=r"wrong\.json"):
        load_tokenizer(tmp_path / "wrong.json")
