"""From bodies to tokens: what begins alike has tokens that begin alike."""

from __future__ import annotations

import asyncio
import json
import signal
import threading

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from router.router_kit import PATIENCE_S

from kvpool.control.reading.process import NotRead, ReaderProcess
from kvpool.control.reading.prompts import (
    ByteTokens,
    Reading,
    Unreadable,
    chat_text,
    is_quick,
    load_tokenizer,
    read_prompt,
)
from kvpool.control.router.errors import Refusal
from kvpool.control.router.prompts import Asked, PromptReader
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


def asked_of(body: bytes, kind: str = "completions", headers: dict[str, str] | None = None, **options) -> Asked:
    options = {"tokenizer": None, "prompt_bytes_max": 1 << 20, "processes": 1, "wait_s": PATIENCE_S} | options
    reader = PromptReader(**options)
    try:
        return asyncio.run(reader.read(kind, headers or {}, body))
    finally:
        reader.close()


def read(kind: str, headers: dict[str, str] | None = None, **fields) -> Asked:
    return asked_of(json.dumps(fields).encode(), kind, headers)


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that they have in common from the start."""
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size


@given(TEXTS, TEXTS)
def test_a_continued_text_keeps_its_tokens_except_the_last(text, more):
    size = len(text.encode("utf-8", "surrogatepass"))
    one, other = ByteTokens().encode(text), ByteTokens().encode(text + more)
    assert one.dtype == np.int32
    assert len(one) == max(1, -(-size // 4))
    assert common(one, other) >= size // 4


@given(MESSAGES, MESSAGES, st.sampled_from([None, [{"type": "function", "function": {"name": "f"}}]]))
def test_a_continued_chat_begins_with_the_earlier_one(messages, more, tools):
    assert chat_text(messages + more, tools).startswith(chat_text(messages, tools))


def test_the_speaker_of_a_text_makes_a_difference():
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
def test_invalid_tokens_are_not_taken_for_tokens(prompt):
    asked = read("completions", prompt=prompt)
    assert len(asked.tokens) >= 1
    assert asked.namespace != read("completions", prompt=[1]).namespace


@pytest.fixture(scope="module")
def process():
    made = ReaderProcess(None, 1 << 20)
    yield made
    made.close()


LONG = {
    "a text": {"prompt": "x" * 200_000},
    "a text beyond what is read": {"prompt": "x" * (2 << 20)},
    "ids": {"prompt": list(range(100_000))},
    "ids beyond what is read": {"prompt": [123_456] * 300_000},
    "several prompts of ids": {"prompt": [[5] * 300_000, [6]]},
    "a chat": {"messages": [{"role": "user", "content": "x" * 100_000}] * 2, "user": "u", "stream": True, "model": "m"},
    "an image": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:," + "x" * 100_000}}]}
        ]
    },
    "a prompt of many values": {"prompt": [{}] * 200_000},
    "a chat of many values": {"messages": [[]] * 200_000},
    "many values that are of no interest": {"prompt": "x", "z": [{}] * 200_000},
    "a salt that is long": {"prompt": "x", "cache_salt": "y" * 100_000},
}


@pytest.mark.parametrize("name", LONG)
def test_a_process_reads_long_bodies_as_they_are_read_here(process, name):
    kind, body = "chat" if "messages" in LONG[name] else "completions", json.dumps(LONG[name]).encode()
    assert not is_quick(body)
    here, there = read_prompt(ByteTokens(), kind, "s", body), process.read(kind, "s", body, PATIENCE_S)
    assert here.tokens.tolist() == there.tokens.tolist()
    assert (here.session, here.namespace, here.stream) == (there.session, there.namespace, there.stream)
    assert 1 <= len(here.tokens) <= 1 << 18


def test_a_prompt_beyond_what_is_read_begins_as_it_does():
    for prompt, more in (("x" * 1000, "y" * 1000), (list(range(100, 400)), list(range(300)))):
        short, long = (
            read_prompt(ByteTokens(), "completions", None, json.dumps({"prompt": each}).encode(), 1000)
            for each in (prompt, prompt + more)
        )
        assert 0 < len(long.tokens) <= 250
        assert common(short.tokens, long.tokens) == min(len(short.tokens), len(long.tokens))
        assert short.namespace == long.namespace


@pytest.mark.parametrize("body", [b"[1]", b"7", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
def test_a_process_reports_what_is_wrong_and_reads_on(process, body):
    with pytest.raises(Unreadable):
        process.read("completions", None, body.ljust(100_000), PATIENCE_S)
    with pytest.raises(NotRead):  # some read this; the router need not
        process.read("completions", None, b'{"prompt": NaN}'.ljust(100_000), PATIENCE_S)
    assert process.read("completions", None, b'{"prompt": "x"}', PATIENCE_S).session is None


def test_a_process_that_died_or_is_late_is_replaced(process):
    body = b'{"prompt": "x"}'
    process.read("completions", None, body, PATIENCE_S)
    process._process.kill()
    process._process.wait(PATIENCE_S)
    with pytest.raises(NotRead):
        process.read("completions", None, body, PATIENCE_S)
    assert process.read("completions", None, body, PATIENCE_S).stream is False
    process._process.send_signal(signal.SIGSTOP)
    with pytest.raises(NotRead):
        process.read("completions", None, body, 0.1)
    assert process.read("completions", None, body, PATIENCE_S).stream is False


def test_a_process_ends_with_the_router():
    made = ReaderProcess(None, 1 << 20)
    made.start()
    process = made._process
    made._sock.close()  # as when the router is killed
    assert process.wait(PATIENCE_S) is not None
    made.close()


def test_short_bodies_are_read_here_and_long_ones_and_those_of_many_values_in_a_process(monkeypatch):
    there = []

    def noted(self: ReaderProcess, kind: str, session: str | None, body: bytes, timeout_s: float) -> Reading:
        there.append(threading.current_thread())
        return read_prompt(ByteTokens(), kind, session, body)

    monkeypatch.setattr(ReaderProcess, "read", noted)
    for prompt, aside in (("x" * 1000, False), ([{}] * 10_000, True), ("x" * (1 << 20), True)):
        there.clear()
        read("completions", prompt=prompt)
        assert (there != []) == aside
        assert threading.current_thread() not in there


def test_a_body_that_is_not_read_in_time_is_routed_by_load(monkeypatch):
    """One process is busy, and another body comes."""
    held = threading.Event()

    def holds(self: ReaderProcess, kind: str, session: str | None, body: bytes, timeout_s: float) -> Reading:
        assert held.wait(PATIENCE_S)
        raise NotRead("planted")

    monkeypatch.setattr(ReaderProcess, "read", holds)
    body = json.dumps({"prompt": "x" * 100_000, "user": "u"}).encode()

    async def two() -> list[Asked]:
        reader = PromptReader(None, 1 << 20, 1, 0.05)
        first = asyncio.create_task(reader.read("completions", {}, body))
        await asyncio.sleep(0)
        second = await reader.read("completions", {"x-session-id": "h"}, body)
        held.set()
        return [second, await first]

    second, first = asyncio.run(two())
    assert (second.unread, second.session, second.tokens.tolist()) == ("busy", "h", [0])
    assert (first.unread, first.session) == ("failed", None)


def test_sessions_come_from_the_header_or_the_user():
    assert read("completions", {"x-session-id": "h"}, prompt="x", user="u").session == "h"
    assert read("completions", prompt="x", user="u").session == "u"
    assert read("chat", messages=[]).session is None
    assert read("completions", prompt="x", user=7).session is None


def test_names_that_clients_choose_are_kept_short():
    sessions = {read("completions", prompt="x", user=user).session for user in ("u" * 1000, "u" * 1001, "ü", "\ud800")}
    assert len(sessions) == 4
    assert all(len(session) == 64 and session.isascii() for session in sessions)


def test_model_and_salt_make_the_namespace():
    spaces = [read("completions", prompt="x", **fields).namespace for fields in (
        {}, {"model": "m"}, {"model": "n"}, {"model": "m", "cache_salt": "s"}, {"model": "m", "cache_salt": None},
        {"model": "m" * 1000}, {"model": "m" * 1001}, {"model": {"odd": 1}},
    )]  # fmt: skip
    assert len(set(spaces)) == 7  # a salt of null is no salt
    assert max(map(len, spaces)) <= 64


def test_streaming_is_asked_for_by_true_alone():
    assert read("chat", messages=[], stream=True).stream
    assert not read("chat", messages=[], stream=1).stream


@given(
    JSON, st.sampled_from(["completions", "chat"]), st.sampled_from(["prompt", "messages", "tools", "user", "model"])
)
def test_any_json_object_is_read(value, kind, field):
    assert len(read(kind, **{field: value}).tokens) >= 1


def test_too_deeply_nested_bodies_are_refused():
    for body in (b"[" * 100_000, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"):
        with pytest.raises(Refusal) as refused:
            asked_of(body)
        assert refused.value.status == 400


def test_a_tokenizer_file_makes_the_tokens(tmp_path):
    words = {word: number for number, word in enumerate(["<unk>", "one", "two", "three"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    file = tmp_path / "tokenizer.json"
    made.save(str(file))
    body = json.dumps({"prompt": "three two one four"}).encode()
    assert asked_of(body, tokenizer=file).tokens.tolist() == [3, 2, 1, 0]
    assert asked_of(body.ljust(100_000), tokenizer=file).tokens.tolist() == [3, 2, 1, 0]  # in a process
    assert len(asked_of(b'{"prompt": ""}', tokenizer=file).tokens) == 1
    assert len(asked_of(b'{"prompt": "\\ud800"}', tokenizer=file).tokens) == 1


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="No such file"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "wrong.json").write_text("{}")
    with pytest.raises(ArgumentError, match=r"wrong\.json"):
        load_tokenizer(tmp_path / "wrong.json")


@pytest.mark.parametrize("kind", ["completions", "chat"])
@pytest.mark.parametrize("field", ["prompt", "messages", "model", "user", "cache_salt", "tools"])
def test_a_number_of_thousands_of_digits_is_left_to_the_instance(kind, field):
    """Python converts 4,300."""
    body = json.dumps({field: [0]}).replace("0", "1" * 5000).encode()
    assert len(asked_of(body, kind).tokens)
