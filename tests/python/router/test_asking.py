"""What an instance is asked for the tokens of a prompt, and what counts as an answer."""

from __future__ import annotations

import json

import pytest

from kvpool.control.reading.asking import answered, question

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def asked(kind: str, fields: object) -> dict | None:
    found = question(kind, json.dumps(fields).encode())  # type: ignore[arg-type]
    return None if found is None else json.loads(found)


def test_what_makes_the_text_of_a_chat_is_passed_on_and_nothing_else() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    passed = CHAT | {
        "model": "m", "tools": tools, "tool_choice": "auto", "add_generation_prompt": False,
        "continue_final_message": True, "add_special_tokens": True, "chat_template": "{{ x }}",
        "chat_template_kwargs": {"x": 1},
    }  # fmt: skip
    assert asked("chat", passed | {"stream": True, "max_tokens": 3, "cache_salt": "s", "user": "u"}) == passed
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "n"}, {"role": "tool"}]}
    assert asked("chat", parts) == parts


def test_what_vllm_hands_to_the_template_is_named_as_its_argument() -> None:
    documents = [{"title": "t", "text": "x"}]
    found = asked("chat", CHAT | {"documents": documents, "reasoning_effort": "high", "chat_template_kwargs": {"x": 1}})
    arguments = {"x": 1, "documents": documents, "reasoning_effort": "high", "enable_thinking": True}
    assert found == CHAT | {"reasoning_effort": "high", "chat_template_kwargs": arguments}
    found = asked("chat", CHAT | {"reasoning_effort": "none", "chat_template_kwargs": None})
    assert found is not None
    assert found["chat_template_kwargs"] == {"reasoning_effort": "none", "enable_thinking": False}
    nothing = {"documents": None, "reasoning_effort": None, "chat_template_kwargs": {"x": 1}}
    assert asked("chat", CHAT | nothing) == CHAT | {"reasoning_effort": None, "chat_template_kwargs": {"x": 1}}


def test_of_a_completion_the_first_text_is_asked_about() -> None:
    assert asked("completions", {"prompt": "a", "model": "m", "max_tokens": 1}) == {"prompt": "a", "model": "m"}
    assert asked("completions", {"prompt": ["a", "b"], "add_special_tokens": False}) == {
        "prompt": "a",
        "add_special_tokens": False,
    }


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}),
        ("chat", {"messages": []}),
        ("chat", {"messages": "hi"}),
        ("chat", {"messages": [{"role": "user", "content": 7}]}),
        ("chat", {"prompt": "hi"}),
        ("chat", CHAT | {"reasoning_effort": "low", "chat_template_kwargs": 7}),
        ("completions", {"prompt": [1, 2]}),
        ("completions", {"prompt": [[1, 2]]}),
        ("completions", {"prompt": []}),
        ("completions", {"prompt": ""}),
        ("completions", {"messages": []}),
        ("completions", []),
    ],
)
def test_prompts_without_such_tokens_are_not_asked_about(kind: str, fields: object) -> None:
    assert asked(kind, fields) is None


def test_odd_json_is_not_asked_about() -> None:
    assert question("chat", b"{") is None
    assert question("completions", b'{"prompt": "\xff"}') is None
    assert question("chat", b'{"messages": ' + b"[" * 100_000) is None


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"{}", b'{"tokens": []}', b'{"tokens": [-1]}', b'{"tokens": [2147483648]}', b'{"tokens": ["1"]}',
     b'{"tokens": [[1]]}', b'{"tokens": [1.5]}', b'{"tokens": null}', b'{"tokens": [1'],
)  # fmt: skip
def test_other_answers_are_none(answer: bytes) -> None:
    assert answered(answer) is None


def test_an_answer() -> None:
    found = answered(b'{"count": 2, "max_model_len": 9, "tokens": [0, 2147483647], "token_strs": null}')
    assert found is not None
    assert found.tolist() == [0, 2**31 - 1]
    assert found.dtype.name == "int32"
