"""An instance that accepts bodies and does not read them: `python deaf.py` prints its port and runs until killed."""

from __future__ import annotations

import asyncio

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            left = sum(int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:"))
            while left:
                left -= len(await reader.read(min(left, 1 << 20)))
            writer.write(ANSWER)
            await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20, backlog=1000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
