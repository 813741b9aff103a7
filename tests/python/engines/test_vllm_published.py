"""What an engine tells routers: where it publishes its KV events, and its data-parallel rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.engines.membership import NOTHING, Published
from kvpool.engines.vllm.published import published_by

URL = "http://10.0.0.5:8000"


def config(index: int = 0, size: int = 1, local: bool = False, **events: Any) -> SimpleNamespace:
    parallel = SimpleNamespace(data_parallel_size=size, data_parallel_index=index, local_engines_only=local)
    given = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": None}
    kv_events = SimpleNamespace(**given | events) if events else None
    return SimpleNamespace(parallel_config=parallel, kv_events_config=kv_events)


@pytest.mark.parametrize(
    ("given", "published"),
    [
        ({}, NOTHING),
        ({"publisher": "zmq"}, Published("tcp://10.0.0.5:5557")),
        ({"replay_endpoint": "tcp://*:5558"}, Published("tcp://10.0.0.5:5557", "tcp://10.0.0.5:5558")),
        ({"publisher": "null"}, NOTHING),
        ({"enable_kv_cache_events": False}, NOTHING),
        ({"endpoint": "ipc:///run/events"}, Published("ipc:///run/events")),
        ({"endpoint": "tcp://10.0.0.9:5557"}, NOTHING),  # vLLM connects to it
        ({"endpoint": "tcp://*:0"}, NOTHING),  # which port it is, is not known
        ({"endpoint": "inproc://cache"}, NOTHING),
        ({"size": 4, "index": 3}, Published(rank=3)),
        ({"size": 4, "index": 3, "publisher": "zmq"}, Published("tcp://10.0.0.5:5560", rank=3)),
        ({"size": 4, "index": 3, "endpoint": "ipc:///run/events"}, Published(rank=3)),
        ({"size": 4, "index": 3, "local": True, "publisher": "zmq"}, Published("tcp://10.0.0.5:5560")),
        ({"size": 1, "index": 2, "publisher": "zmq"}, Published("tcp://10.0.0.5:5559", rank=2)),  # a dense model
        ({"size": 1, "index": 2, "local": True}, NOTHING),
    ],
)
def test_what_routers_connect_to_is_what_vllm_binds(given, published):
    engine_id = f"x_dp{given['index']}" if "index" in given else "x"
    assert published_by(config(**given), URL, engine_id) == published
    assert published_by(config(**given), "", engine_id) == NOTHING


def test_replicas_of_a_dense_model_have_ranks_from_the_first_one_on():
    ranks = [published_by(config(index), URL, f"x_dp{index}").rank for index in range(3)]
    assert ranks == [0, 1, 2]


def test_an_address_of_ipv6_is_written_in_brackets():
    given = config(endpoint="tcp://[::]:5557")
    assert published_by(given, "http://[fd00::1]:8000", "x").events == "tcp://[fd00::1]:5557"
