"""`kvpool router` before two servers of vLLM without kvpool: chats go where they are cached, as the servers' KV events
say. Each prompt is computed by asking a server past the router, which so has nothing to remember.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from served import cached_of, eventually, router
from vllm_process import BLOCK, PYTHON, ROOT, needs_vllm

from bench.engines.vllm_servers import MODEL, Server, environment, free_port

pytestmark = pytest.mark.timeout(600)

SYSTEM = {"role": "system", "content": "You answer questions about a document. " * 4}
WRITE = (
    "import sys; from pathlib import Path; from bench.engines import tiny_llama, tiny_tokenizer; "
    "folder = Path(sys.argv[1]); tiny_llama.write(folder); tiny_tokenizer.write(folder)"
)


class Publishing(Server):
    """A server that takes chats and publishes KV events; it may be started again at the same addresses."""

    def __init__(self, folder: Path, name: str, ports: tuple[int, int, int]) -> None:
        port, events, replay = ports
        self.ports = ports
        published = {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
        }  # fmt: skip
        super().__init__(
            folder, name, port, "--max-model-len", 2048, "--kv-events-config", json.dumps(published), texts=True,
            variables=environment() | {"VLLM_SERVER_DEV_MODE": "1"},
        )  # fmt: skip

    def ask(self, path: str, fields: dict[str, Any]) -> httpx.Response:
        response = httpx.post(f"{self.url}{path}", json=fields, timeout=120, trust_env=False)
        assert response.status_code == 200, response.text
        return response


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    needs_vllm()
    folder = tmp_path_factory.mktemp("events")
    subprocess.run([PYTHON, "-c", WRITE, str(folder / "model")], check=True, cwd=ROOT, env=environment())
    with contextlib.ExitStack() as stack:
        two = {name: Publishing(folder, name, (free_port(), free_port(), free_port())) for name in "ab"}
        stack.callback(lambda: [each.kill() for each in two.values()])  # also one that was started again
        for each in two.values():
            each.await_start()
        yield two


@contextlib.contextmanager
def following(pair):
    named = {"--instances": "", "--events": "", "--events-replay": ""}
    for name, server in pair.items():
        for option, where in zip(
            named, (server.url, *(f"tcp://127.0.0.1:{port}" for port in server.ports[1:])), strict=True
        ):
            named[option] += f"{name}={where},"
    options = [part for each in named.items() for part in each]
    how = ("--block-tokens", str(BLOCK), "--tokenize", "/tokenize", "--tokenize-timeout", "30", "--idle", "1")
    with router(*options, *how, "--warmup", "0", up=2) as client:
        eventually(lambda: all(each["events"]["synced"] for each in states(client).values()), 60)
        yield client


def states(client: httpx.Client) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in client.get("/instances").json()["instances"]}


def blocks(client: httpx.Client, name: str) -> int:
    return states(client)[name]["cached_blocks"]


def chat(*questions: str, **fields: Any) -> dict[str, Any]:
    said = [SYSTEM | {"content": f"{questions[0]} {SYSTEM['content']}"}]
    said += [{"role": "user", "content": each} for each in questions]
    return {"model": MODEL, "messages": said, "max_tokens": 2, "temperature": 0, **fields}


def home(client: httpx.Client, fields: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[str, int]:
    """Which server answered, and how much of the prompt it had cached by its own count."""
    answer = client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-kvpool-instance"], cached_of(answer)


def test_chats_and_texts_go_to_the_server_that_has_them_by_its_events(pair):
    with following(pair) as client:
        for number, name in enumerate("abba"):
            before = blocks(client, name)
            pair[name].ask("/v1/chat/completions", chat(f"Question {number}?"))
            eventually(lambda name=name, before=before: blocks(client, name) > before, 60)
            where, cached = home(client, chat(f"Question {number}?", "And then?"))
            assert (where, cached > 0) == (name, True)
        text = {"model": MODEL, "prompt": "A text that is no chat. " * 8, "max_tokens": 2}
        for name, salt in (("b", {}), ("a", {"cache_salt": "tenant"})):
            before = blocks(client, name)
            pair[name].ask("/v1/completions", text | salt)
            eventually(lambda name=name, before=before: blocks(client, name) > before, 60)
            where, cached = home(client, text | salt, "/v1/completions")
            assert (where, cached > 0) == (name, True)
        assert 'prompts_untokenized_total{reason="' not in client.get("/metrics").text
        for each in states(client).values():
            assert (each["events"]["malformed"], each["events"]["left_out"]) == (0, 0)


def test_a_router_that_starts_later_knows_what_was_cached_before(pair):
    pair["b"].ask("/v1/chat/completions", chat("Before the router?"))
    pair["a"].ask("/v1/chat/completions", chat("Before the router, too?"))
    with following(pair) as client:
        assert [home(client, chat(f"Before the router{end}"))[0] for end in ("?", ", too?")] == ["b", "a"]


def test_a_server_that_clears_its_cache_or_is_started_again_is_forgotten(pair):
    with following(pair) as client:
        before = blocks(client, "b")
        pair["b"].ask("/v1/chat/completions", chat("What is cleared?"))
        eventually(lambda: blocks(client, "b") > before, 60)
        assert home(client, chat("What is cleared?"))[0] == "b"
        httpx.post(f"{pair['b'].url}/reset_prefix_cache", timeout=60, trust_env=False).raise_for_status()
        pair["b"].ask("/v1/completions", {"model": MODEL, "prompt": "!", "max_tokens": 1})  # events go out with a step
        eventually(lambda: blocks(client, "b") == 0, 60)
        before = blocks(client, "a")
        pair["a"].ask("/v1/chat/completions", chat("What is cleared?"))
        eventually(lambda: blocks(client, "a") > before, 60)
        assert home(client, chat("What is cleared?"))[0] == "a"

        pair["b"].ask("/v1/chat/completions", chat("What is lost?"))
        eventually(lambda: blocks(client, "b") > 0, 60)
        pair["b"].kill()
        eventually(lambda: states(client)["b"]["events"] is None, 60)
        assert home(client, chat("What is lost?"))[0] == "a"
        pair["b"] = Publishing(pair["b"].folder, "b", pair["b"].ports)
        pair["b"].await_start()
        eventually(lambda: (states(client)["b"]["events"] or {}).get("synced"), 60)
        assert blocks(client, "b") == 0
        pair["b"].ask("/v1/chat/completions", chat("What is new?"))
        eventually(lambda: blocks(client, "b") > 0, 60)
        assert home(client, chat("What is new?"))[0] == "b"
