"""A store in object storage: S3, Google Cloud Storage, Azure, and what speaks like them.

Raises:
    ImportError: obstore is missing: ``pip install 'kvpool[storage]'``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

from kvpool.arguments import int_from, seconds_from, shown
from kvpool.errors import ArgumentError, ArgumentTypeError, ClosedError, DeadlineExceeded, StateError, StoreFailed
from kvpool.storage.block_file import HEADER_BYTES, Fault, content_fault, header_fault, header_of
from kvpool.storage.counting import Seldom, StoreCounter
from kvpool.storage.folders import StoredFile
from kvpool.storage.store import Content, StoreStats, Trimmed, check_contents, check_keys, content_bytes, size_limit
from kvpool.storage.sweeping import victims

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError
    from obstore.store import from_url
except ImportError as error:
    raise ImportError("kvpool.storage.object_store needs obstore: pip install 'kvpool[storage]'") from error

__all__ = ["ObjectStore"]

_log = logging.getLogger("kvpool.storage")

_BLOCK: Final = re.compile(r"[0-9a-f]{2}/[0-9a-f]{32,128}\.kv")
_DELETED_AT_ONCE: Final = 1000  # what S3 takes in one request

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ObjectStore:
    """A `Store` in a bucket, by obstore. Thread-safe.

    A block is one object, written by one request, so readers see all of it or nothing. Every read verifies the
    header, the size and a checksum; an object that fails is a miss, counted, and deleted. The blocks of a call are
    asked for at once, up to `concurrency`. A call that its deadline ends writes to none of the buffers any more.
    Content passes through one copy, because HTTP clients bring buffers of their own choice.

    The bucket's own rules should delete what is old: an object's age counts from when it was written, as reading leaves
    no trace. `trim` does the same for buckets without such rules.

    Args:
        url: "s3://bucket/prefix", "gs://bucket/prefix", "az://container/prefix", or what else obstore knows.
        config: For obstore, such as ``{"endpoint": "http://minio:9000", "region": "us-east-1"}``. Credentials that it
            lacks come from the environment, as in each provider's own tools.
        concurrency: Requests of one call that are under way at a time.
        request_timeout_s: Seconds for one request. One that fails is tried once more, within that time.

    Raises:
        ArgumentError, ArgumentTypeError: obstore refuses the URL or the config, or another argument is wrong. The
            bucket is not asked.
    """

    def __init__(
        self,
        url: str,
        *,
        config: Mapping[str, str] | None = None,
        concurrency: int = 16,
        request_timeout_s: float = 10.0,
    ) -> None:
        if not isinstance(url, str):
            raise ArgumentTypeError(f"url must be a str, not {type(url).__name__} ({shown(url)})")
        if not 1 <= (concurrency := int_from(concurrency, "concurrency")) <= 1024:
            raise ArgumentError(f"concurrency is {concurrency}; it must be from 1 to 1024", value=concurrency)
        seconds = max(0.001, seconds_from(request_timeout_s, "request_timeout_s"))
        self.url: Final = url
        self._concurrency = concurrency
        self._store = _opened(url, dict(config or {}), seconds)
        self._counter = StoreCounter()
        self._bad = Seldom()
        self._closed = threading.Event()

    # Each method but stats and close raises StateError in a coroutine: it would stop the event loop.

    def exists(self, keys: Sequence[bytes], *, timeout: float | None = None) -> list[bool]:
        """Whether an object is there under each key; see `Store.exists`."""
        check_keys(keys)
        return self._each(self._exists, keys, timeout, "failed_reads")

    def get(self, keys: Sequence[bytes], into: Sequence[Content], *, timeout: float | None = None) -> list[bool]:
        """Reads blocks, and verifies them; see `Store.get`."""
        check_contents(keys, into)
        for position, content in enumerate(into):
            if any(piece.readonly for piece in content):
                raise ArgumentError(f"content {position} is read-only", position=position)
        found = [False] * len(keys)

        async def one(position: int) -> None:
            found[position] = await self._get(keys[position], into[position])

        with contextlib.suppress(DeadlineExceeded):
            self._each(one, range(len(keys)), timeout, "failed_reads")
        return found

    def put(self, keys: Sequence[bytes], contents: Sequence[Content], *, timeout: float | None = None) -> int:
        """Writes blocks that are not there yet; see `Store.put`."""
        check_contents(keys, contents)
        return sum(self._each(self._put, [*zip(keys, contents, strict=True)], timeout, "failed_writes"))

    def delete(self, keys: Sequence[bytes], *, timeout: float | None = None) -> int:
        """Deletes blocks; see `Store.delete`."""
        check_keys(keys)
        deleted = sum(self._each(self._delete, keys, timeout, "failed_writes"))
        self._counter.add(deleted=deleted)
        return deleted

    def trim(
        self, *, size_max: int | None = None, age_max_s: float | None = None, timeout: float | None = None
    ) -> Trimmed:
        """Looks at all objects, and deletes what is too old or too much, the first written first.

        Args:
            size_max: Bytes that may stay; None: any number.
            age_max_s: Seconds since it was written after which a block goes; None: never.
            timeout: Seconds.
        """
        size_max = None if size_max is None else size_limit(size_max)
        age_max_s = None if age_max_s is None else seconds_from(age_max_s, "age_max_s")

        async def all_of_it(_: None) -> Trimmed:
            files = []
            async for batch in obstore.list(self._store):
                for one in batch:
                    if _BLOCK.fullmatch(one["path"]):
                        written_ns = int(one["last_modified"].timestamp() * 1e9)
                        files.append(StoredFile(0, one["path"], one["size"], written_ns))
            gone = victims(files, size_max, age_max_s, time.time_ns())
            for first in range(0, len(gone), _DELETED_AT_ONCE):
                await obstore.delete_async(self._store, [file.name for file in gone[first : first + _DELETED_AT_ONCE]])
            size, gone_size = sum(file.size for file in files), sum(file.size for file in gone)
            return Trimmed(len(gone), gone_size, 0, len(files) - len(gone), size - gone_size)

        (done,) = self._each(all_of_it, [None], timeout, "failed_writes")
        self._counter.add(deleted=done.removed)
        return done

    def stats(self) -> StoreStats:
        """What it has done so far, in this process."""
        return self._counter.read()

    def close(self) -> None:
        """Ends it; idempotent. Calls that are under way end as they would have."""
        self._closed.set()

    # ---- one block

    async def _exists(self, key: bytes) -> bool:
        try:
            return int((await obstore.head_async(self._store, _path(key)))["size"]) > HEADER_BYTES
        except FileNotFoundError:
            return False

    async def _get(self, key: bytes, content: Content) -> bool:
        try:
            found = await obstore.get_async(self._store, _path(key))
            wrong_size = found.meta["size"] != HEADER_BYTES + content_bytes(content)
            # Of another size it need not come; a header that is there says whether it is a block at all.
            data = memoryview(b"" if wrong_size else await found.bytes_async())
        except FileNotFoundError:
            self._counter.add(misses=1)
            return False
        fault = _filled(key, content, data)
        if fault is None:
            self._counter.add(hits=1, read_bytes=content_bytes(content))
            return True
        self._counter.add(misses=1, **{fault: 1})
        if more := self._bad.due():
            _log.warning(
                "%s: block %s is %s, and is deleted; %d since the last such message", self.url, key.hex()[:16], fault,
                more, extra={"store": self.url, "key": key.hex(), "fault": fault},
            )  # fmt: skip
        try:
            await obstore.delete_async(self._store, _path(key))
        except (BaseError, OSError) as error:  # those who may only read; it stays a miss
            _log.info("%s: block %s stays: %s", self.url, key.hex()[:16], error, extra={"store": self.url})
        return False

    async def _put(self, given: tuple[bytes, Content]) -> bool:
        key, content = given
        whole = b"".join([header_of(key, content), *content])
        try:
            await self._put_whole(_path(key), whole)
        except AlreadyExistsError:
            self._counter.add(present=1)
            return False
        self._counter.add(written=1, written_bytes=content_bytes(content))
        return True

    async def _put_whole(self, path: str, whole: bytes) -> None:
        try:
            await obstore.put_async(self._store, path, whole, mode="create", use_multipart=False)
        except NotSupportedError:  # no conditional writes: the same content twice does no harm
            await obstore.put_async(self._store, path, whole, use_multipart=False)

    async def _delete(self, key: bytes) -> bool:
        if not await self._exists(key):
            return False
        await obstore.delete_async(self._store, _path(key))
        return True

    # ---- a call

    def _each(
        self,
        one: Callable[[_Item], Awaitable[_Result]],
        items: Sequence[_Item],
        timeout: float | None,
        failures: str,
    ) -> list[_Result]:
        """Awaits one for each item, `concurrency` at a time, within the timeout."""
        if self._closed.is_set():
            raise ClosedError(f"the store {self.url} is closed")
        seconds = None if timeout is None else seconds_from(timeout, "timeout")
        if _in_a_coroutine():
            raise StateError("called in a coroutine, whose event loop it would stop: use Storage, or another thread")

        async def limited(item: _Item, turns: asyncio.Semaphore) -> _Result:
            async with turns:
                return await one(item)

        async def all_of_them() -> list[_Result]:
            turns = asyncio.Semaphore(self._concurrency)
            return list(await asyncio.gather(*(limited(item, turns) for item in items)))

        try:
            return asyncio.run(_within(all_of_them(), seconds))
        except (BaseError, OSError) as error:
            if isinstance(error, DeadlineExceeded):
                raise
            self._counter.add(**{failures: 1})
            text = str(error).partition("\n")[0]  # without obstore's debug output, which has the request
            raise StoreFailed(
                f"the store {self.url} failed: {text}", errno=getattr(error, "errno", None) or 0
            ) from error

    def __enter__(self) -> ObjectStore:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()

    def __repr__(self) -> str:
        """Its URL."""
        return f"ObjectStore({self.url!r})"


def _in_a_coroutine() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _within(awaitable: Awaitable[_Result], seconds: float | None) -> _Result:
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except asyncio.TimeoutError as error:
        raise DeadlineExceeded(f"not done after {seconds} s") from error


def _opened(url: str, config: dict[str, str], seconds: float) -> Any:
    limit = timedelta(seconds=seconds)
    options: dict[str, Any] = {  # which of obstore's types they have depends on the URL
        "config": config or None,
        "client_options": {"timeout": limit, "connect_timeout": limit, "allow_http": True},
        "retry_config": {"max_retries": 1, "retry_timeout": limit},
    }
    try:
        return from_url(url, **options)
    except BaseException as error:  # obstore panics at some configurations, which is no Exception
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ArgumentError(f"no store at {url!r}: {str(error).partition(chr(10))[0]}") from error
        raise


def _filled(key: bytes, content: Content, data: memoryview) -> Fault | None:
    """Fills the buffers of a block from the bytes of its object, and verifies them; what is wrong."""
    header = bytes(data[:HEADER_BYTES])
    fault = header_fault(header, key, content, len(data))
    if fault is not None:
        return fault
    at = HEADER_BYTES
    for piece in content:
        piece[:] = data[at : at + piece.nbytes]
        at += piece.nbytes
    return content_fault(header, content)


def _path(key: bytes) -> str:
    return f"{key.hex()[:2]}/{key.hex()}.kv"
