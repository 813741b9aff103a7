"""A store in a bucket, with a real server that speaks S3."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import kit
import pytest
from kit import prompt, small_pool
from storage_kit import content, joined, key, room

import kvpool
from kvpool.storage import Storage

pytest.importorskip("obstore", reason="obstore is not installed")
pytest.importorskip("moto", reason="moto is not installed")

import obstore

from kvpool.storage.object_store import ObjectStore

LONG_S = 60.0


@pytest.fixture(scope="module")
def server():
    """Its address."""
    script = Path(__file__).with_name("s3_server.py")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()


@pytest.fixture
def bucket(server, request):
    """The name of an empty bucket."""
    name = f"bucket-{time.monotonic_ns()}"
    urllib.request.urlopen(urllib.request.Request(f"{server}/{name}", method="PUT")).close()
    return name


def opened(server: str, bucket: str, **options) -> ObjectStore:
    config = {"endpoint": server, "access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
    return ObjectStore(f"s3://{bucket}/kv", config=config, **options)


@pytest.fixture
def store(server, bucket):
    with opened(server, bucket) as one:
        yield one


def read(store: ObjectStore, number: int, size: int = 1000, pieces: int = 1) -> bytes | None:
    into = room(size, pieces)
    return joined(into) if store.get([key(number)], [into]) == [True] else None


def object_of(store: ObjectStore, number: int) -> str:
    return f"{key(number).hex()[:2]}/{key(number).hex()}.kv"


def test_what_was_put_is_read_back(store):
    assert store.exists([key(1), key(2)]) == [False, False]
    assert store.put([key(1), key(2)], [content(1), content(2, pieces=3)]) == 2
    assert store.exists([key(1), key(3), key(2)]) == [True, False, True]
    assert read(store, 1, pieces=4) == joined(content(1))
    assert read(store, 2) == joined(content(2))
    assert read(store, 3) is None
    assert store.put([key(1)], [content(1)]) == 0
    assert store.delete([key(1), key(7)]) == 1
    assert read(store, 1) is None
    stats = store.stats()
    assert (stats.written, stats.written_bytes, stats.present) == (2, 2000, 1)
    assert (stats.hits, stats.read_bytes, stats.misses, stats.deleted) == (2, 2000, 2, 1)


def test_many_blocks_go_in_one_call(store):
    numbers = range(50)
    assert store.put([key(number) for number in numbers], [content(number) for number in numbers]) == 50
    assert store.exists([key(number) for number in range(60)]) == [True] * 50 + [False] * 10
    into = [room() for _ in range(60)]
    assert store.get([key(number) for number in range(60)], into) == [True] * 50 + [False] * 10
    assert [joined(one) for one in into[:50]] == [joined(content(number)) for number in numbers]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda whole: whole[:-1], "torn"),
        (lambda whole: whole + b"x", "torn"),
        (lambda whole: b"", "torn"),
        (lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]), "rotten"),
        (lambda whole: whole[:40] + bytes([whole[40] ^ 1]) + whole[41:], "rotten"),
        (lambda whole: bytes(len(whole)), "foreign"),
    ],
    ids=["shorter", "longer", "empty", "content", "header", "zeros"],
)
def test_a_damaged_object_is_a_miss_and_deleted(store, change, fault):
    store.put([key(1)], [content(1)])
    whole = bytes(obstore.get(store._store, object_of(store, 1)).bytes())
    obstore.put(store._store, object_of(store, 1), change(whole))
    assert read(store, 1) is None
    stats = store.stats()
    assert (getattr(stats, fault), stats.misses, stats.hits) == (1, 1, 0)
    assert store.exists([key(1)]) == [False]
    assert store.put([key(1)], [content(1)]) == 1
    assert read(store, 1) == joined(content(1))


def test_trim_deletes_by_size_and_age_and_nothing_foreign(store):
    for number in range(4):
        store.put([key(number)], [content(number)])
    obstore.put(store._store, "notes.txt", b"precious")
    size = len(bytes(obstore.get(store._store, object_of(store, 0)).bytes()))
    done = store.trim(size_max=3 * size)
    assert (done.removed, done.removed_bytes, done.blocks, done.bytes) == (1, size, 3, 3 * size)
    assert store.trim(age_max_s=3600).removed == 0
    assert store.trim(size_max=0).removed == 3
    assert bytes(obstore.get(store._store, "notes.txt").bytes()) == b"precious"
    assert store.stats().deleted == 4


def test_pools_share_a_bucket(server, bucket):
    tokens = prompt(5)
    with opened(server, bucket) as where, small_pool(0, 8, device="cpu") as pool:
        with Storage(pool, where, model="m", write="never") as storage:
            addrs = kit.store(pool, tokens, medium=kvpool.DRAM)
            kit.Stamps(pool).write(addrs, [1, 2, 3, 4, 5])
            assert storage.save(tokens).wait(LONG_S).saved == 5
    with opened(server, bucket) as where, small_pool(0, 8, device="cpu") as pool:
        with Storage(pool, where, model="m", write="never") as storage:
            assert storage.load(tokens, budget_s=LONG_S).wait().tokens == 20
            with pool.match(tokens) as hit:
                assert kit.Stamps(pool).read(hit.addrs) == [1, 2, 3, 4, 5]


def test_a_bucket_that_does_not_exist_refuses_writes(server):
    with opened(server, "no-such-bucket") as store:
        assert store.exists([key(1)]) == [False]
        with pytest.raises(kvpool.StoreFailed):
            store.put([key(1)], [content(1)])
        assert store.stats().failed_writes == 1


def test_a_server_that_is_gone_is_an_error_without_the_credentials():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        with opened(f"http://127.0.0.1:{taken.getsockname()[1]}", "b", request_timeout_s=1) as store:
            with pytest.raises(kvpool.StoreFailed) as caught:
                store.exists([key(1)])
            assert "\n" not in str(caught.value)
            assert store.stats().failed_reads == 1


def test_a_server_that_does_not_answer_is_given_up_at_the_deadline():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with opened(f"http://127.0.0.1:{silent.getsockname()[1]}", "b", request_timeout_s=LONG_S) as store:
            assert store.get([key(1)], [room()], timeout=0.2) == [False]
            with small_pool(0, 4, device="cpu") as pool, Storage(pool, store, model="m") as storage:
                assert storage.load(prompt(2), budget_s=0.2).wait(LONG_S).late


def test_it_cannot_be_called_where_an_event_loop_runs(store):
    async def inside():
        store.exists([key(1)])

    with pytest.raises(kvpool.StateError, match="coroutine"):
        asyncio.run(inside())


def test_a_closed_store_refuses_every_call(server, bucket):
    store = opened(server, bucket)
    store.close()
    store.close()
    for call in (
        lambda: store.exists([key(1)]), lambda: store.get([key(1)], [room()]), lambda: store.put([], []),
        lambda: store.delete([]), lambda: store.trim(),
    ):  # fmt: skip
        with pytest.raises(kvpool.ClosedError):
            call()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: ObjectStore("nowhere://x"), kvpool.ArgumentError),
        (lambda: ObjectStore("s3://"), kvpool.ArgumentError),
        (lambda: ObjectStore("s3://b", config={"colour": "blue"}), kvpool.ArgumentError),
        (lambda: ObjectStore(7), kvpool.ArgumentTypeError),
        (lambda: ObjectStore("s3://b", concurrency=0), kvpool.ArgumentError),
        (lambda: ObjectStore("s3://b", request_timeout_s="1"), kvpool.ArgumentTypeError),
    ],
)
def test_wrong_arguments_are_refused(make, error):
    with pytest.raises(error):
        make()


def test_without_obstore_the_error_says_what_to_install():
    code = "import sys; sys.modules['obstore'] = None\nimport kvpool.storage\nimport kvpool.storage.object_store"
    run = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=dict(os.environ)
    )
    assert "ImportError: kvpool.storage.object_store needs obstore: pip install 'kvpool[storage]'" in run.stderr
