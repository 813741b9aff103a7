"""SGLang's HTTP server on this CPU, in the process that runs this: `http_server.py FOLDER PORT EVENTS REPLAY`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from engine_kit import ENVIRONMENT
from sglang_driver import MAX_TOKENS, PAGE


def main(folder: Path, port: int, events: int, replay: int) -> None:
    from bench.engines import tiny_llama, tiny_tokenizer

    tiny_llama.write(folder)
    tiny_tokenizer.write(folder)
    published = {"publisher": "zmq", "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
    options = [
        "--model-path", folder, "--served-model-name", "tiny", "--port", port, "--device", "cpu",
        "--attention-backend", "torch_native", "--max-total-tokens", MAX_TOKENS, "--disable-cuda-graph",
        "--mem-fraction-static", 0.3, "--page-size", PAGE, "--enable-cache-report", "--log-level", "warning",
        "--kv-events-config", json.dumps(published),
    ]  # fmt: skip
    command = [sys.executable, "-m", "sglang.launch_server", *map(str, options)]
    os.execve(sys.executable, command, os.environ | ENVIRONMENT)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
