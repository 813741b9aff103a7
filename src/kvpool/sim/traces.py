"""Recorded workloads as they are published, read row by row without keeping the rows.

    JSON, one object a line      timestamp (ms), input_length, output_length, hash_ids       Mooncake
                                 session, turn, input_length, output_length, hash_ids        sessions without a clock
    CSV                          TIMESTAMP, ContextTokens, GeneratedTokens                   Azure
                                 num_prefill_tokens, num_decode_tokens, maybe arrived_at     Vidur

The content determines the format and the compression (xz, gzip, bzip2). In a trace without hash ids prompts share
nothing; without times requests arrive as a Poisson process.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import heapq
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import count, islice
from math import isfinite
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

import numpy as np

from kvpool.errors import ArgumentError
from kvpool.sim.requests import FreshIds, Ids, SimRequest, Workload

__all__ = ["Row", "open_trace"]

_MAGIC: Final[dict[bytes, Callable[..., Any]]] = {b"\xfd7zXZ\x00": lzma.open, b"\x1f\x8b": gzip.open, b"BZh": bz2.open}
_ENCODING: Final = "utf-8-sig"  # spreadsheets write a byte order mark, which is no part of the first name
_LOOK: Final = 200  # rows that are examined to find the size of a block
_BLOCKS: Final = tuple(1 << power for power in range(11, -1, -1))  # the largest that fits is taken
_WINDOW: Final = 4096  # rows that may be out of order
_ID_MASK: Final = 2**31 - 1
_BLOCK_DEFAULT: Final = 16
_EPOCH: Final = datetime(2000, 1, 1)
_LONGEST: Final = 1 << 30  # tokens; a larger number is no length


class Row(NamedTuple):
    """One recorded request; None for what the trace does not say.

    Attributes:
        time_s: Seconds, from any start.
        prompt: Tokens of the prompt.
        output: Tokens of the answer.
        ids: Ids of the prompt's blocks.
        session: The session that it belongs to.
    """

    time_s: float | None
    prompt: int
    output: int
    ids: list[int] | None = None
    session: str | None = None


def open_trace(
    path: Path,
    *,
    block_tokens: int | None = None,
    rate: float | None = None,
    rate_scale: float = 1.0,
    limit: int | None = None,
    seed: int = 0,
) -> Workload:
    """A recorded workload.

    Args:
        path: The file.
        block_tokens: Tokens for which a hash id stands; None tells it from the lengths. Without hash ids, the size of a
            block: 16.
        rate: Requests a second of a Poisson process, in place of the recorded times.
        rate_scale: How many times faster than recorded requests arrive.
        limit: The most requests to read, from the first.
        seed: The seed of the Poisson process.

    Raises:
        ArgumentError: The file cannot be read, is in no known format, is empty, has no times and no rate is given, or
            its block size cannot be told. Later, from the iterator: a row that is wrong; it is named by its number.
    """
    if not rate_scale > 0 or (rate is not None and not rate > 0):
        raise ArgumentError(f"rate {rate}, rate_scale {rate_scale}: both must be above 0")
    if limit is not None and limit < 1:
        raise ArgumentError(f"limit is {limit}; at least one request is needed")
    first = list(islice(_rows(path), _LOOK))
    if not first:
        raise ArgumentError(f"{path}: no requests in it")
    notes: list[str] = []
    if rate is None and first[0].time_s is None:
        raise ArgumentError(f"{path}: it has no arrival times; give a rate, in requests a second")
    if rate is not None:
        notes.append(f"arrivals: Poisson, {rate:g} requests/s")
    if first[0].ids is None:
        notes.append("the trace does not say which prompts share a prefix, so nothing hits a cache")
        block = block_tokens or _BLOCK_DEFAULT
    else:
        block = block_tokens or _block_size(path, first)
        list(islice(_rows(path, block), _LOOK))  # a size that contradicts the trace is refused here

    def start() -> Iterator[SimRequest]:
        rows: Iterable[Row] = _rows(path, block)
        if limit is not None:
            rows = islice(rows, limit)
        timed = _at_rate(rows, rate, seed) if rate is not None else _in_order(path, rows)
        return _requests(path, timed, block, rate_scale)

    return Workload(path.name, block, start, tuple(notes))


# ---- files and formats


def _open(path: Path) -> TextIO:
    with path.open("rb") as file:
        head = file.read(8)
    for magic, opener in _MAGIC.items():
        if head.startswith(magic):
            opened: TextIO = opener(path, "rt", encoding=_ENCODING)
            return opened
    return path.open(encoding=_ENCODING)


def _rows(path: Path, block: int | None = None) -> Iterator[Row]:
    """The rows of a file, which all say as much as the first one. A fault becomes an ArgumentError that says where.

    Args:
        path: The file.
        block: Tokens for which a hash id stands, if that is known: then each prompt must have as many ids as blocks.
    """
    first = None
    for number, row in _parsed(path):
        first = first or row
        try:
            _check_row(row, first, block)
        except ValueError as error:
            raise ArgumentError(f"{path}: row {number}: {error}") from error
        yield row


def _check_row(row: Row, first: Row, block: int | None) -> None:
    """Raises ValueError if it says more or less than the first row, or its ids do not fit its length."""
    for name, has, should in (
        ("hash_ids", row.ids is not None, first.ids is not None),
        ("arrival time", row.time_s is not None, first.time_s is not None),
        ("session", row.session is not None, first.session is not None),
    ):
        if has != should:
            raise ValueError(
                f"it has {'a' if has else 'no'} {name}, and the first row has {'one' if should else 'none'}"
            )
    if row.time_s is not None and not isfinite(row.time_s):
        raise ValueError(f"its arrival time is {row.time_s}")
    if row.ids is None:
        return
    if wrong := [each for each in row.ids if type(each) is not int or each < 0]:
        raise ValueError(f"hash id {wrong[0]!r} is no whole number from 0")
    most = -(-row.prompt // block) if block is not None else 0
    if block is not None and not row.prompt // block <= len(row.ids) <= most:
        ids = "1 hash id" if len(row.ids) == 1 else f"{len(row.ids)} hash ids"
        blocks = "are 1 block" if most == 1 else f"are {most} blocks"
        raise ValueError(f"{ids} for {row.prompt} tokens, which {blocks} of {block}")


def _parsed(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows, each with its number."""
    number = 0
    try:
        with _open(path) as lines:
            header = next((line for line in lines if line.strip()), "")
            number = 1
            if header.lstrip().startswith("{"):
                yield number, _json_row(header)
                for line in lines:
                    number += 1
                    if line.strip():
                        yield number, _json_row(line)
            elif header:
                reader = csv.reader(lines)
                names = next(csv.reader([header]))
                parse, columns = _csv_parser(path, names), len(names)
                for fields in reader:
                    number += 1
                    if 0 < len(fields) < columns:
                        raise ValueError(f"it has {len(fields)} of {columns} fields")
                    if fields:
                        yield number, parse(fields)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ArgumentError(f"{path}: cannot be read: {error}") from error
    except (ValueError, KeyError, OverflowError, TypeError, RecursionError, csv.Error) as error:
        if isinstance(error, ArgumentError):
            raise
        missing = f"no {error} in it" if isinstance(error, KeyError) else str(error)
        raise ArgumentError(f"{path}: row {number} is no request: {missing}") from error


