"""Prompts of LoRA adapters: each goes where its own adapter has it cached, and no other's counts for it."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from kit import BLOCK
from router.publishing import Publishing
from router.router_kit import PATIENCE_S, eventually, fakes, routing

from kvpool.control.reading.asking import adapters_in, is_of_sglang, models_in
from kvpool.control.router import EventsSpec, InstanceSpec, RouterSettings
from kvpool.control.router.adapter_names import AdapterNames
from kvpool.control.router.adapters import Adapters
from kvpool.control.router.prompts import PromptReader
from kvpool.index.adapters import adapter_namespace

PROMPT = [7] * 12 * BLOCK
BY_EVENTS = {"block_tokens": BLOCK, "policy": "longest-prefix", "warmup_s": 0.0, "cap": 1000.0}
MODELS = [
    {"id": "base", "parent": None, "object": "model"},
    {"id": "alias", "object": "model"},
    {"id": "sql", "parent": "base", "root": "/sql"},
    {"id": "chat", "parent": "base"},
]


def test_prompts_of_adapters_go_where_their_own_adapter_has_them():
    with fakes("a", "b", "c") as three, Publishing() as a, Publishing() as b, Publishing() as c:
        for fake in three:
            fake.models = MODELS
        events = {"a": EventsSpec(a.endpoint), "b": EventsSpec(b.endpoint), "c": EventsSpec(c.endpoint)}
        with routing(*three, events=events, **BY_EVENTS) as running:
            for each in (a, b, c):
                each.wait_until_heard()
            a.store(PROMPT)
            b.store(PROMPT, lora_name="sql", lora_id=1, extra_keys=["sql"])
            c.store(PROMPT, extra_keys=["sql"])  # a salt that is called as the adapter
            eventually(lambda: all(each["cached_blocks"] for each in running.states().values()))
            eventually(lambda: "chat" in running.router._adapters._names, "the instances were not asked")
            places = [running.where(PROMPT, model=model) for model in ("base", "alias", "sql", "base")]
            assert places == ["a", "a", "b", "a"]
            assert running.where(PROMPT, model="base", cache_salt="sql") == "c"
            before = running.metric("prompt_tokens_cached_total")
            running.complete(PROMPT, model="chat")  # an adapter of which nothing is cached
            running.complete(PROMPT, model="sql", cache_salt="salt")
            assert running.metric("prompt_tokens_cached_total") == before


def test_an_event_names_an_adapter_that_no_list_has():
    with fakes("a", "b") as two, Publishing() as a, Publishing() as b:
        with routing(*two, events={"a": EventsSpec(a.endpoint), "b": EventsSpec(b.endpoint)}, **BY_EVENTS) as running:
            for each in (a, b):
                each.wait_until_heard()
            a.store(PROMPT)
            b.store(PROMPT, lora_name="new", lora_id=1)
            eventually(lambda: all(each["cached_blocks"] for each in running.states().values()))
            assert [running.where(PROMPT, model=model) for model in ("new", "base")] == ["b", "a"]


def test_a_salt_in_the_form_of_an_adapter_changes_nothing_for_others():
    with fakes("a", "b") as two, Publishing() as a, Publishing() as b:
        with routing(*two, events={"a": EventsSpec(a.endpoint), "b": EventsSpec(b.endpoint)}, **BY_EVENTS) as running:
            for each in (a, b):
                each.wait_until_heard()
            a.store(PROMPT)
            b.store(PROMPT, extra_keys=[adapter_namespace("base")])
            eventually(lambda: all(each["cached_blocks"] for each in running.states().values()))
            assert running.where(PROMPT, model="base") == "a"
            assert running.where(PROMPT, model="base", cache_salt=adapter_namespace("base")) == "b", "its own prompts"


def test_servers_that_do_not_answer_keep_no_other_one_waiting():
    names = AdapterNames()
    silent = [InstanceSpec(f"s{rank}", "http://127.0.0.1:1", rank=rank) for rank in range(2)]
    silent += [InstanceSpec(f"s{port}", f"http://127.0.0.1:{port}") for port in (2, 3)]
    good = InstanceSpec("good", "http://127.0.0.1:4")
    fleet = [SimpleNamespace(number=n, epoch=0, in_table=True, spec=spec) for n, spec in enumerate([*silent, good])]
    asked: list[str] = []

    class Answers:
        async def get(self, spec: InstanceSpec, *_: object) -> tuple[int, bytes]:
            asked.append(spec.url)
            if spec is not good:
                await asyncio.Event().wait()
            return 200, json.dumps({"data": MODELS}).encode()

    async def ask() -> None:
        adapters = Adapters(RouterSettings(instances=(good,)), fleet, names)
        await adapters.close()
        adapters._asker = Answers()
        task = asyncio.create_task(adapters.run())
        while "sql" not in names:
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))
    assert sorted(asked) == [f"http://127.0.0.1:{port}" for port in (1, 2, 3, 4)], "each server once"


def test_lists_of_models_may_be_anything():
    models = json.dumps({"data": MODELS}).encode()
    assert (list(adapters_in(models)), list(models_in(models))) == (["sql", "chat"], ["base", "alias"])
    for odd in (b"", b"[]", b'{"data": 7}', b'{"data": [{"id": 7}]}', b"\xff", b"[" * 100_000):
        assert (list(adapters_in(odd)), list(models_in(odd))) == ([], [])


def test_names_are_bounded_and_namespaces_tell_them_apart():
    names = AdapterNames()
    for name in ("", "x" * 5000, "a\x1fb"):
        names.add(name)
        assert name not in names
    names.add("sql")
    assert names.namespace("sql", "s") == adapter_namespace("sql", "s") != names.namespace("m", "s")
    assert names.namespace("base:sql", "s") == adapter_namespace("sql", "s")  # as SGLang's requests
    assert names.namespace("sql:base", "s") == "s"
    assert names.namespace(None, "s") == names.namespace("m", "s") == "s"
    salts = ["", "s", "\x1f", "\x1fsql\x1f", "\x1f\x1fsql\x1f"]
    assert len({names.namespace(model, salt) for model in ("m", "sql") for salt in salts}) == 2 * len(salts)
    for number in range(10_000):
        names.add(f"name {number}")
    assert ("sql" in names, "name 9999" in names) == (False, True), "the name said longest ago is forgotten"


def test_an_adapter_that_only_sglang_lists_is_named_behind_its_model():
    """SGLang runs the model itself for a bare name; vLLM has no other."""
    names = AdapterNames()
    names.add_listed("sql", behind=True)
    names.add("chat")  # by an event
    sql = adapter_namespace("sql", "s")
    assert [names.namespace(model, "s") for model in ("sql", "base:sql", "base: sql ")] == ["s", sql, sql]
    assert names.namespace("chat", "s") == adapter_namespace("chat", "s")
    names.add_listed("sql", behind=False)  # by a server of vLLM beside it
    names.add_listed("sql", behind=True)
    assert names.namespace("sql", "s") == sql
    names.add_model("base")
    names.add_listed("base", behind=True)
    assert names.namespace("base", "s") == "s"


def test_the_field_of_sglang_names_an_adapter_unless_the_model_does():
    names = AdapterNames()
    for name in ("sql", "chat"):
        names.add_listed(name, behind=True)
    assert names.namespace("base", "s", "sql") == adapter_namespace("sql", "s")
    assert names.namespace(None, "s", "sql") == adapter_namespace("sql", "s")
    assert names.namespace("base:chat", "s", "sql") == adapter_namespace("chat", "s")
    assert names.namespace("base", "s", "unknown") == names.namespace("base", "s", None) == "s"


def test_the_field_of_sglang_counts_only_for_adapters_that_sglang_lists():
    """vLLM ignores the field, and runs the model itself."""
    names = AdapterNames()
    names.add("by event")
    names.add_listed("sql", behind=False)
    assert {names.namespace("base", "s", name) for name in ("by event", "sql")} == {"s"}
    names.add_listed("sql", behind=True)
    assert names.namespace("base", "s", "sql") == adapter_namespace("sql", "s")


def test_an_unknown_adapter_behind_the_model_counts_before_the_field_of_sglang():
    names = AdapterNames()
    names.add_model("base")
    names.add_model("s3://base")
    names.add_listed("sql", behind=True)
    for model in ("base:unknown", "base: unknown ", "s3://base:unknown"):
        assert names.namespace(model, "s", "sql") == "s"
    for model in ("base", "s3://base", "base:", "base: "):
        assert names.namespace(model, "s", "sql") == adapter_namespace("sql", "s")


def test_a_models_name_may_have_colons():
    names = AdapterNames()
    names.add_model("s3://bucket:7/base")
    names.add_listed("sql", behind=True)
    names.add_listed("//bucket", behind=True)
    assert names.namespace("s3://bucket:7/base", "s") == "s"
    assert names.namespace("s3://bucket:7/base:sql", "s") == adapter_namespace("sql", "s")


@pytest.mark.parametrize("padding", [0, 100_000], ids=["here", "in a process"])
@pytest.mark.parametrize("lora_path", ["sql", ["sql", None]])
def test_the_adapter_of_a_request_of_sglang_is_read(padding, lora_path):
    names = AdapterNames()
    names.add_listed("sql", behind=True)
    reader = PromptReader(None, 1 << 20, 1, PATIENCE_S, adapters=names)
    fields = {"prompt": [1, 2, 3], "model": "base", "lora_path": lora_path}
    try:
        asked, text, other, plain = (
            asyncio.run(reader.read("completions", {}, json.dumps(each).encode().ljust(padding)))
            for each in (
                fields, fields | {"prompt": "one"}, {"prompt": "one", "model": "base", "lora_path": "x"},
                {"prompt": "one", "model": "base"},
            )
        )  # fmt: skip
    finally:
        reader.close()
    assert asked.namespace == adapter_namespace("sql")
    assert len({text.namespace, other.namespace, plain.namespace}) == 3  # of texts, too


@pytest.mark.parametrize("wrong", [7, {}, [], [7], "x" * 5000, None])
def test_an_odd_adapter_is_none(wrong):
    names = AdapterNames()
    names.add("x" * 5000)
    reader = PromptReader(None, 1 << 20, 1, PATIENCE_S, adapters=names)
    try:
        body = json.dumps({"prompt": [1], "model": "base", "lora_path": wrong}).encode()
        assert asyncio.run(reader.read("completions", {}, body)).tokens.tolist() == [1]
    finally:
        reader.close()


def test_lists_of_models_say_whose_they_are():
    assert is_of_sglang(json.dumps({"data": [each | {"owned_by": "sglang"} for each in MODELS]}).encode())
    for other in ("vllm", None):
        assert not is_of_sglang(json.dumps({"data": [each | {"owned_by": other} for each in MODELS]}).encode())
    assert not is_of_sglang(b"[]")


def test_a_model_is_no_adapter_whoever_says_so():
    names = AdapterNames()
    names.add("base")
    names.add_model("base")
    names.add("base")
    names.add("sql")
    assert ("base" in names, "sql" in names) == (False, True)


@pytest.mark.parametrize("padding", [0, 100_000], ids=["here", "in a process"])
def test_the_model_of_a_request_is_read_wherever_its_body_is(padding):
    names = AdapterNames()
    names.add("sql")
    reader = PromptReader(None, 1 << 20, 1, PATIENCE_S, adapters=names)
    try:
        body = json.dumps({"prompt": [1, 2, 3], "model": "sql"}).encode().ljust(padding)
        asked = asyncio.run(reader.read("completions", {}, body))
    finally:
        reader.close()
    assert (asked.tokens.tolist(), asked.namespace) == ([1, 2, 3], adapter_namespace("sql"))
