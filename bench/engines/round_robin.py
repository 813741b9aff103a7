"""HTTP to several servers in turn, request by request: what kvpool's router is compared with.

python -m bench.engines.round_robin PORT URL [URL ...]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator, Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from bench.engines.http_client import httpx


def app(urls: Sequence[str]) -> Starlette:
    """Passes each request on to the next server, and its answer back as it comes."""
    turns = itertools.cycle(urls)
    client = httpx.AsyncClient(timeout=600, trust_env=False, limits=httpx.Limits(keepalive_expiry=2.0))

    async def forward(request: Request) -> StreamingResponse:
        asked = client.build_request(
            request.method,
            next(turns) + request.url.path,
            content=await request.body(),
            headers={"content-type": request.headers.get("content-type", "application/json")},
        )
        answer = await client.send(asked, stream=True)

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:
                await answer.aclose()

        kept = {name: value for name, value in answer.headers.items() if name == "content-type"}
        return StreamingResponse(pieces(), answer.status_code, kept)

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])


if __name__ == "__main__":
    uvicorn.run(app(sys.argv[2:]), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
