"""A fake instance: an HTTP server that speaks enough of OpenAI's API. Runs in a thread, or as a process to be killed.

Requests say how it behaves: `pieces` of text, `first_s` before the first, `every_s` between two, `die` after so many,
`hold_at` the piece that waits for `released`, `held` that all of the answer does. One that goes to several may say it
for each: `{"first_s": {"a": 600}}`.
As a process it prints its port and runs until it is killed: `python fake.py NAME`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


class FakeInstance:
    """The application and what it saw."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.well = True
        self.status = 0  # of every answer, unless 0
        self.params: Any = None  # kv_transfer_params of its answers
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.tokens_of: Callable[[dict], Any] | None = None  # its answers at /tokenize; None: 404
        self.holds_tokens = False  # until this is set back
        self.asked: list[tuple[dict[str, str], dict]] = []  # there
        self.models: list[dict[str, Any]] = [{"id": "tiny", "object": "model"}]
        self.abandoned = 0  # answers whose client left
        self.under_way = 0
        self.most_under_way = 0
        self.lock = threading.Lock()
        self.released = threading.Event()  # held requests go on
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/completions", self, methods=["POST"]),
                Route("/v1/chat/completions", self, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/embeddings", self, methods=["POST"]),
                Route("/v1/responses", self, methods=["POST"]),
            ]
        )

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.well else 503)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self.models})

    async def _tokenize(self, request: Request) -> Response:
        fields = await request.json()
        self.asked.append((dict(request.headers), fields))
        while self.holds_tokens:
            await asyncio.sleep(0.01)
        if self.tokens_of is None:
            return Response(status_code=404)
        told = self.tokens_of(fields)
        return told if isinstance(told, Response) else JSONResponse(told)

    async def __call__(self, scope, receive, send) -> None:
        request = Request(scope, receive)
        body = await request.body()
        fields = json.loads(body)
        with self.lock:
            self.seen.append((request.url.path, dict(request.headers), body))
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        answering = asyncio.create_task(self._answer(fields, send))
        leaving = asyncio.create_task(self._client_leaves(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.abandoned += 1
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
            with self.lock:
                self.under_way -= 1

    async def _client_leaves(self, receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _answer(self, fields: dict, send) -> None:
        await asyncio.sleep(self._said(fields, "first_s", 0))
        while self._said(fields, "held", False) and not self.released.is_set():
            await asyncio.sleep(0.01)
        if self.status:
            await _start(send, self.status, b"application/json")
            await send({"type": "http.response.body", "body": b'{"error": {"message": "by the fake"}}'})
        elif self._said(fields, "die", None) == 0:
            await _start(send, 200, b"application/json")
            return  # without a byte of a body: the server closes the connection
        elif fields.get("stream"):
            await self._events(fields, send)
        else:
            await self._json(fields, send)

    async def _json(self, fields: dict, send) -> None:
        text = "".join(f"w{number} " for number in range(self._said(fields, "pieces", 3)))
        answer = {"object": "text_completion", "choices": [{"text": text}], "instance": self.name}
        if self.params is not None:
            answer["kv_transfer_params"] = self.params
        body = json.dumps(answer).encode()
        await _start(send, 200, b"application/json", (b"content-length", str(len(body)).encode()))
        if self._said(fields, "die", None) is not None:
            await send({"type": "http.response.body", "body": body[:10], "more_body": True})
            return
        await send({"type": "http.response.body", "body": body})

    async def _events(self, fields: dict, send) -> None:
        await _start(send, 200, b"text/event-stream; charset=utf-8")
        for number in range(self._said(fields, "pieces", 3)):
            while fields.get("hold_at") == number and not self.released.is_set():
                await asyncio.sleep(0.01)
            event = f'data: {{"choices": [{{"text": "w{number} "}}], "instance": "{self.name}"}}\n\n'.encode()
            if self._said(fields, "die", None) == number:
                await send({"type": "http.response.body", "body": event[:9], "more_body": True})
                return  # in the middle of an event
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(fields.get("every_s", 0))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        if self._said(fields, "die", None) == "done":
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _said(self, fields: dict, key: str, default: Any) -> Any:
        said = fields.get(key, default)
        return said.get(self.name, default) if isinstance(said, dict) else said


async def _start(send, status: int, kind: bytes, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *headers]})


def config(app, port: int = 0) -> uvicorn.Config:
    return uvicorn.Config(app, port=port, log_config=None, access_log=False, timeout_graceful_shutdown=1)


async def _main(name: str) -> None:
    server = uvicorn.Server(config(FakeInstance(name).app))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
