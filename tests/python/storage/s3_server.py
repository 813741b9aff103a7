"""A server that speaks S3, on the loopback device: moto. Prints its port; ends with its input."""

from __future__ import annotations

import sys

from moto.moto_server.threaded_moto_server import ThreadedMotoServer

if __name__ == "__main__":
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()
    server.stop()