def _json_row(line: str) -> Row:
    """A line of Mooncake's, or of sessions."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("it is no JSON object")
    ids, session, time = fields.get("hash_ids"), fields.get("session"), fields.get("timestamp")
    if ids is not None and not (isinstance(ids, list) and ids):
        raise ValueError(f"hash_ids is {ids!r}, not a list of numbers")
    return Row(
        None if time is None else float(time) / 1000,
        _length(fields["input_length"]),
        _length(fields["output_length"]),
        ids,
        None if session is None else str(session),
    )


def _csv_parser(path: Path, header: list[str]) -> Callable[[list[str]], Row]:
    """The parser of rows of a file with this header."""
    at = {name.strip(): place for place, name in enumerate(header)}
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= at.keys():
        time, prompt, output = at["TIMESTAMP"], at["ContextTokens"], at["GeneratedTokens"]
        return lambda fields: Row(_seconds(fields[time]), _length(fields[prompt]), _length(fields[output]))
    if {"num_prefill_tokens", "num_decode_tokens"} <= at.keys():
        prompt, output, arrived = at["num_prefill_tokens"], at["num_decode_tokens"], at.get("arrived_at")
        return lambda fields: Row(
            None if arrived is None else float(fields[arrived]), _length(fields[prompt]), _length(fields[output])
        )
    raise ArgumentError(
        f"{path}: no known format. Known are JSON lines with input_length and output_length (and timestamp in ms, "
        "hash_ids, session), and CSV with TIMESTAMP, ContextTokens, GeneratedTokens or with num_prefill_tokens, "
        f"num_decode_tokens (and arrived_at in s). This begins with {', '.join(header)[:100]!r}"
    )


def _length(value: Any) -> int:
    """A number of tokens, at least one: a request without an answer, as some traces have it, would not end."""
    if isinstance(value, bool):
        raise ValueError(f"a length of {value}")
    number = float(value)
    if not 0 <= number < _LONGEST or number != int(number):
        raise ValueError(f"a length of {value}")
    return max(1, int(number))


def _seconds(stamp: str) -> float:
    """The seconds of a date and time with any number of decimals, and maybe a zone, which is the same for all."""
    whole, _, fraction = stamp.strip().partition(".")
    digits = "".join(digit for digit in fraction.partition("+")[0] if digit.isdigit())
    moment = datetime.fromisoformat(whole.removesuffix("Z")).replace(tzinfo=None)
    return (moment - _EPOCH).total_seconds() + (float(f"0.{digits}") if digits else 0.0)


def _block_size(path: Path, rows: Sequence[Row]) -> int:
    """The largest block size with which each prompt has as many blocks as ids; the last partial one may have none."""
    lengths = [(row.prompt, len(row.ids)) for row in rows if row.ids is not None]
    for block in _BLOCKS:
        if all(prompt // block <= ids <= -(-prompt // block) for prompt, ids in lengths):
            return block
    raise ArgumentError(f"{path}: its lengths do not tell how many tokens a hash id stands for; give block_tokens")


# ---- times


def _at_rate(rows: Iterable[Row], rate: float, seed: int) -> Iterator[Row]:
    """A Poisson process in place of the recorded times."""
    random = np.random.default_rng([seed, 1])
    now = 0.0
    source = iter(rows)
    while chunk := list(islice(source, _WINDOW)):
        for row, gap in zip(chunk, random.exponential(1 / rate, len(chunk)).tolist(), strict=True):
            now += gap
            yield row._replace(time_s=now)


def _in_order(path: Path, rows: Iterable[Row]) -> Iterator[Row]:
    """By their times, which begin at 0. Rows a little out of order, as in logs of several servers, are sorted."""
    waiting: list[tuple[float, int, Row]] = []
    numbers = count(1)
    start = last = None
    source = iter(rows)
    ended = False
    while not ended or waiting:
        row = None if ended else next(source, None)
        if row is None:
            ended = True
        else:
            number = next(numbers)
            if row.time_s is None:
                raise ArgumentError(f"{path}: request {number} has no arrival time, others have")
            heapq.heappush(waiting, (row.time_s, number, row))
            if len(waiting) <= _WINDOW:
                continue
        if not waiting:
            break
        time_s, number, row = heapq.heappop(waiting)
        start = time_s if start is None else start
        if last is not None and time_s < last:
            raise ArgumentError(f"{path}: request {number} arrives {last - time_s:g} s before others: sort the trace")
        last = time_s
        yield row._replace(time_s=time_s - start)


def _requests(path: Path, rows: Iterable[Row], block: int, rate_scale: float) -> Iterator[SimRequest]:
    fresh = FreshIds()
    for number, row in enumerate(rows, start=1):
        assert row.time_s is not None  # _at_rate and _in_order give every row one
        ids = fresh.take(-(-row.prompt // block)) if row.ids is None else _known_ids(path, number, row.ids)
        yield SimRequest(row.time_s / rate_scale, ids, row.prompt, row.output, row.session)


def _known_ids(path: Path, number: int, ids: list[int]) -> Ids:
    """As int32. Hashes of 64 bits keep their lowest 31, which are as good as any."""
    try:
        return (np.array(ids, dtype=np.uint64) & np.uint64(_ID_MASK)).astype(np.int32)
    except (ValueError, TypeError, OverflowError) as error:
        raise ArgumentError(f"{path}: request {number} has a hash id that is no number from 0: {error}") from error
